"""The command line: its options, the sources of their values, and one line for each mistake.

Importing torch takes seconds, so the cases share a process: `Lines` runs each command line in a
fork of a server that has imported torch already.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hvdtrain
from hvdtrain.backends import BACKENDS
from hvdtrain.hvd.engine.settings import OWN
from hvdtrain.training import checkpoint
from hvdtrain.training.config import TrainConfig, flag
from tests.forkserver import warm
from tests.launching import ROOT, Finished, clean_env, run, started
from tests.messages import Message
from tests.runs import run_json

HVDTRAIN = [sys.executable, "-m", "hvdtrain"]
HALF = ["--precision", "fp16", "--opt-level", "O2"]
QUICK = ["--task", "mlp", "--set", "samples=64", "--max-steps", "1", "--threads", "1"]


class Lines:
    """Runs command lines of `hvdtrain` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: object, env: Mapping[str, str] | None = None) -> Finished:
        command = warm([*HVDTRAIN, *map(str, arguments)])
        return run(command, cwd=self.folder, env=env)

    def files(self) -> list[Path]:
        """Return the files in the folder, without Python's __pycache__."""
        return sorted(path for path in self.folder.rglob("*") if "__pycache__" not in path.parts)

    def refused(
        self, *arguments: object, env: Mapping[str, str] | None = None, alone: bool = True
    ) -> str:
        """Run a wrong command line; return its error line. Check that it writes no file, and, if
        the line must be `alone`, no other line.
        """
        before = self.files()
        finished = self(*arguments, env=env)
        assert finished.code == 2, finished.output
        assert "Traceback" not in finished.output, finished.output
        (line,) = finished.lines("error:")
        assert not alone or finished.output == line + "\n", "more than the line"
        assert self.files() == before
        return line

    def trained(self, *arguments: object, env: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Train, and return the run.json of a run that must succeed."""
        finished = self(*arguments, "--run-dir", "run", env=env)
        assert finished.code == 0, finished.output
        return run_json(self.folder / "run")

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return name


@pytest.fixture
def line(tmp_path: Path) -> Lines:
    return Lines(tmp_path)


# Help


IMPORTED_BY_HELP = """
import sys, sysconfig
from hvdtrain.cli import main
sys.argv = ["hvdtrain", "--help"]
try:
    main()
finally:
    installed = sysconfig.get_paths()["purelib"]
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    print("imported", *{name.split(".")[0] for name in files if files[name].startswith(installed)})
"""


def test_help_imports_nothing_that_takes_long() -> None:
    """No torch, numpy or rich: what it takes is what Python and click take."""
    finished = run([sys.executable, "-c", IMPORTED_BY_HELP])
    assert finished.code == 0, finished.output
    (line,) = finished.lines("imported ")
    assert {*line.split()[1:]} <= {"click", "psutil", "_distutils_hack"}


def test_help_of_train_lists_every_field(line: Lines) -> None:
    finished = line("train", "--help")
    assert finished.code == 0
    for item in dataclasses.fields(TrainConfig):
        assert flag(item.name) in finished.output, item.name
    assert "--local-rank" not in finished.output


def test_the_module_is_the_script() -> None:
    script = run([Path(sys.executable).with_name("hvdtrain"), "--help"])
    assert run([*HVDTRAIN, "--help"]).output == script.output
    assert "install-horovod" in script.output


def test_version(line: Lines) -> None:
    assert line("--version").output == f"hvdtrain, version {hvdtrain.__version__}\n"


def test_train_is_what_runs_without_a_command(line: Lines) -> None:
    assert line("--epochs", "0").output == line("train", "--epochs", "0").output
    assert "--epochs 0 must be greater" in line.refused("train", "--epochs", 0)


# The sources of values


def test_precedence_and_origins(line: Lines) -> None:
    line.write("c.toml", 'task = "mlp"\nlr = 0.25\nseed = 2\nbatch-size = 4\nset = ["samples=64"]')
    env = {"HVDTRAIN_LR": "0.5", "HVDTRAIN_SEED": "3", "HVDTRAIN_MAX_STEPS": "1"}
    record = line.trained("--config", "c.toml", "--seed", 4, "--threads", 1, env=env)
    config, origins = record["config"], record["origins"]
    assert (config["seed"], origins["seed"]) == (4, "flag")
    assert (config["lr"], origins["lr"]) == (0.5, "environment")
    assert (config["batch_size"], origins["batch_size"]) == (4, "file")
    assert (config["task"], origins["task"]) == ("mlp", "file")
    assert (config["set"], origins["set"]) == (["samples=64"], "file")
    assert (config["epochs"], origins.get("epochs")) == (10, None)


def test_a_table_of_settings(line: Lines) -> None:
    line.write("c.toml", 'task = "mlp"\nmax_steps = 1\n[set]\nsamples = 64')
    record = line.trained(env={"HVDTRAIN_CONFIG": "c.toml"})
    assert record["config"]["set"] == ["samples=64"]


def test_underscores_and_local_rank(line: Lines) -> None:
    for arguments in (["--local-rank=0"], ["--local_rank", "0"]):
        finished = line(*arguments, "--batch_size", "0")
        assert "--batch-size 0 must be greater" in finished.output, arguments


# One line for each mistake


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["--epoch", "1"],
        ["--batch_sise", "1"],
        ["--epochs"],
        ["--epochs", "x"],
        ["--epochs", "1.5"],
        ["--epochs", "-1"],
        ["--lr", "nan"],
        ["--lr", "-1"],
        ["--lr", "inf"],
        ["--clip-norm", "nan"],
        ["--timeout", "inf"],
        ["--timeout", "nan"],
        ["--bucket-mib", "inf"],
        ["--seed", "-1"],
        ["--precision", "fp8"],
        ["--step-epochs", "a"],
        ["--sync-bn", *QUICK],
        ["--step-factor", "0.5"],
        ["--plateau", "loss:3"],
        ["--local-state", "average"],
        ["--outer-lr", "1"],
        ["--compression", "fp16", "--backend", "ddp", *HALF],
        ["--batch-size", "1", "--global-batch-size", "1"],
        ["--config", "no.toml"],
        ["--config", "/"],
        ["--config", "/dev/zero"],
        ["--config", ""],
        ["--run-dir", ""],
        ["--epochs", "1" * 10_000],
        ["--epochs", "1" * 4_000],
        ["--threads", "100000"],
        ["--workers", "100000"],
        ["--timeout", "1e300", "--backend", "ddp"],
        ["--bucket-mib", "1e30"],
        ["--lr", "1e299"],
        ["--batch-size", "9" * 20, "--uneven", "pad", *QUICK],
        ["--set", f"samples={'-' * 100_000}1", "--task", "mlp"],
        ["--set", "samples=" + "9" * 20, "--task", "mlp"],
        ["--resume", "must"],
        ["my.py:Task"],
        ["digits"],
        ["train", "my.py:Task"],
        ["-np", "2"],
        ["train", "-np", "2"],
        ["--nproc_per_node=2", "--task", "mlp"],
        ["--hostfile", "h"],
        ["report", "/dev/zero"],
        ["stray"],
        ["train", "stray"],
        ["--set", "x"],
        ["--set", "sample=1", "--task", "mlp"],
        ["--task", "digitz"],
        ["--task", "no.py:Task"],
        ["--task", "no_such_module:Task"],
        ["--task", "json:JSONDecoder"],
        ["--backend", "hovorod"],
        ["--backend", "DDP"],
        ["--backend", "gloo"],
        ["--backend", "my.py:Thing"],
        ["--task", "my.py"],
        ["--backend", "no_such:Thing"],
        ["--transport", "carrier-pigeon", "--backend", "ddp"],
        ["--transport", "carrier-pigeon"],
        ["--task", "mlp", "--set", "samples=8"],
        ["--run-dir", "/proc/no/run"],
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_a_wrong_command_line(line: Lines, arguments: list[str], message: Message) -> None:
    message(line.refused(*arguments))


@pytest.mark.parametrize(
    "toml",
    [
        "epoch = 1",
        "xyzzy = 1",
        "[train]\nepochs = 1",
        'epochs = "x"',
        "epochs = [1]",
        "epochs = 2.5",
        "epochs = true",
        "epochs = {a = 1}",
        'lr = "fast"',
        "deterministic = 1",
        "task = 5",
        'task = ["mlp"]',
        "step_epochs = [30, 60]",
        'set = "a=1"',
        "set = [1]",
        "epochs = -1",
        'precision = "fp8"',
        "lr = nan",
        "task = 0x" + "f" * 10_000,
        "epochs = 0x" + "f" * 10_000,
    ],
    ids=lambda text: text[:30],
)
def test_a_wrong_file(line: Lines, toml: str, message: Message) -> None:
    line.write("c.toml", toml)
    message(line.refused("--config", "c.toml"))


@pytest.mark.parametrize(
    "toml",
    ["epochs =", "x = " + "[" * 100_000, "epochs = " + "1" * 10_000],
    ids=lambda text: text[:30],
)
def test_a_file_that_is_no_toml(line: Lines, toml: str) -> None:
    """The rest of the sentence is that of Python's parser, and of its version."""
    line.write("c.toml", toml)
    assert "--config c.toml is not TOML" in line.refused("--config", "c.toml")


def test_a_file_that_is_not_utf8(line: Lines) -> None:
    (line.folder / "c.toml").write_bytes(b'task = "\xff"')
    assert "cannot read --config c.toml" in line.refused("--config", "c.toml")


def test_a_whole_number_in_a_file_may_be_a_float(line: Lines) -> None:
    line.write("c.toml", "lr = 1\nepochs = 0")
    assert "--epochs 0" in line.refused("--config", "c.toml")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HVDTRAIN_EPOCH", "1"),
        ("HVDTRAIN_epochs", "1"),
        ("HVDTRAIN_", "1"),
        ("HVDTRAIN_EPOCHS", "x"),
        ("HVDTRAIN_EPOCHS", "0"),
        ("HVDTRAIN_DETERMINISTIC", "perhaps"),
        ("HVDTRAIN_CONFIG", "no.toml"),
        ("WORLD_SIZE", "2"),
        ("PMI_RANK", "1" * 10_000),
    ],
    ids=lambda text: text[:30],
)
def test_a_wrong_variable(line: Lines, name: str, value: str, message: Message) -> None:
    message(line.refused(env={name: value}))


@pytest.mark.parametrize("name", OWN)
def test_a_variable_of_the_horovod_interface(line: Lines, name: str) -> None:
    value = "auto" if name == "HVDTRAIN_TRANSPORT" else "1"
    assert "--epochs 0" in line.refused("--epochs", 0, env={name: value})


def test_help_names_every_backend(line: Lines) -> None:
    text = " ".join(line("train", "--help").output.split())
    described = text.partition("--backend ")[2].partition("--transport ")[0]
    assert [name for name in ("auto", *BACKENDS) if name not in described] == []


# Users' own tasks

TASK = """
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from hvdtrain.training.evaluation import Sum
from torch.utils.data import TensorDataset
from hvdtrain import Task

class Mine(Task):
    size, scale = 64, 1.0
    def model(self): return nn.Linear(2, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def datasets(self): return TensorDataset(torch.ones(self.size, 2)), None
    def loss(self, net, batch): return net(batch[0]).sum() * self.scale

class Empty(Mine):
    size = 0

class Diverging(Mine):
    scale = float("nan")

class Ending(Mine):
    def model(self): raise EOFError("ran out of input")

class Piped(Mine):
    def model(self): raise BrokenPipeError(32, "Broken pipe")

class Leaving(Mine):
    def model(self): raise SystemExit("no data here")

class Evaluated(Mine):
    def datasets(self): return super().datasets()[0], super().datasets()[0]

class Data(Mine):
    def loss(self, net, batch): return net(batch[0]).pow(2).mean()

class Compiled(Data):
    def model(self): return torch.compile(super().model(), backend="eager")
"""


BROKEN = """
import functools
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from hvdtrain import Task
import library

class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): raise LookupError(f"no row {i}")

class Mine(Task):
    def model(self): return nn.Sequential(nn.Linear(3, 1))
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def datasets(self): return TensorDataset(torch.ones(64, 2)), None
    def loss(self, net, batch): return self.inner(net, batch)
    def inner(self, net, batch): return net(batch[0]).sum()

class Loading(Mine):
    def datasets(self): return Rows(), None

class Calling(Mine):
    def datasets(self): return library.load()

class Bare(Mine):
    def datasets(self): return [object()] * 64, None
"""


@pytest.mark.parametrize(
    ("task", "error", "frames"),
    [
        ("Mine", "RuntimeError: mat1 and mat2 shapes", ["in loss", "in inner"]),  # inside torch
        pytest.param(  # inside a loader process
            *("Loading", "LookupError: no row", ["in __getitem__"]), marks=pytest.mark.exhaustive
        ),
        pytest.param(  # inside an installed library
            *("Calling", "OSError: no such data", ["in datasets"]), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_an_error_has_the_frames_of_the_users_code(
    line: Lines, task: str, error: str, frames: list[str]
) -> None:
    line.write("own.py", BROKEN)
    installed = line.folder / "site-packages"
    installed.mkdir()
    (installed / "library.py").write_text("def load(): raise OSError('no such data')\n")
    env = {"PYTHONPATH": f"{installed}:{os.environ.get('PYTHONPATH', ROOT)}"}
    command = ["--task", f"own.py:{task}", "--workers", 1, "--threads", 1]
    finished = line(*command, env=env)
    assert finished.code == 1, finished.output
    shown = finished.lines('  File "')
    assert [frame.rpartition(", ")[2] for frame in shown] == frames, finished.output
    assert all(f"{line.folder}/own.py" in frame for frame in shown)
    assert finished.lines(error), finished.output
    (hint,) = finished.lines("frames of hvdtrain and libraries are left out; --debug shows them")
    for more, variable in (["--debug"], {}), ([], {"HVDTRAIN_DEBUG": "1"}):
        full = line(*command, *more, env={**env, **variable})
        assert full.code == 1, full.output
        number = len(full.lines('  File "'))
        assert f"({number - len(frames)} frames" in hint, (hint, full.output)
        assert full.lines(error)
        assert not full.lines("left out")


def test_debug_shows_what_is_behind_one_line(line: Lines) -> None:
    line.write("own.py", BROKEN)
    line.write("library.py", "")
    command = ["--task", "own.py:Bare", "--threads", 1]
    finished = line(*command)
    assert finished.code == 2
    assert "Traceback" not in finished.output
    debugged = line(*command, "--debug")
    assert debugged.code == 2
    assert debugged.lines(", in collate")
    assert debugged.output.splitlines()[-1] == finished.lines("error:")[0]


# Shell completion


@pytest.mark.parametrize(
    ("words", "found", "not_found"),
    [
        ("", "train evaluate predict export runs show report", "--epochs"),
        ("ev", "evaluate", "export train"),
        ("--ep", "--epochs", "--seed"),
        ("--help", "--help", "--epochs"),
        ("--epochs 3 --check", "--checkpoint-every", "--epochs"),
        ("train --schedule c", "constant cosine", "step"),
        ("evaluate --ba", "--backend --batch-size", "--best"),
        ("no-such-command e", "evaluate export", "train"),
    ],
)
def test_shell_completion(line: Lines, words: str, found: str, not_found: str) -> None:
    env = {
        "_HVDTRAIN_COMPLETE": "bash_complete",
        "COMP_WORDS": f"hvdtrain {words}",
        "COMP_CWORD": str(max(1, len(words.split()))),
        "WORLD_SIZE": "2",  # of a launcher, and incomplete: it does not matter here
    }
    finished = line(env=env)
    assert finished.code == 0, finished.output
    completed = [text.partition(",")[2] for text in finished.output.splitlines()]
    assert set(found.split()) <= set(completed)
    assert not set(not_found.split()) & set(completed)


def test_shell_completion_in_bash(tmp_path: Path) -> None:
    """The script that click writes, in a real shell."""
    bin_folder = Path(sys.executable).parent
    script = f"""
        PATH={bin_folder}:$PATH
        eval "$(_HVDTRAIN_COMPLETE=bash_source hvdtrain)"
        complete -p hvdtrain
        COMP_WORDS=(hvdtrain evaluate --be) COMP_CWORD=2
        _hvdtrain_completion hvdtrain
        echo "${{COMPREPLY[@]}}"
    """
    finished = run(["bash", "--norc", "-c", script], cwd=tmp_path)
    assert finished.output.splitlines()[-1] == "--best", finished.output


def test_a_task_that_has_no_data(line: Lines) -> None:
    line.write("own.py", TASK)
    assert "the training dataset (TensorDataset) is empty" in line.refused("--task", "own.py:Empty")
    said = line.refused("--task", "own.py:Mien")
    assert "it has: Mine, Empty" in said


def test_a_loss_that_is_not_finite(line: Lines) -> None:
    line.write("own.py", TASK)
    finished = line("--task", "own.py:Diverging", "--run-dir", "run")
    assert finished.code == 3
    assert "Traceback" not in finished.output
    (only,) = finished.lines("error:")
    assert "nan" in only
    record = run_json(line.folder / "run")
    assert record["outcome"] == "failed"


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "--help"]])
def test_a_reader_that_has_ended(arguments: list[str]) -> None:
    """As in `hvdtrain runs | head`: no traceback, and the code of a program that SIGPIPE ends."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hvdtrain", *arguments]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, env=clean_env(), timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, ""), done.stderr


@pytest.mark.parametrize(
    ("text", "task", "said"),
    [
        ("import no_such_thing\n", "Mine", "No module named 'no_such_thing'"),
        (TASK, "Ending", "EOFError: ran out of input"),
        (TASK, "Piped", "BrokenPipeError"),
    ],
    ids=["import", "EOFError", "BrokenPipeError"],
)
def test_a_bug_of_the_task_keeps_its_traceback(
    line: Lines, text: str, task: str, said: str
) -> None:
    line.write("own.py", text)
    finished = line("--task", f"own.py:{task}", *QUICK[4:])
    assert finished.code == 1, finished.output
    assert finished.output.count("Traceback (most recent call last)") == 1
    assert said in finished.output
    assert not finished.lines("error:")
    (frame,) = finished.lines("File ")  # no frame of click, torch or hvdtrain
    assert "own.py" in frame


@pytest.mark.parametrize(
    "methods",
    [
        "def model(self): return nn.Linear",
        "def model(self): return nn.LazyLinear(1)",
        "def model(self, width): pass",
        "def optimizer(self, m): return [1]",
        "def datasets(self): pass",
        "def datasets(self): return [object()] * 64, None",
        "def loss(self, net, b): return net(b[0])",
        "def loss(self, net, b): return 0.5",
        "def loss(self, net, b): return net(b[0]).sum().detach()",
        "def loss(self, batch): pass",
        "def metrics(self, net, b): return {'a': 0.5}",
        "def metrics(self, net, b): return net(b[0])",
        "schedule_unit = 'batch'",
        "schedule_metric = 'f1'; schedule = lambda self, o, a, b: ReduceLROnPlateau(o)",
        "def metrics(self, net, b): return {'a': Sum(0.5)}",
        "def derived_metrics(self, totals): return 1",
        "def derived_metrics(self, totals): return {'a': 'b'}",
        "def schedule(self, o, a, b): return 0.5",
        "def schedule(self, o, a, b): return StepLR(SGD([o.x]), 1)",
    ],
)
def test_a_task_method_that_returns_the_wrong_type(
    line: Lines, methods: str, message: Message
) -> None:
    method = methods.replace("SGD([o.x])", "torch.optim.SGD(nn.Linear(1, 1).parameters())")
    line.write("own.py", f"{TASK}\nclass Wrong(Evaluated):\n    {method}\n")
    finished = line("--task", "own.py:Wrong", "--max-steps", 2)
    assert finished.code == 2, finished.output
    assert "Traceback" not in finished.output
    (only,) = finished.lines("error:")
    message(only)


def test_an_error_in_a_loader_process_is_short(line: Lines) -> None:
    line.write(
        "own.py", f"{TASK}\nclass Bad(Mine):\n    def datasets(self): return [None] * 64, None"
    )
    finished = line("--task", "own.py:Bad", "--workers", 1)
    assert finished.code == 2, finished.output
    (only,) = finished.lines("error:")
    assert only.startswith("error: the samples of the dataset do not make a batch")


def test_a_syntax_error_is_one_line(line: Lines) -> None:
    line.write("own.py", "import torch\nclass Mine(:\n")
    line.write("other.py", "import own\n")
    for file in ("own.py", "other.py"):
        assert line.refused("--task", f"{file}:Mine").endswith(
            "own.py, line 2: invalid syntax: class Mine(:"
        )


@pytest.mark.exhaustive
def test_names_do_not_show_that_a_model_is_compiled(line: Lines) -> None:
    """Checkpoints have the names of the plain model; old ones with `_orig_mod` still load."""
    line.write("own.py", TASK)
    wanted = line.trained("--task", "own.py:Data", "--epochs", 2)["params_sha256"]
    finished = line("--task", "own.py:Compiled", "--epochs", 1, "--run-dir", "compiled")
    assert finished.code == 0, finished.output
    (folder,) = (line.folder / "compiled" / "checkpoints").iterdir()
    assert set(checkpoint.load(folder, "model")) == {"weight", "bias"}
    parts = {name: checkpoint.load(folder, name) for name in ("model", "optimizer", "trainer")}
    parts["model"] = {f"_orig_mod.{name}": value for name, value in parts["model"].items()}
    old = checkpoint.save(line.folder / "old", 2, parts, {})
    for task, start in (("Data", folder), ("Compiled", folder), ("Data", old), ("Compiled", old)):
        run_dir = f"{task}-{start.parent.name}"
        arguments = ["--task", f"own.py:{task}", "--epochs", 2, "--resume", start]
        finished = line(*arguments, "--run-dir", run_dir)
        assert finished.code == 0, finished.output
        record = run_json(line.folder / run_dir)
        assert record["params_sha256"] == wanted


def test_one_rank_of_a_distributed_backend_gets_a_hint(line: Lines) -> None:
    finished = line(*QUICK, "--backend", "ddp")
    (backend,) = finished.lines("backend ")
    assert "one rank, so nothing is distributed: more with torchrun --nproc-per-node 2" in backend
    (done,) = finished.lines("done ")
    assert "eval_loss" in done
    assert " loss" not in done


def test_too_few_descriptors(line: Lines) -> None:
    """Without the check Gloo would hang, and `compat` would report that a peer died."""
    facts = "RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost"
    command = f"ulimit -n 24; {facts} MASTER_PORT=1 exec {' '.join(HVDTRAIN)} --backend ddp"
    finished = run(["bash", "-c", command])
    assert finished.code == 2, finished.output
    (only,) = finished.lines("error:")
    assert "ulimit -n is 24" in only


def test_horovod_without_its_launcher(line: Lines) -> None:
    """Without the check its MPI would end the process: "Sorry!  You were supposed to get help"."""
    pytest.importorskip("horovod")
    assert "horovodrun -np 2 hvdtrain --backend horovod" in line.refused("--backend", "horovod")


def test_a_module_whose_own_import_fails(line: Lines) -> None:
    line.write("own_module.py", "import no_such_thing\n")
    finished = run([*HVDTRAIN, "--task", "own_module:Mine"], env={"PYTHONPATH": str(line.folder)})
    assert finished.code == 1
    assert "No module named 'no_such_thing'" in finished.output
    assert "Traceback" in finished.output


def test_a_task_that_exits_with_a_message(line: Lines) -> None:
    line.write("own.py", TASK)
    finished = line("--task", "own.py:Leaving")
    assert finished.code == 1
    assert finished.output == "no data here\n"


# Run directories


def test_a_checkpoint_that_is_not_there(line: Lines) -> None:
    said = line.refused(*QUICK, "--resume", "no/such/checkpoint")
    assert "no/such/checkpoint" in said


def test_damaged_checkpoints(line: Lines) -> None:
    """`--resume must` fails, and `auto` starts afresh with a warning that cannot be overlooked."""
    line.trained(*QUICK)
    again = (*QUICK, "--run-dir", "run", "--resume")
    assert "step 1" in line(*again, "must").lines("resume   from")[0]
    (folder,) = (line.folder / "run" / "checkpoints").iterdir()
    (folder / "model.pt").write_bytes(b"")
    finished = line(*again, "must")
    assert finished.code == 2
    (only,) = finished.lines("error:")
    assert "--resume must found no valid checkpoint in run/checkpoints" in only
    finished = line(*again, "auto")
    assert finished.code == 0
    (warning,) = finished.lines("WARNING")
    assert "none of the 1 checkpoints in run/checkpoints is valid; TRAINING STARTS AGAIN" in warning


def test_a_file_where_the_run_directory_should_be(line: Lines) -> None:
    line.write("file", "")
    assert "cannot write the run directory file" in line.refused(*QUICK, "--run-dir", "file")
    assert "cannot write the run directory" in line.refused(*QUICK, "--run-dir", "file/run")


def test_a_directory_that_has_a_run(line: Lines) -> None:
    line.trained(*QUICK)
    assert "holds a run already" in line.refused(*QUICK, "--run-dir", "run")


def test_two_runs_in_one_directory(line: Lines) -> None:
    command: list[str | Path] = [
        *HVDTRAIN,
        *QUICK[:4],
        "--epochs",
        "100000",
        "--run-dir",
        line.folder / "run",
    ]
    with started(command) as (process, log):
        while not (line.folder / "run" / "metrics.jsonl").exists():
            assert process.poll() is None, log.read_text()
        finished = line(*QUICK, "--run-dir", "run", "--resume", "auto")
    assert finished.code == 2
    (only,) = finished.lines("error:")
    assert "another run is writing to run" in only
