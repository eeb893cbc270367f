"""Every code block of README, CONTRIBUTING and docs/ is run, parsed, or excused by a mark.

A mark is a comment on the lines above a block. It is invisible on the page:

    <!-- runs -->                  each command runs and ends with code 0
    <!-- transcript -->            "$ command" and its output: run, and the output compared
    <!-- tested by tests/x.py -->  that test runs it
    <!-- not run: REASON -->       it needs a cluster, installs, or is a placeholder
    <!-- output: REASON -->        a drawing, or output that is not compared
    <!-- runs: torchrun            Python; also under "python" and "mpirun"
    code before the block
    ---
    code after it
    -->
    <!-- runs: COMMAND -->         Python: saved as my.py, for this command of the page, which runs

Lines below `runs` or `transcript` of commands are a script that runs before the block. The first
words of a line and ": " before the rest give a mark to that line alone, as in
`<!-- not run: sbatch ...: it needs a cluster -->`, `<!-- tested by: srun ...: tests/x.py -->` and
`<!-- runs: hvdtrain init -->`. The options of commands without a mark are parsed, but README and
the first screen of each page (what is before its second section) must have marks.

The blocks of a section run one after another in a folder with the Horovod script train.py, the
task that `hvdtrain init my.py` writes, and the examples. To write the transcripts of all pages, or
of some, anew:

    python -m tests.test_manual [docs/runs.md ...]
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from torch.distributed.run import get_args_parser

from hvdtrain import TrainConfig
from hvdtrain.cli import cli
from hvdtrain.cli.init import TEMPLATE
from tests.environments import EXHAUSTIVE
from tests.forkserver import stop, warm
from tests.launching import ROOT, Finished, first_on_path, run

PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
IN_MAKE_TEST = ("README.md", "docs/start.md: Your own task", "docs/transports.md")
"""Pages and sections; without those that start real Horovod, whose ranks poll."""
LAUNCHERS = {
    "python": "python",
    "torchrun": "torchrun --nproc-per-node 2",
    "mpirun": "mpirun -np 2 python",
}
TRAIN = """
import argparse, torch, horovod.torch as hvd
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
parser.parse_args()
hvd.init()
assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
"""
COMMANDS = "hvdtrain hvdrun train.py hvdtrain.hvd".split()
PROGRAMS = [*COMMANDS, *"python torchrun mpirun horovodrun srun".split()]
COMMENT = r"<!--(?:(?!-->).)*-->"
BLOCK = re.compile(rf"((?:^ *{COMMENT}\n)*)^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(
    r"<!-- (runs|transcript|tested by|not run|output):?(?: ([^\n]*?))? ?(?:\n(.*))?-->", re.DOTALL
)
SHOWN = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
ELISION = "..."
NOISE = re.compile(r"USDT:|\[?W\d{4} ")
"""Lines of torch's profiler and launcher."""


@dataclass(frozen=True)
class Mark:
    kind: str
    line: str
    """The first words of its line; "" for the whole block."""
    text: str
    code: str


@dataclass(frozen=True)
class Block:
    page: str
    section: str
    comments: list[str]
    language: str
    text: str
    has_to_run: bool

    @cached_property
    def transcript(self) -> list[tuple[str, str]]:
        """Commands with their output, if it is one."""
        return SHOWN.findall(re.sub(r"(?<=[,;])\n (?=\S)", " ", self.text))

    @cached_property
    def commands(self) -> list[str]:
        if self.language == "python":
            return [self.text]
        lines = [line for line, _ in self.transcript] or [self.text]
        joined = "\n".join(lines).replace("\\\n", " ").splitlines()
        found = (" ".join(re.sub(r"(^|  +)# .*", "", line).split()) for line in joined)
        return [line for line in found if line]

    @cached_property
    def marks(self) -> list[Mark]:
        found = []
        for comment in self.comments:
            mark = MARK.fullmatch(comment)
            assert mark, f"no mark: {comment}"
            kind, head, code = (part or "" for part in mark.groups())
            line, _, text = head.rpartition(": ")
            if kind == "runs" and not code and self.language != "python":
                line, text = head, ""  # a command
            found.append(Mark(kind, line.removesuffix(" ..."), text, code))
        return found

    def mark_of(self, command: str) -> Mark | None:
        fitting = [mark for mark in self.marks if command.startswith(mark.line)]
        return max(fitting, key=lambda mark: len(mark.line), default=None)

    def is_python(self, mark: Mark) -> bool:
        return self.language == "python" or bool(mark.line and mark.code)


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for found in BLOCK.finditer(text):
        sections = re.findall(r"^## (.*)$", text[: found.start()], re.MULTILINE)
        yield Block(
            page,
            (sections or [""])[-1],
            re.findall(COMMENT, textwrap.dedent(found[1]), re.DOTALL),
            found[2],
            textwrap.dedent(found[3]),
            page == "README.md" or len(sections) < 2,
        )


def sections() -> dict[str, list[Block]]:
    """Return the blocks that run, by page and section."""
    found = defaultdict(list)
    for page in PAGES:
        for block in blocks(page):
            if any(mark.kind in ("runs", "transcript") for mark in block.marks):
                found[f"{page}: {block.section}"].append(block)
    return found


def check(block: Block) -> None:
    """Raise an exception, or exit, if a block is not executed, parsed or excused."""
    whole = [mark for mark in block.marks if not mark.line]
    assert len(whole) < 2, "two marks for all of it"
    for mark in block.marks:
        assert any(block.mark_of(each) is mark for each in block.commands), f"no line for {mark}"
        assert mark.kind in ("runs", "transcript") or mark.text, f"no reason or test: {mark}"
        assert mark.kind != "tested by" or (ROOT / mark.text).is_file(), f"no file: {mark}"
        assert mark.kind != "transcript" or block.transcript, "no transcript"
    for command in block.commands:
        if block.mark_of(command) is None and block.language != "text":
            assert not block.has_to_run, f"it has to run: {command}"
            assert block.language != "python", f"without a mark: {command}"
            check_options(shlex.split(command))


def check_options(words: list[str]) -> None:
    """Parse a command of hvdtrain as it would, with the launcher before it. Raise if that fails."""
    words = [*dropwhile(re.compile(r"\w+=").match, words)]
    assert words[0] in PROGRAMS, f"no command of hvdtrain: {words}"
    if words[0] == "torchrun":
        given = get_args_parser().parse_args(words[1:])
        words = [given.training_script, *given.training_script_args]
    name, *words = dropwhile(lambda word: word not in COMMANDS, words)
    if name in ("train.py", "hvdtrain.hvd"):
        return  # a script of the user's own
    with cli.make_context(name, ["launch"] * (name == "hvdrun") + words) as outer:
        called, command, rest = cli.resolve_command(outer, [*outer._protected_args, *outer.args])
        assert command is not None
        with command.make_context(called, rest, parent=outer) as context:
            if called == "train":
                TrainConfig(**context.params).check()
            elif called == "launch":
                check_options([*context.params["arguments"]])


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_parsed_or_excused(page: str) -> None:
    problems = []
    for block in blocks(page):
        try:
            check(block)
        except (Exception, SystemExit) as error:
            problems.append(f"{block.text}{error!r}")
    assert not problems, "\n\n".join(problems)


def test_every_link_to_a_file_leads_to_one() -> None:
    """`make docs` checks those between the pages, with their anchors."""
    ask = ["git", "ls-files", "*.md"]
    for name in subprocess.check_output(ask, cwd=ROOT, text=True).split():
        for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", (ROOT / name).read_text()):
            is_there = re.match(r"\w+:", link) or (ROOT / name).parent.joinpath(link).exists()
            assert is_there, f"{name} links to {link}"


def test_from_message_to_cause_quotes_messages_of_the_package() -> None:
    """Each part between "..." of a message in a table's first column is in the source."""
    texts = []
    for file in (ROOT / "hvdtrain").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(value, "value", "...") for value in node.values]
                texts.append("".join(p if isinstance(p, str) else "..." for p in parts))
            elif isinstance(node, ast.Constant):
                texts.append(str(node.value))
    source = "\n".join(texts)
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = re.findall("`([^`]+)`", "".join(re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)))
    parts = [part.strip(" :;,.()=") for message in quoted for part in message.split("...")]
    assert len(quoted) > 25
    assert [part for part in parts if part not in source] == []


def rows() -> Iterator[ParameterSet]:
    for name, found in sections().items():
        starts_horovod = any("\nhorovodrun" in block.text for block in found)
        is_quick = name.startswith(IN_MAKE_TEST) and not starts_horovod
        yield pytest.param(found, id=name, marks=() if is_quick else EXHAUSTIVE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("found", [*rows()])
def test_a_section_runs_as_it_stands(found: list[Block], tmp_path: Path) -> None:
    write_files(tmp_path, found)
    problems = [text for block in found for text, _ in execute(block, tmp_path) if text]
    assert not problems, "\n\n".join(problems)


def write_files(folder: Path, found: list[Block]) -> None:
    (folder / "train.py").write_text(TRAIN)
    (folder / "examples").symlink_to(ROOT / "examples")
    if not any("hvdtrain init my.py" in block.commands for block in found):
        (folder / "my.py").write_text(TEMPLATE)


def execute(block: Block, folder: Path) -> Iterator[tuple[str, str]]:
    """Run what is to run of a block. Yield for each command what is wrong, and its output as the
    manual has to show it.
    """
    for mark in block.marks:
        if mark.code and not block.is_python(mark):
            shell(mark.code, folder)
    shown = [output for _, output in block.transcript] or [""] * len(block.commands)
    for command, output in zip(block.commands, shown, strict=True):
        mark = block.mark_of(command) or Mark("", "", "", "")
        problem = ""
        if mark.kind == "transcript":
            problem, output = compare(output.splitlines(), printed(shell(command, folder)))
        elif mark.kind == "runs":
            line = program(block, mark, command, folder) if block.is_python(mark) else command
            done = shell(line, folder)
            problem = done.output if done.code else ""
        yield f"$ {command}\n{problem}" if problem else "", output


def program(block: Block, mark: Mark, code: str, folder: Path) -> str:
    """Write Python to a file; return the command that runs it."""
    before, _, after = mark.code.partition("---\n")
    name = "program.py" if mark.text in LAUNCHERS else "my.py"
    (folder / name).write_text(f"{before}{code}\n{after}")
    if name == "program.py":
        return f"{LAUNCHERS[mark.text]} {name}"
    assert (ROOT / block.page).read_text().count(mark.text) > 1, f"{mark.text} is not on the page"
    return mark.text


def shell(script: str, folder: Path) -> Finished:
    """Run a script, its Python programs forked from a server."""
    programs = first_on_path(Path(warm(["python"])[0]).parent)
    return run(["bash", "-c", script], cwd=folder, env={"COLUMNS": "80", **programs}, timeout=100)


def printed(done: Finished) -> list[str]:
    return re.split(r"\r*\n|\r", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", done.output).rstrip())


def compare(shown: list[str], printed: list[str]) -> tuple[str, str]:
    """Return what is wrong with a transcript, and it with the numbers of this run."""
    wanted, found = plain(shown), plain(printed)
    if ELISION in shown:
        rest = iter(found)
        missing = [text for text in wanted if text != ELISION and text not in rest]
        lines, others = [], iter(printed)
        for text in shown:
            same = (other for other in others if plain([other]) == plain([text]))
            lines.append(text if text == ELISION else next(same, f"{text}  # NOT PRINTED"))
    else:
        missing = wanted if wanted != found else []
        lines = [text for text in printed if not NOISE.match(text)]
    problem = [*missing[:1], "--- is not in what it prints:", *printed] if missing else []
    return "\n".join(problem), "".join(f"{wrapped(text)}\n" for text in lines)


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


def test_a_line_that_is_not_printed_is_found() -> None:
    printed = ["step 10/22  loss 2.3", "USDT:of torch", "", "done     22 steps"]
    for shown in (["step 9/9 loss 1.0", "done 1 steps"], [ELISION, "done 22 steps"]):
        assert not compare(shown, printed)[0]
        assert compare([*shown, "step 1/1 loss 1.0"], printed)[0]
    for shown in ([ELISION, "done 22 epochs"], ["done 22 steps", ELISION, "step 1/1 loss 1.0"]):
        assert compare(shown, printed)[0], shown


def main(pages: list[str]) -> None:
    """Write the transcripts of pages anew."""
    for section, found in sections().items():
        page = section.partition(": ")[0]
        if page not in pages:
            continue
        with tempfile.TemporaryDirectory() as name:
            write_files(Path(name), found)
            for block in found:
                text = (ROOT / page).read_text()
                outputs = [output for _, output in execute(block, Path(name))]
                if block.transcript:
                    pairs = zip(block.transcript, outputs, strict=True)
                    new = "".join(f"$ {line}\n{output}" for (line, _), output in pairs)
                    (ROOT / page).write_text(
                        text.replace(block.text, new.replace(name, "/tmp/mine"))
                    )
    stop()


if __name__ == "__main__":
    main(sys.argv[1:] or PAGES)
