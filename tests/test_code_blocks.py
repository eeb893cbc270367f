"""Every code block and command of README, CONTRIBUTING and the manuals is executed, or listed.

Python runs as it stands there, with what the text around it says (PROGRAMS). The options of
hvdtrain's own commands, under any launcher, are parsed as the command does; those in COMMANDS run.
What cannot run here is in NOT_RUN with the reason, and what is no code in OUTPUT. So a new block
without an entry fails, and an entry without its block. See test_manual.py for the transcripts.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from hvdtrain import TrainConfig
from hvdtrain.cli import cli
from tests.forkserver import warm
from tests.launching import ROOT, run, succeed
from tests.test_manual import SECTIONS

FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TORCHRUN = ["torchrun", "--nproc-per-node", "2"]
MPIRUN = ["mpirun", "-np", "2", sys.executable]
PYTHON = [sys.executable]
DONE = "\nprint('done')\n"


@dataclass(frozen=True)
class Program:
    """How Python runs: what stands before and after it, and its launcher."""

    before: str = ""
    after: str = ""
    launcher: Sequence[str] = tuple(PYTHON)


SUM = """
t = torch.ones(3)
torch.distributed.all_reduce(t)
assert t.tolist() == [2.0] * 3
torch.distributed.destroy_process_group()
"""
PROGRAMS = {
    "transports: import torch": Program(after=SUM, launcher=TORCHRUN),
    "transports: hvdtrain.transports.rendezvous_by_launcher()": Program(
        "import torch, hvdtrain.transports\n", SUM, MPIRUN
    ),
    'transports: torch.distributed.init_process_group("shm")': Program(
        "import torch, hvdtrain.transports\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = torch.nn.Linear(3, 2)\n",
        "net(torch.ones(4, 3)).sum().backward()" + SUM,
        TORCHRUN,
    ),
    "from-horovod: import hvdtrain.hvd as hvd": Program(
        after="hvd.init(); assert hvd.size() == 2; hvd.shutdown()", launcher=TORCHRUN
    ),
    "from-horovod: hvdtrain.run(fn, args=(), num_proc=2)": Program(
        "import hvdtrain, hvdtrain.hvd as hvd\n"
        "def fn():\n    hvd.init()\n    return hvd.size()\n"
        "assert [2, 2] == \\\n"
    ),
    "tasks: def loss(self, net, batch):": Program(
        "import torch\nfrom torch.nn.functional import cross_entropy\n",
        "net = lambda x: torch.zeros(2, 3, 5)\n"
        "mean, weight = loss(None, net, (None, torch.tensor([[1, 2, -100], [4, -100, -100]])))\n"
        "assert abs(mean.item() - 1.6094) < 1e-4 and weight == 3",
    ),
    "methods: average = torch.load(": Program(
        "import os, torch\n"
        "model = torch.nn.Linear(2, 1)\n"
        "folder = 'runs/NAME/checkpoints/step-00000220'\n"
        "os.makedirs(folder)\n"
        "weights = {name: p + 1 for name, p in model.state_dict().items()}\n"
        "torch.save({'EMA': {'weights': weights}}, f'{folder}/callbacks.pt')\n",
        "assert torch.equal(model.bias, weights['bias'])",
    ),
    "tasks: import math": Program(
        after="from types import SimpleNamespace as Object\n"
        "asked = []\n"
        "trainer = Object(progress=Object(step=7), request_checkpoint=lambda: asked.append(7))\n"
        "mine = Lowest()\n"
        "mine.on_evaluate(trainer, {'loss': 0.5})\n"
        "mine.on_evaluate(trainer, {'loss': 0.6})\n"
        "assert asked == mine.kept_steps() == [7]\n"
        "other = Lowest()\n"
        "other.load_state_dict(mine.state_dict())\n"
        "assert other.lowest == 0.5"
    ),
    "tasks: from hvdtrain.training.metrics import Sum, WeightedMean": Program(
        "import math, torch, torchmetrics\n"
        "from torch.nn.functional import cross_entropy\n"
        "confusion = lambda scores, classes: torch.zeros(10, 10)\n"
        "loss, num_tokens = torch.tensor(2.0), 5\n",
        "Mine = type('Mine', (), dict(__init__=__init__, metrics=metrics))\n"
        "found = Mine().metrics(lambda x: torch.zeros(2, 10), (None, torch.tensor([1, 2])))\n"
        "assert list(found) == ['loss', 'token_loss', 'confusion', 'f1']\n"
        "assert derived_metrics(None, {'loss': 0.0}) == {'perplexity': 1.0}",
    ),
}
"""By the page, and by how the code begins."""

SCRIPT = """
import argparse, torch, horovod.torch as hvd
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.parse_args()
hvd.init()
assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
"""
COMMANDS = (
    "torchrun --nproc-per-node 2 -m hvdtrain.hvd train.py --epochs 5",
    "mpirun -np 2 python -m hvdtrain.hvd train.py",
    "horovodrun -np 2 python -m hvdtrain.hvd train.py",
)
"""Run as they stand in a folder with a train.py."""

BY_MAKE = "the session that runs this suite is one of them"
NOT_RUN = {
    "pip install '.[all]'": "make installs it for this suite",
    "sbatch launchers/slurm.sbatch --task digits": "test_slurm.py, on a real Slurm",
    "make demo": "it installs into a bare clone: .ci",
    "make test": BY_MAKE,
    "make test-rest": BY_MAKE,
    "make test-all": BY_MAKE,
    "make soak": "it is run by hand, for hours",
    'make test PYTEST="tests/hvd -x"': BY_MAKE,
    "make .venv/all.installed": BY_MAKE,
    "make check": "CI runs it",
    ". .venv/bin/activate": BY_MAKE,
    "python -m pytest tests/test_world.py": BY_MAKE,
    "python -m pytest tests/backends -k ddp-torchrun-x2": BY_MAKE,
    "python -m pytest tests/test_architecture.py": BY_MAKE,
    "torchrun --nproc-per-node 2 -m hvdtrain --backend ddp OPTIONS": "OPTIONS is the table's",
    "torchrun --nproc-per-node 2 examples/methods.py early_stop --backend ddp": "test_examples.py",
    "torchrun --nproc-per-node 2 examples/methods.py local_sgd --backend ddp": "test_examples.py",
    "torchrun --nproc-per-node 3 examples/parameter_server.py --mode asynchronous": (
        "test_examples.py"
    ),
    f"{' '.join(TORCHRUN)} -m hvdtrain --backend ddp --run-dir runs/mine & sleep 10; kill %1": (
        "test_preemption.py sends the signal"
    ),
}
"""Commands, and why they are neither run nor parsed."""

DRIVER = "tests/launch/test_drivers.py drives it"
FIGURES = "what a long run printed on a quiet machine"
OUTPUT = {
    "from hvdtrain.launch.ray import RayExecutor": DRIVER,
    "from pyspark.sql import SparkSession": "tests/launch/spark_driver.py does the same",
    "task     digits, 2 ranks on 1 host, started by torchrun": FIGURES,
    "hvdtrain/": "the table of files",
    "✓ all 5 trained the same": FIGURES,
    "elastic: 2 ranks, generation 1": "of hosts a, b and c",
    "ok       ddp/shm": "of a machine with a fault",
    "the ranks called different collectives": "collectives/errors.py asserts it",
    "error: lost contact with a peer": "test_hangs.py asserts it",
    "lr       0.2 (not scaled)": FIGURES,
    "backend  ddp over shm on cpu": FIGURES,
    ".............F": "of make steady, on a test with a fault",
}
"""Blocks without a command, by how they begin, and why they are not compared."""


@dataclass(frozen=True)
class Block:
    file: Path
    language: str
    text: str

    @property
    def place(self) -> str:
        """What the tables call the file."""
        return self.file.name if self.file.parent == ROOT else self.file.stem


def blocks(file: Path) -> Iterator[Block]:
    """Return a file's blocks, but for the transcripts that test_manual.py compares."""
    text = file.read_text()
    for found in re.finditer(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        section = (re.findall(r"^## (.*)$", text[: found.start()], re.MULTILINE) or [""])[-1]
        if not (SECTIONS.get(section) == file.name and found[2].startswith("$ ")):
            yield Block(file, found[1], textwrap.dedent(found[2]))


def program_of(block: Block, code: str) -> Program | None:
    text = f"{block.place}: {code}"
    return next((program for begin, program in PROGRAMS.items() if text.startswith(begin)), None)


def code_of(block: Block) -> list[str]:
    """Return the Python that has an entry in PROGRAMS: a block, or a line of one."""
    parts = [block.text] if block.language == "python" else commands(block)
    return [code for code in parts if program_of(block, code) is not None]


def commands(block: Block) -> list[str]:
    """Return a block's commands without comments: its lines, or of a transcript those with "$ "."""
    text = block.text.replace("\\\n", " ")
    lines = [re.sub(r"  +# .*", "", line).strip() for line in text.splitlines()]
    if text.startswith("$ "):
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [" ".join(line.split()) for line in lines if line]


def check_options(words: list[str]) -> None:
    """Parse a command of hvdtrain as it would, with the launcher before it. Raise if that fails."""
    while re.match(r"\w+=", words[0]):
        del words[0]
    if words[0] == "torchrun":
        given = get_args_parser().parse_args(words[1:])
        words = ["-m"] * given.module + [given.training_script, *given.training_script_args]
    elif words[0] in ("mpirun", "horovodrun", "srun"):
        words = words[words.index("hvdtrain" if "hvdtrain" in words else "python") :]
    if words[0] == "hvdrun":
        words = ["hvdtrain", "launch", *words[1:]]
    words = words[words[0] == "python" :]
    words = words[words[0] == "-m" :]
    if words[0] in ("train.py", "hvdtrain.hvd"):
        return  # a script of the user's own
    assert words[0] == "hvdtrain", f"no command of hvdtrain: {words}"
    with cli.make_context("hvdtrain", words[1:]) as outer:
        name, command, rest = cli.resolve_command(outer, [*outer._protected_args, *outer.args])
        assert command is not None
        with command.make_context(name, rest, parent=outer) as context:
            if name == "train":
                TrainConfig(**context.params).check()
            elif name == "launch":
                check_options([*context.params["arguments"]])


def problem(block: Block) -> str:
    """Return "" if a block is executed, or listed with a reason."""
    if block.language == "python":
        listed = any(block.text.startswith(begin) for begin in OUTPUT)
        listed |= block.place == "libraries"  # test_libraries.py runs them
        known = listed or code_of(block) or block.text in README_TASK
        return "" if known else f"no entry in PROGRAMS: {block.text}"
    if block.language == "text" or any(block.text.startswith(begin) for begin in OUTPUT):
        return ""  # a drawing, or output
    for command in commands(block):
        if command in NOT_RUN or command in COMMANDS or program_of(block, command) is not None:
            continue
        try:
            check_options(shlex.split(command))
        except (Exception, SystemExit) as error:
            return f"{command}: {error!r}"
    return ""


README_TASK = [
    block.text
    for block in blocks(ROOT / "README.md")
    if block.language == "python" and "class MyTask(Task)" in block.text
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_block_is_executed_or_listed(file: Path) -> None:
    problems = [text for block in blocks(file) if (text := problem(block))]
    assert not problems, "\n".join(problems)


def test_every_link_to_a_file_leads_to_one() -> None:
    """`make docs` checks those between the pages, with their anchors."""
    ask = ["git", "ls-files", "*.md"]
    for name in subprocess.check_output(ask, cwd=ROOT, text=True).split():
        for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", (ROOT / name).read_text()):
            is_there = re.match(r"\w+:", link) or (ROOT / name).parent.joinpath(link).exists()
            assert is_there, f"{name} links to {link}"


def test_no_entry_is_without_its_block() -> None:
    everything = [block for file in FILES for block in blocks(file)]
    lines = {command for block in everything for command in commands(block)}
    assert {*NOT_RUN, *COMMANDS} <= lines
    for begin in OUTPUT:
        assert any(block.text.startswith(begin) for block in everything), begin
    for begin in PROGRAMS:
        assert any(
            f"{block.place}: {code}".startswith(begin)
            for block in everything
            for code in code_of(block)
        ), begin


def test_readmes_task_can_be_copied(tmp_path: Path) -> None:
    """As my.py, and with the command that README gives before it."""
    (text,) = README_TASK
    (tmp_path / "my.py").write_text(text)
    command = "torchrun --nproc-per-node 2 -m hvdtrain --task my.py:MyTask"
    assert f"`{command}`" in (ROOT / "README.md").read_text()
    assert "done " in succeed(run(warm(command.split()), cwd=tmp_path, timeout=100))


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param(begin, marks=() if begin.startswith("transports") else pytest.mark.exhaustive)
        for begin in PROGRAMS
    ],
)
def test_python_runs_as_it_stands(begin: str, tmp_path: Path) -> None:
    (code,) = {
        code
        for file in FILES
        for block in blocks(file)
        for code in code_of(block)
        if f"{block.place}: {code}".startswith(begin)
    }
    program = PROGRAMS[begin]
    (tmp_path / "program.py").write_text(f"{program.before}{code}\n{program.after}{DONE}")
    found = succeed(run(warm([*program.launcher, "program.py"]), cwd=tmp_path, timeout=100))
    assert "done" in found


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.exhaustive if command[0] in "mh" else ())
        for command in COMMANDS
    ],
)
def test_a_command_runs(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    succeed(run(warm(command.split()), cwd=tmp_path, timeout=100))
