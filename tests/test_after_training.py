"""The commands that follow a run: evaluate, export and runs; and `--init-from`.

The commands of one test share a folder with a run of two ranks. tests/methods/test_inference.py has
what ranks compute.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from hvdtrain.cli import cli
from hvdtrain.errors import HvdtrainError, InputError
from hvdtrain.training import run_dir
from tests.forkserver import warm
from tests.launching import run, succeed
from tests.messages import Message
from tests.test_cli import Lines
from tests.training.test_checkpoint import flip_bit

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from hvdtrain import Task

class Mine(Task):
    def __init__(self, width=3): self.width = width
    def model(self): return nn.Sequential(nn.Linear(2, self.width), nn.Linear(self.width, 1))
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def datasets(self):
        x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.prod(1)), TensorDataset(x[:9], x.prod(1)[:9])
    def loss(self, net, batch): return (net(batch[0]).squeeze(1) - batch[1]).square().mean()

class Silent(Mine):
    def datasets(self): return super().datasets()[0], None

"""
TORCHRUN = "torchrun --nproc-per-node 2 -m hvdtrain"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task, a run of it on two ranks, and its weights as model.pt."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "my.py").write_text(TASK)
    options = "--task my.py:Mine --set width=4 --batch-size 2 --epochs 3 --threads 1 --log-every 1"
    more = "--backend ddp --keep-best loss:max --keep 1 --run-dir run"
    succeed(run(warm(f"{TORCHRUN} {options} {more}".split()), cwd=folder))
    Lines(folder)("export run model.pt")
    return folder


@pytest.fixture
def line(trained: Path, tmp_path: Path) -> Lines:
    """The commands, in a copy of that folder."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return Lines(tmp_path)


# Evaluate


def test_evaluate_under_a_launcher(line: Lines) -> None:
    """tests/methods/test_inference.py has the other backends."""
    expected = line.record()["metrics"]["loss"]
    command = f"{TORCHRUN} evaluate run --backend ddp --threads 1"
    output = succeed(run(warm(command.split()), cwd=line.folder))
    assert output.count(f"done     eval_loss {expected:.4g}") == 1, output


def test_the_best_checkpoint(line: Lines) -> None:
    about = line.record()
    best = about["best_checkpoint"]
    assert best["step"] < about["last_step"], "a loss that falls is largest at first"
    found = json.loads(line("evaluate run --best --json").output.splitlines()[-1])
    assert found["eval_loss"] == pytest.approx(best["value"], rel=1e-6)
    line("export run best.pt --best")
    one, two = (torch.load(line.folder / name) for name in ("best.pt", "model.pt"))
    assert not torch.equal(one["0.weight"], two["0.weight"])


# Export, and training that starts from weights


def test_prefixes_are_stripped(line: Lines) -> None:
    """Those of DistributedDataParallel and of torch.compile. A file has a plain state dict."""
    state = torch.load(line.folder / "model.pt", weights_only=True)
    assert list(state) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert line.record()["params_sha256"][:12] in line("export run again.pt").output
    torch.save({f"module._orig_mod.{k}": v for k, v in state.items()}, line.folder / "wrapped.pt")
    line("export wrapped.pt plain.pt")
    assert list(torch.load(line.folder / "plain.pt")) == list(state)
    # At a rate of almost nothing, the first loss is that of the weights.
    steps = "--max-steps 1 --lr 1e-30 --run-dir next --threads 1"
    finished = line(f"--task my.py:Mine --set width=4 --init-from wrapped.pt {steps}")
    assert finished.lines("init     from wrapped.pt")
    loss, wanted = (line.record(run)["metrics"]["loss"] for run in ("next", "run"))
    assert loss == pytest.approx(wanted, rel=1e-6)


def test_safetensors(line: Lines) -> None:
    pytest.importorskip("safetensors")
    line("export run model.safetensors")
    found = line("evaluate model.safetensors --task my.py:Mine --set width=4")
    assert f"eval_loss {line.record()['metrics']['loss']:.4g}" in found.output
    line.write("bad.safetensors", "x")
    assert "cannot load bad.safetensors" in line.refused("export bad.safetensors x.pt")


# Bad input


def damaged(line: Lines) -> None:
    (path,) = (line.folder / "run" / "checkpoints").glob(f"*{line.record()['last_step']}")
    flip_bit(path / "model.pt")


def without_checkpoint(line: Lines) -> None:
    shutil.rmtree(line.folder / "run" / "checkpoints")


def half_a_record(line: Lines) -> None:
    line.write("run/run.json", '{"format": ')


def of_the_future(line: Lines) -> None:
    line.write("run/run.json", '{"format": 2}')


def nothing(line: Lines) -> None:
    (line.folder / "empty").mkdir()
    line.write("text.pt", "hello")
    torch.save({"model": {}, "epoch": 1}, line.folder / "dict.pt")


@pytest.mark.parametrize(
    ("prepare", "command"),
    [
        (nothing, "evaluate none"),
        (nothing, "evaluate empty"),
        (nothing, "evaluate model.pt"),
        (nothing, "evaluate model.pt --task my.py:Mine"),
        (nothing, "evaluate run --task my.py:Silent"),
        (nothing, "evaluate text.pt --task digits"),
        (nothing, "evaluate dict.pt --task digits"),
        (damaged, "evaluate run"),
        (damaged, "--init-from run --task my.py:Mine"),
        (without_checkpoint, "evaluate run"),
        (half_a_record, "runs run"),
        (of_the_future, "runs run"),
        (nothing, "export run x.bin"),
        (nothing, "--init-from model.pt --task my.py:Mine"),
        (nothing, "runs empty"),
        (nothing, "runs --checkpoints empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_bad_input(line: Lines, prepare: Any, command: str, message: Message) -> None:
    prepare(line)
    message(line.refused(command, alone=False))


def test_a_received_run_does_not_choose_the_code(
    line: Lines, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What its run.json names is executed below the current folder only, and not in the run."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    proof = elsewhere / "executed"
    for evil in (elsewhere / "evil.py", line.folder / "run" / "evil.py"):
        evil.write_text(f"open({str(proof)!r}, 'w')\n{TASK}")
    (line.folder / "link.py").symlink_to(elsewhere / "evil.py")
    about = line.record()
    assert f"task     my.py:Mine of run.json: {line.folder}/my.py" in line("evaluate run").output
    newest = max((line.folder / "run" / "checkpoints").glob("step-*")).relative_to(line.folder)
    for named, command in (
        ("antigravity", "evaluate run"),
        ("link.py", f"evaluate {newest}"),
        ("run/evil.py", "evaluate run/run.json"),
        (f"{elsewhere}/evil.py", "evaluate run"),
    ):
        about["config"]["task"] = spec = f"{named}:Mine"
        line.write("run/run.json", json.dumps(about))
        said = line.refused(command, alone=False)
        assert said.endswith(f"the current folder; if you trust that file, give --task {spec}")
    assert not proof.exists()
    line(f"evaluate run --task {spec}")
    assert proof.exists()


# Runs


def test_runs_are_listed_with_their_outcome(line: Lines, message: Message) -> None:
    line("--task my.py:Mine --lr 1e30 --threads 1 --run-dir more/diverged", 3)
    shutil.copytree(line.folder / "run", line.folder / "more/killed")
    about = line.record()
    del about["metrics"]
    about["outcome"] = "running"
    about["process"] = {"pid": 2**22 + 1, "host": os.uname().nodename}  # above the kernel's largest
    line.write("more/killed/run.json", json.dumps(about))
    (line.folder / "more/damaged").mkdir()
    line.write("more/damaged/run.json", "[")
    shown = re.sub(r"\d{4}-\S+:\d\d", "<time>", line("runs .").output)
    message(shown, loss=f"{line.record()['metrics']['loss']:.4g}")
    assert max(map(len, shown.splitlines())) <= 80


def test_a_run_is_running_while_its_process_lives() -> None:
    process = {"pid": os.getpid(), "host": os.uname().nodename}
    about = {"outcome": "running", "start": run_dir.now(), "process": process}
    assert run_dir.outcome_of(about) == "running"
    # Another process has the id by now: it has started after the run.
    assert run_dir.outcome_of({**about, "start": "2020-01-01T00:00:00.000+00:00"}) == "killed"
    assert run_dir.outcome_of({**about, "process": {"pid": 1, "host": "elsewhere"}}) == "running"
    assert run_dir.outcome_of({**about, "outcome": "failed"}) == "failed"


def test_one_run_is_shown(line: Lines) -> None:
    output = line("runs run").output
    assert "--task my.py:Mine --set ['width=4']" in output
    assert f"params_sha256 {line.record()['params_sha256'][:12]}" in output
    line.write("run/metrics.jsonl", '{"step": 1, "loss": "nan"}\n{"st')
    assert line("runs run").output == output


def test_checkpoints_are_listed_and_verified(line: Lines) -> None:
    last = line.record()["last_step"]
    *_, newest = line("runs --checkpoints run").output.splitlines()
    path = f"run/checkpoints/step-{last:08d}"
    assert re.fullmatch(rf"{path}  step {last}  epoch 3  0\.\d+ MB  20\S+\+00:00  valid", newest)
    (line.folder / "more/empty").mkdir(parents=True)
    line.write("more/empty/run.json", "{}")
    shutil.copytree(line.folder / "run", line.folder / "more/damaged")
    damaged = f"more/damaged/checkpoints/step-{last:08d}"
    os.truncate(line.folder / damaged / "model.pt", 9)
    size = (line.folder / path / "model.pt").stat().st_size
    before = line.files()
    # The newest of a run is damaged, and one has none.
    finished = line("runs . --checkpoints --json", 1)
    assert line.files() == before
    entries = {entry["path"]: entry for entry in json.loads(finished.output)}
    found = entries.pop(damaged)
    assert (found["step"], found["valid"]) == (last, False)
    assert found["reason"] == f"model.pt has 9 bytes instead of {size}"
    assert all(entry["valid"] for entry in entries.values())
    line(f"runs --checkpoints {path}", 2)
    finished = line("runs --checkpoints more", 1)
    assert finished.lines("more/empty/checkpoints  no checkpoint")
    assert finished.lines("NOT VALID: model.pt has 9 bytes")


# A run directory from a stranger


def received(folder: Path, **entries: Any) -> Path:
    """Return a run directory with these entries in its run.json."""
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"format": 1, "outcome": "finished", **entries}))
    return folder


def invoke(arguments: str) -> Result:
    """Run a command line in this process."""
    return CliRunner().invoke(cli, arguments)


def error_of(arguments: str) -> str:
    """Return the text of the InputError that a command line ends with."""
    result = invoke(arguments)
    assert isinstance(result.exception, HvdtrainError), result.output
    return str(result.exception)


@pytest.mark.parametrize(
    "entries",
    [
        {"best_checkpoint": {"step": 1}},
        {"best_checkpoint": {"step": "x", "metric": [], "value": {}}},
        {"config": [1]},
        {"process": 3, "outcome": "running"},
        {"metrics": {"loss": "low"}},
        {"attempts": [3]},
    ],
    ids=str,
)
def test_a_run_json_with_other_values(tmp_path: Path, entries: dict[str, Any]) -> None:
    """Each reader names the file; `runs` lists the other runs all the same."""
    run = received(tmp_path / "run", **entries)
    damaged = f"{run / 'run.json'} is damaged: "
    assert damaged in error_of(f"runs {run}")
    if entries.get("best_checkpoint", {"step": 1}) != {"step": 1}:
        assert damaged in error_of(f"export {run} {tmp_path}/x.pt --best")
    if "process" in entries:  # without a checkpoint it says how the run has ended
        assert damaged in error_of(f"export {run} {tmp_path}/x.pt")
    received(tmp_path / "other")
    listed = invoke(f"runs {tmp_path}")
    assert listed.exit_code == 0, listed.exception
    assert len([row for row in listed.output.splitlines() if not row.startswith(" ")]) == 3


def test_a_fifo_or_a_device_is_not_waited_for(tmp_path: Path) -> None:
    """A FIFO is read when somebody writes to it, and /dev/zero for ever."""
    run = received(tmp_path / "run")
    (run / "run.json").unlink()
    os.mkfifo(run / "run.json")
    (run / "metrics.jsonl").symlink_to("/dev/zero")
    said = [error_of(f"runs {run}"), error_of(f"export {run} {tmp_path}/x.pt")]
    for text in (*said, invoke(f"runs {tmp_path}").output):
        assert "it is not a regular file" in text
    with closing(run_dir.RunDirectory(run, resuming=True)) as directory:
        directory.start({})
        with pytest.raises(InputError, match="it is not a regular file"):
            directory.open_metrics(0)


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    """They could clear it, hide lines, or answer for the user; a line end could forge a line."""
    evil = "a\x1b[2J\x9b5n\u202e\nforged"
    run = received(
        tmp_path / "r\x1b[2Jun",
        outcome=evil,
        start=evil,
        config={"task": evil},
        origins={evil: ""},
        hosts=[evil],
        error=evil,
        metrics={evil: 1.0},
        attempts=[{"outcome": evil}],
        best_checkpoint={"step": 1, "metric": evil, "value": 1.0},
    )
    (run / "checkpoints/step-00000001").mkdir(parents=True)
    given = (run, tmp_path, f"{tmp_path} --checkpoints")
    output = "".join(invoke(f"runs {each}").output for each in given)
    assert output.count("a\\x1b[2J") >= 8
    assert "\\u202e" in output
    assert not {"\x1b", "\x9b", "\u202e"} & set(output)
    assert not [line for line in output.splitlines() if line.startswith("forged")]
    refused = Lines(tmp_path).refused("runs none\x1b[2J", alone=False)
    assert "none\\x1b[2J" in refused
