"""The command line: its options, the sources of their values, and one line for each mistake.

Importing torch takes seconds, so the cases share a process: `Lines` runs each command line in a
fork of a server that has imported torch already.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

import hvdtrain
from hvdtrain import Task, TrainConfig, Trainer
from hvdtrain.backends import BACKENDS
from hvdtrain.cli import SECTIONS, cli
from hvdtrain.cli.train import check_environment
from hvdtrain.errors import InputError
from hvdtrain.hvd.engine.settings import OWN
from hvdtrain.training import checkpoint
from hvdtrain.training.config import flag
from tests.environments import rest, rows
from tests.forkserver import warm
from tests.launching import ROOT, Finished, clean_env, run, variables
from tests.messages import Message
from tests.ranks import single
from tests.runs import Values, run_json

HVDTRAIN = [sys.executable, "-m", "hvdtrain"]
QUICK = "--task mlp --set samples=64 --max-steps 1 --threads 1"


class Lines:
    """Runs command lines of `hvdtrain`, each with its variables before it, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, arguments: str = "", code: int = 0) -> Finished:
        """Run a command line to its end; check its exit code."""
        words = shlex.split(arguments)
        given = [*itertools.takewhile(re.compile(r"\w+=").match, words)]
        line = warm([*HVDTRAIN, *words[len(given) :]])
        finished = run(line, cwd=self.folder, env=variables(" ".join(given)))
        assert finished.code == code, finished.output
        return finished

    def files(self) -> list[Path]:
        """Return the files in the folder, without Python's __pycache__."""
        return sorted(path for path in self.folder.rglob("*") if "__pycache__" not in path.parts)

    def refused(self, arguments: str = "", alone: bool = True) -> str:
        """Run a wrong command line; return its error line. Check that it writes no file, and, if
        the line must be `alone`, no other line.
        """
        before = self.files()
        finished = self(arguments, 2)
        assert "Traceback" not in finished.output, finished.output
        (line,) = finished.lines("error:")
        assert not alone or finished.output == line + "\n", "more than the line"
        assert self.files() == before
        return line

    def record(self, name: str = "run") -> Values:
        """Return the run.json of a run."""
        return run_json(self.folder / name)

    def trained(self, arguments: str) -> Values:
        """Train, and return the run.json of a run that must succeed."""
        self(f"{arguments} --run-dir run")
        return self.record()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)


@pytest.fixture
def line(tmp_path: Path) -> Lines:
    """The commands, in a folder with tasks."""
    made = Lines(tmp_path)
    made.write("own.py", TASK)
    made.write("syntax.py", "import torch\nclass Mine(:\n")
    made.write("imports.py", "import syntax\n")
    return made


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


def test_help_of_train_lists_every_option_and_backend(line: Lines) -> None:
    output = line("train --help").output
    for item in dataclasses.fields(TrainConfig):
        assert flag(item.name) in output, item.name
        if isinstance(item.default, bool) and item.name != "no_check":
            assert flag(f"no-{item.name}") in output
    assert "--local-rank" not in output
    described = output.partition("--backend ")[2].partition("--transport ")[0]
    assert [name for name in ("auto", *BACKENDS) if name not in described] == []


def test_help_has_the_commands_in_sections(line: Lines) -> None:
    sections = re.split(r"^(\S.*):$", line("--help").output, flags=re.MULTILINE)
    found = dict(zip(sections[1::2], sections[2::2], strict=True))
    for title, names in SECTIONS.items():
        assert re.findall(r"^  ([a-z-]+)  ", found[title], re.MULTILINE) == names.split()


def test_init_writes_a_task(line: Lines) -> None:
    line("init my.py")
    assert len((line.folder / "my.py").read_text().splitlines()) == 25


def test_train_is_what_runs_without_a_command(line: Lines) -> None:
    assert line.refused("--epochs 0") == line.refused("train --epochs 0")
    assert line("--version").output == f"hvdtrain, version {hvdtrain.__version__}\n"


# The sources of values


def test_precedence_and_origins(line: Lines) -> None:
    toml = 'task = "mlp"\nlr = 0.25\nseed = 2\nbatch-size = 4\n[set]\nsamples = 64'
    line.write("c.toml", toml)
    given = "HVDTRAIN_CONFIG=c.toml HVDTRAIN_LR=0.5 HVDTRAIN_SEED=3 HVDTRAIN_MAX_STEPS=1"
    record = line.trained(f"{given} train --seed 4 --threads 1")
    wanted = {
        "seed": (4, "flag"),
        "lr": (0.5, "environment"),
        "batch_size": (4, "file"),
        "task": ("mlp", "file"),
        "set": (["samples=64"], "file"),
        "epochs": (None, None),
    }
    found = {name: (record["config"][name], record["origins"].get(name)) for name in wanted}
    assert found == wanted


def test_each_boolean_option_can_be_taken_back(line: Lines) -> None:
    """A flag counts before a variable and the file, also where it says no. The file may have whole
    numbers for floats, and a list of settings.
    """
    line.write("c.toml", 'deterministic = true\nlr = 1\ntask = "mlp"\nset = ["samples=64"]')
    given = " ".join(f"HVDTRAIN_{n}=1" for n in "TENSORBOARD NO_CHECK COMPILE MAX_STEPS".split())
    flags = "--no-tensorboard --check --no-compile --no-deterministic --threads 1"
    record = line.trained(f"{given} train --config c.toml {flags}")
    assert [name for name, value in record["config"].items() if value is True] == ["init_strict"]
    assert record["origins"]["compile"] == record["origins"]["deterministic"] == "flag"
    assert (record["config"]["lr"], record["config"]["set"]) == (1.0, ["samples=64"])


def test_the_variables_of_the_manual_and_of_the_horovod_interface_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manual = (ROOT / "docs" / "files.md").read_text()
    for name in [*OWN, *re.findall(r"`(HVDTRAIN_[A-Z_]+[A-Z])[`=]", manual)]:
        monkeypatch.setenv(name, "1")
    assert "HVDTRAIN_PURE_PYTHON" in os.environ
    check_environment()


# One line for each mistake. training/test_config.py and training/test_task.py have more values.
# Each ends with code 2, and writes nothing.
WRONG = f"""
trian
my.py:Task
HVDTRAIN_EPOCH=2 train
HVDTRAIN_epochs=2 train
WORLD_SIZE=2 train
train stray
train my.py:Task
-np 2
--nproc_per_node=2 --task mlp
--batch_sise 1
--epochs x
--local-rank=0 --batch_size 0
--threads 100000
--timeout 1e300 --backend ddp
--sync-bn {QUICK}
--compression fp16 --backend ddp --precision fp16 --opt-level O2
--batch-size {"9" * 20} --uneven pad {QUICK}
--task mlp --set samples=8
--task mlp --set samples={"9" * 20}
--task my.py
--task own.py:Other
--task imports.py:Mine
--backend DDP
--backend gloo
--backend my.py:Thing
--backend no_such:Thing
--backend horovod  # its MPI would end the process without a reason
--transport carrier-pigeon
--config no.toml
--config /dev/zero
--run-dir /proc/no/run
--resume must
--resume no/such/checkpoint {QUICK}
init own.py other.py
init own.py
init own
init nowhere/my.py
report /dev/zero
doctor --need shmm
doctor -H a:b
compare --arms ddp/pigeon
compare --arms pigeon
compare --arms ,
compare --arms ddp/shm,ddp
compare --baseline horovod/mpi --arms ddp/gloo
compare --budget soon
compare --target-ci 2
compare --max-foreign 101%
compare --max-foreign 1
compare -np two
compare -np 0
compare --train "'a"
compare --task digit
compare --task own.py
compare --output .
compare --against x.json
compare --fail-slower 5% --against no.json
compare 'python -c 1' --task mlp --set a=b
compare 'python -c 1' 'python -c 2' -n one
compare "python 'a.py"
compare "python a.py"
compare "''"
compare 'python -c 1' --baseline b
compare 'python nothere.py'
compare 'A=1'
compare 'A=1 python nothere.py'
launch python
launch -np 2
launch -np 2 absent-command
launch -np 2 absent.py
launch -np 3 -H a:2 python
launch -H a,b --nnodes 3 python
launch -H a --hostfile b python
launch --hostfile absent python
launch -np 1 -x NO_SUCH python
launch -H nohost --rsh 'no-such {{host}}' python
launch -H nohost --rsh rsh python
launch -H nohost --rsh 'rsh {{name}}' python
launch -np 0 python
launch -np 1 --min-np 1 python
launch -np 1 --reset-limit 1 python
launch -np 1 --rsh srun -p 22 python
launch --host-discovery-script x -H a python
launch -np 1 --output-filename /dev/null/x python
launch --host-discovery-script x --min-np 3 --max-np 2 python
"""


@pytest.mark.parametrize("arguments", rows(WRONG))
def test_a_wrong_command_line(line: Lines, arguments: str, message: Message) -> None:
    message(line.refused(arguments))


TOML = """
epoch = 1
epochs = 2.5
epochs = true
lr = "fast"
deterministic = 2
set = [1]
precision = "fp8"
"""


@pytest.mark.parametrize("toml", rows(TOML))
def test_a_wrong_file(line: Lines, toml: str, message: Message) -> None:
    line.write("c.toml", toml)
    message(line.refused("--config c.toml"))


@pytest.mark.parametrize(
    ("toml", "what"),
    [
        (b"epochs =", "is not TOML"),
        (b"x = " + b"[" * 100_000, "is not TOML"),
        (b"epochs = " + b"1" * 10_000, "is not TOML"),
        (b"task = 0x" + b"f" * 10_000, "is not TOML"),
        (b'task = "\xff"', "cannot read"),
    ],
    ids=["incomplete", "nested", "many digits", "many hexadecimal digits", "not UTF-8"],
)
def test_a_file_that_is_no_toml(line: Lines, toml: bytes, what: str) -> None:
    """The rest of the sentence is that of Python's parser, and of its version."""
    (line.folder / "c.toml").write_bytes(toml)
    found = line.refused("--config c.toml")
    assert what in found
    assert "--config c.toml" in found


def test_a_huge_value_is_a_mistake_like_another(line: Lines) -> None:
    for digits in (4_000, 10_000):  # Python converts up to 4,300
        assert "--epochs" in line.refused(f"--epochs {'1' * digits}")
    assert "samples=" in line.refused(f"--task mlp --set samples={'-' * 100_000}1")
    assert "PMI_RANK" in line.refused(f"PMI_RANK={'1' * 10_000} train")


LIMITED = """
import resource, sys
from hvdtrain.cli import main
resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
sys.argv = ["hvdtrain", "--backend", "ddp"]
main()
"""


def test_too_few_descriptors() -> None:
    """Without the check Gloo would hang, and `compat` would report that a peer died."""
    env = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    finished = run(warm([sys.executable, "-c", LIMITED]), env=env)
    assert finished.code == 2, finished.output
    (only,) = finished.lines("error:")
    assert "ulimit -n is 24" in only


def test_one_rank_of_a_distributed_backend_gets_a_hint(line: Lines) -> None:
    finished = line(f"{QUICK} --backend ddp")
    (backend,) = finished.lines("backend ")
    assert "one rank, so nothing is distributed; for more: torchrun --nproc-per-node 2" in backend
    (done,) = finished.lines("done ")
    assert "eval_loss" in done
    assert " loss" not in done


def test_a_reader_that_has_ended() -> None:
    """As in `hvdtrain runs | head`: no traceback, and the code of a program that SIGPIPE ends."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*HVDTRAIN, "--help"],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=clean_env(),
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_damaged_checkpoints(line: Lines) -> None:
    """`--resume must` fails, and `auto` starts afresh with a warning that cannot be overlooked."""
    line.trained(QUICK)
    (folder,) = (line.folder / "run" / "checkpoints").iterdir()
    (folder / "model.pt").write_bytes(b"")
    again = f"{QUICK} --run-dir run --resume"
    (only,) = line(f"{again} must", 2).lines("error:")
    assert "--resume must found no valid checkpoint in run/checkpoints" in only
    (warning,) = line(f"{again} auto").lines("WARNING")
    assert "none of the 1 checkpoints in run/checkpoints is valid; TRAINING STARTS AGAIN" in warning


def test_a_resumed_run_keeps_its_options(line: Lines) -> None:
    """All but those that are given anew; the checkpoint is in the middle of an epoch."""
    line.trained(f"{QUICK} --seed 3")
    again = "--resume must --run-dir run --max-steps 2 --threads 1"
    (error,) = line(f"{again} --seed 4", 2).lines("error:")
    assert "in the order of --seed 3: --seed 4 would leave" in error
    kept = "options  of the run before: --task mlp --set samples=64 --seed 3"
    assert line(again).lines("options ") == [kept]
    found = line.record()
    config = {name: found["config"][name] for name in ("task", "seed", "set", "max_steps")}
    assert config == {"task": "mlp", "seed": 3, "set": ["samples=64"], "max_steps": 2}
    assert (found["origins"]["seed"], found["last_step"]) == ("run.json", 2)


# Shell completion


@pytest.mark.parametrize(
    ("words", "found", "not_found"),
    [
        ("", "train evaluate export runs report", "--epochs"),
        ("ev", "evaluate", "export train"),
        ("--ep", "--epochs", "--seed"),
        ("--epochs 3 --check", "--checkpoint-every", "--epochs"),
        ("train --device c", "cpu cuda", "auto"),
        ("no-such-command e", "evaluate export", "train"),
    ],
)
def test_shell_completion(words: str, found: str, not_found: str) -> None:
    *before, incomplete = words.split(" ")
    completer = BashComplete(cli, {}, "hvdtrain", "_HVDTRAIN_COMPLETE")
    completed = {item.value for item in completer.get_completions(before, incomplete)}
    assert {*found.split()} <= completed
    assert not {*not_found.split()} & completed


def test_shell_completion_in_bash(tmp_path: Path) -> None:
    """The script that click writes, in a real shell, below a launcher's incomplete variables."""
    script = f"""
        export WORLD_SIZE=2
        PATH={Path(sys.executable).parent}:$PATH
        eval "$(_HVDTRAIN_COMPLETE=bash_source hvdtrain)"
        complete -p hvdtrain
        COMP_WORDS=(hvdtrain evaluate --be) COMP_CWORD=2
        _hvdtrain_completion hvdtrain
        echo "${{COMPREPLY[@]}}"
    """
    finished = run(["bash", "--norc", "-c", script], cwd=tmp_path)
    assert finished.output.splitlines()[-1] == "--best", finished.output


# Users' own tasks


TASK = """
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from hvdtrain.training.metrics import Sum
from torch.utils.data import TensorDataset
from hvdtrain import Task

class Mine(Task):
    size, scale = 64, 1.0
    def model(self): return nn.Linear(2, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def datasets(self): return TensorDataset(torch.ones(self.size, 2)), None
    def loss(self, net, batch): return net(batch[0]).sum() * self.scale

class Other(Mine):
    def loss(self, batch): pass

class Diverging(Mine):
    scale = float("nan")

class Leaving(Mine):
    def model(self): raise SystemExit("no data here")

class Unbatched(Mine):
    def datasets(self): return [object()] * 64, None

class Evaluated(Mine):
    def datasets(self): return super().datasets()[0], super().datasets()[0]

class Data(Mine):
    def loss(self, net, batch): return net(batch[0]).pow(2).mean()

class Compiled(Data):
    def model(self): return torch.compile(super().model(), backend="eager")
"""


@pytest.mark.parametrize(
    "methods",
    [
        "def model(self): return nn.Linear",
        "def model(self): return nn.LazyLinear(1)",
        "def optimizer(self, m): return [1]",
        "size = 0",
        "def datasets(self): pass",
        "def datasets(self): return [object()] * 64, None",
        "def loss(self, net, b): return net(b[0])",
        "def loss(self, net, b): return 0.5",
        "def loss(self, net, b): return net(b[0]).sum().detach()",
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
    tmp_path: Path, methods: str, message: Message
) -> None:
    method = methods.replace("SGD([o.x])", "torch.optim.SGD(nn.Linear(1, 1).parameters())")
    namespace: dict[str, type[Task]] = {}
    exec(f"{TASK}\nclass Wrong(Evaluated):\n    {method}\n", namespace)
    config = TrainConfig(max_steps=2, run_dir=str(tmp_path / "run"))
    with pytest.raises(InputError) as caught:
        Trainer(namespace["Wrong"](), single(), config).fit()
    message(caught.value)


@pytest.mark.parametrize(
    ("task", "code", "said"),
    [
        ("Unbatched --workers 1", 2, "error: the samples of the dataset do not make a batch"),
        ("Diverging", 3, "error: the loss became nan"),
    ],
)
def test_an_error_of_the_run_is_one_line(line: Lines, task: str, code: int, said: str) -> None:
    """Also of a loader process."""
    finished = line(f"--task own.py:{task} --run-dir run", code)
    assert "Traceback" not in finished.output
    (only,) = finished.lines("error:")
    assert said in only
    assert line.record()["outcome"] == "failed"


def test_a_task_that_exits_with_a_message(line: Lines) -> None:
    assert line("--task own.py:Leaving", 1).output == "no data here\n"


BROKEN = """
import sys
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from hvdtrain import Task
if "broken.py:Importing" in sys.argv: import no_such_thing
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

class Ending(Mine):
    def model(self): raise EOFError("ran out of input")

class Piped(Mine):
    def model(self): raise BrokenPipeError(32, "Broken pipe")

class Loading(Mine):
    def datasets(self): return Rows(), None

class Calling(Mine):
    def datasets(self): return library.load()
"""


@pytest.mark.parametrize(
    ("task", "error", "frames"),
    [
        ("Mine", "RuntimeError: mat1 and mat2 shapes", ["in loss", "in inner"]),  # inside torch
        ("Importing", "ModuleNotFoundError: No module named 'no_such_thing'", ["in <module>"]),
        # which click would report as Ctrl-C, and hide
        ("Ending", "EOFError: ran out of input", ["in model"]),
        ("Piped", "BrokenPipeError: [Errno 32] Broken pipe", ["in model"]),
        # inside a loader process: the last of torch's text
        rest("Loading", "LookupError: no row", ["in __getitem__"]),
        rest("Calling", "OSError: no such data", ["in datasets"]),  # inside an installed library
    ],
)
def test_a_bug_of_the_task_has_the_frames_of_the_users_code(
    line: Lines, task: str, error: str, frames: list[str]
) -> None:
    line.write("broken.py", BROKEN)
    installed = line.folder / "site-packages"
    installed.mkdir()
    (installed / "library.py").write_text("def load(): raise OSError('no such data')\n")
    path = f"PYTHONPATH={installed}:{os.environ.get('PYTHONPATH', ROOT)}"
    command = f"train --task broken.py:{task} --workers 1 --threads 1"
    finished = line(f"{path} {command}", 1)
    shown = finished.lines('  File "')
    own = [frame for frame in shown if f"{line.folder}/broken.py" in frame]
    assert [frame.rpartition(", ")[2] for frame in own] == frames, finished.output
    assert own == shown or task == "Loading"
    assert finished.lines(error), finished.output
    assert not finished.lines("error:")
    assert task == "Loading" or len(finished.lines("Traceback (most recent call last)")) == 1
    (hint,) = finished.lines(
        "frames of hvdtrain and libraries are left out; HVDTRAIN_DEBUG=1 shows"
    )
    full = line(f"{path} HVDTRAIN_DEBUG=1 {command}", 1)
    number = len(full.lines('  File "'))
    assert f"({number - len(shown)} frames" in hint, (hint, full.output)
    assert full.lines(error)
    assert not full.lines("left out")


def test_debug_shows_what_is_behind_one_line(line: Lines) -> None:
    command = "train --task own.py:Unbatched --threads 1"
    finished = line(command, 2)
    assert "Traceback" not in finished.output
    debugged = line(f"HVDTRAIN_DEBUG=1 {command}", 2)
    assert debugged.lines(", in collate")
    assert debugged.output.splitlines()[-1] == finished.lines("error:")[0]


@pytest.mark.exhaustive
def test_names_do_not_show_that_a_model_is_compiled(line: Lines) -> None:
    """Checkpoints have the names of the plain model; old ones with `_orig_mod` still load."""
    wanted = line.trained("--task own.py:Data --epochs 2")["params_sha256"]
    line("--task own.py:Compiled --epochs 1 --run-dir compiled")
    (folder,) = (line.folder / "compiled" / "checkpoints").iterdir()
    assert set(checkpoint.load(folder, "model")) == {"weight", "bias"}
    parts = {name: checkpoint.load(folder, name) for name in ("model", "optimizer", "trainer")}
    parts["model"] = {f"_orig_mod.{name}": value for name, value in parts["model"].items()}
    old = checkpoint.save(line.folder / "old", 2, parts, {})
    for task, start in (("Data", folder), ("Compiled", old)):
        line(f"--task own.py:{task} --epochs 2 --resume {start} --run-dir {task}")
        assert line.record(task)["params_sha256"] == wanted
