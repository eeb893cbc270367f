"""The transcripts of docs/ are what the commands print.

The commands of a section run one after another in a folder. What differs between two runs is
masked: numbers, hashes, hosts, folders, bars. A transcript with a line `...` has some of the lines,
in their order. After a change of what a command prints, write the manual's transcripts anew:

    python -m tests.test_manual
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.forkserver import stop, warm
from tests.launching import ROOT, run

SECTIONS = {
    "One process, then two": "start.md",
    "Your own task": "start.md",
    "Watching a run": "runs.md",
    "Checkpoints": "runs.md",
    "After training": "runs.md",
}
"""The sections whose transcripts are compared, each with its page."""
ELISION = "..."
NOISE = re.compile(r"USDT:|\[?W\d{4} ")
"""Lines of torch's profiler and launcher."""

FILES = {
    "my.py": """\
import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvdtrain import Task


class MyTask(Task):
    def model(self):
        return nn.Linear(9, 1)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def datasets(self):
        return TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), None

    def loss(self, net, batch):
        x, y = batch
        return nn.functional.mse_loss(net(x), y)
""",
    "scans.py": """\
from hvdtrain.tasks.digits import Digits


class Damaged(Digits):
    def datasets(self):
        train, test = super().datasets()
        train[300][0][0, 4, 4] = float("nan")
        return train, test
""",
}
"""The tasks of the commands."""


@dataclass
class Transcript:
    """A command, what the manual shows of its output, and what it prints."""

    command: str
    shown: list[str]
    printed: list[str]

    def problem(self) -> str:
        """Return "" if the manual shows what the command prints, else a text with both."""
        shown, printed = plain(self.shown), plain(self.printed)
        if ELISION in shown:
            rest = iter(printed)
            left = [text for text in shown if text != ELISION and text not in rest]
        else:
            left = [] if shown == printed else shown
        if not left:
            return ""
        parts = ["$ " + self.command, *left[:1], "--- is not in what it prints:", *self.printed]
        return "\n".join(parts)

    def anew(self) -> list[str]:
        """Return the lines for the manual: those that it shows, with the numbers of this run."""
        if ELISION not in self.shown:
            return [wrapped(text) for text in self.printed if not NOISE.match(text)]
        lines, rest = [], iter(self.printed)
        for text in self.shown:
            same = (other for other in rest if plain([other]) == plain([text]))
            lines.append(text if text == ELISION else wrapped(next(same, f"{text}  # NOT PRINTED")))
        return lines


def plain(output: list[str]) -> list[str]:
    """Mask what differs between two runs, and leave out lines of torch and empty ones."""
    lines = []
    for text in output:
        if NOISE.match(text):
            continue
        text = re.sub(r"(params_sha256) [0-9a-f]{12}", r"\1 #", text)
        text = re.sub(r"^(backend .* on|.*(?:rank|process) \d+ on) [^\s:]+(:|$)", r"\1 #\2", text)
        text = re.sub(r'"/[^"]*/', '"', text)
        text = re.sub(r"[ ▁▂▃▄▅▆▇█━╸╺^~]+", " ", text)  # marks in a traceback: Python 3.11
        lines.append(re.sub(r"-?\d[\d.:e+T-]*|-:--:--", "#", text).strip())
    return [text for text in lines if text]


def wrapped(text: str) -> str:
    """Break a long line, so that each of its lines but the first begins with a space."""
    parts = [""]
    for word in re.split(r"(?<=[,;]) ", text):
        if len(parts[-1]) + len(word) > 140 and parts[-1]:
            parts.append("")
        parts[-1] += f" {word}" if parts[-1] or len(parts) > 1 else word
    return "\n".join(parts)


def unwrapped(block: str) -> str:
    return re.sub(r"(?<=[,;])\n (?=\S)", " ", block)


def page_of(section: str) -> Path:
    return ROOT / "docs" / SECTIONS[section]


def blocks(section: str) -> list[re.Match[str]]:
    """Return the blocks of a section that begin with a command."""
    text = page_of(section).read_text()
    start = text.index(f"\n## {section}\n")
    end = text.find("\n## ", start + 1)
    found = re.compile(r"^```\n(\$ .*?)^```$", re.MULTILINE | re.DOTALL)
    return list(found.finditer(text, start, end if end >= 0 else len(text)))


def transcripts(block: str, folder: Path) -> list[Transcript]:
    """Run the commands of a block."""
    found = []
    for part in re.split(r"^\$ ", unwrapped(block), flags=re.MULTILINE)[1:]:
        command, *shown = part.rstrip("\n").split("\n")
        found.append(Transcript(command, shown, output_of(command, folder)))
    return found


def output_of(command: str, folder: Path) -> list[str]:
    """Return the lines that a command prints."""
    program = shlex.split(command, comments=True)
    output = run(warm(program), cwd=folder, env={"COLUMNS": "80"}, timeout=100).output
    return re.split(r"\r*\n|\r", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output).rstrip())


def write_files(folder: Path, section: str) -> None:
    """Write the tasks that the commands of a page name; those of start.md write their own."""
    if SECTIONS[section] != "start.md":
        for name, text in FILES.items():
            (folder / name).write_text(text)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "section",
    [
        pytest.param(name, marks=() if name == "Your own task" else pytest.mark.exhaustive)
        for name in SECTIONS
    ],
)
def test_the_manual_shows_what_the_commands_print(section: str, tmp_path: Path) -> None:
    write_files(tmp_path, section)
    found = [one for block in blocks(section) for one in transcripts(block[1], tmp_path)]
    assert found
    problems = [problem for one in found if (problem := one.problem())]
    assert not problems, "\n\n".join(problems)


def test_a_line_that_is_not_printed_is_found() -> None:
    printed = ["step 10/22  loss 2.3", "USDT:of torch", "", "done     22 steps"]
    for shown in (["step 9/9 loss 1.0", "done 1 steps"], [ELISION, "done 22 steps"]):
        assert not Transcript("x", shown, printed).problem()
    for shown in (["step 10/22 loss 2.3"], [ELISION, "done 22 epochs"], ["done 22 steps", ELISION]):
        wrong = Transcript("x", [*shown, "step 1/1 loss 1.0"], printed).problem()
        assert wrong.startswith("$ x\n"), shown
    long = ", ".join(f'"name{k}": {k}.5' for k in range(30))
    assert unwrapped(wrapped(long)) == long
    assert max(map(len, wrapped(long).split("\n"))) <= 160


def main() -> None:
    """Write the transcripts anew; the sections' names may be given."""
    for section in sys.argv[1:] or SECTIONS:
        with tempfile.TemporaryDirectory() as folder:
            write_files(Path(folder), section)
            page = page_of(section)
            text = page.read_text()
            for block in blocks(section):
                lines = []
                for one in transcripts(block[1], Path(folder)):
                    lines += [f"$ {one.command}", *one.anew()]
                text = text.replace(block[1], "\n".join([*lines, ""]), 1)
            page.write_text(text.replace(folder, "/tmp/mine"))
    stop()


if __name__ == "__main__":
    main()
