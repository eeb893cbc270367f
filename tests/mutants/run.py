"""What the tests can see: `make mutants` seeds one fault after another, and runs its tests.

    python -m tests.mutants.run [--jobs N] [--tree COMMIT] [--out FILE] [names of faults]

The faults are in faults.toml. Each job works on a copy of the tree in a temporary folder. A fault
is `killed` by a test that fails with it, of `make test` or else of `make test-rest`; by a `hang` if
its tests do not end in time; else it is `alive`. At the end all tests that have killed a fault run
once without any: a fault whose test fails then is `unsound`, as is one whose tests could not be
run. The results are written with the commit. Ends with 1 if a fault is unsound, or alive and not
accepted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from hatch_build import compile_page
from tests.launching import ROOT, kill, started

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RESULTS = ROOT / "benchmarks/results/mutants.json"
LIMIT_S = 300.0
"""For the tests of one fault: what hangs with a fault waits for the limits of the tests."""
RINGS = ("not exhaustive and not soak", "exhaustive and not soak")
"""The marks of `make test` and of `make test-rest`."""


@dataclass(frozen=True)
class Fault:
    """A table of faults.toml."""

    name: str
    wrong: str
    file: str
    text: str
    replacement: str
    tests: str
    accepted: str = ""

    def apply(self, source: str) -> str:
        """Return the source of the file with the fault. Raises ValueError unless `text` is there
        exactly once.
        """
        if (found := source.count(self.text)) != 1:
            raise ValueError(f"{self.name}: its text occurs {found} times in hvdtrain/{self.file}")
        return source.replace(self.text, self.replacement)


_TABLES = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))
FAULTS = {name: Fault(name, **table) for name, table in _TABLES.items()}


def copy_tree(target: Path, commit: str) -> None:
    """Copy the files of the working tree that git knows, or those of a commit."""
    known = "git ls-files -z | tar -c --null --files-from=- --ignore-failed-read"
    archive = f"git archive {commit}" if commit else known
    target.mkdir()
    script = f"set -o pipefail; {archive} | tar -x -C {target}"
    subprocess.run(["bash", "-c", script], cwd=ROOT, check=True)
    page = target / "hvdtrain/transports/page.c"
    compile_page(page, page.with_name("libpage.so"))
    for other_mpi in ROOT.glob(".venv-*"):
        (target / other_mpi.name).symlink_to(other_mpi)


@contextlib.contextmanager
def seeded(tree: Path, fault: Fault) -> Iterator[None]:
    """Apply a fault to a tree inside the block."""
    file = tree / "hvdtrain" / fault.file
    before = file.read_text()
    # Python takes compiled code for current by the second and the size of its source.
    compiled = Path(importlib.util.cache_from_source(file))
    try:
        file.write_text(fault.apply(before))
        compiled.unlink(missing_ok=True)
        yield
    finally:
        file.write_text(before)
        compiled.unlink(missing_ok=True)


def run_tests(tree: Path, arguments: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run pytest in a tree; return its exit code, or None after the limit, and its output."""
    line = [sys.executable, "-m", "pytest", "-v", "-n", "0", "-p", "no:cacheprovider", *arguments]
    # By this variable also processes are found that the tests have started as commands.
    env = {"PYTHONPATH": str(tree), "TEST_MUTANTS_TREE": f"{tree}/"}
    code: int | None = None
    with started(line, tree, env) as (process, _):
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit_s)
        kill(f"TEST_MUTANTS_TREE={tree}/")
        return code, process.text


def failed_test(output: str) -> str:
    """Return the id of the test that failed, which is the last one of `pytest -x -v`; "" if none
    has begun.
    """
    progress = re.split(r"^=+ (?:FAILURES|ERRORS) =+$", output, flags=re.MULTILINE)[0]
    line = r"^(tests/\S+?::.+?)(?: +(?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|\++ Timeout)\b.*)? *$"
    return str(([""] + re.findall(line, progress, re.MULTILINE))[-1])


def outcome_of(tree: Path, fault: Fault, limit_s: float) -> dict[str, Any]:
    """Run the tests of one fault, first those of `make test`. Return its outcome, and the ring and
    the test that has killed it.
    """
    found: dict[str, Any] = {"outcome": "alive", "ring": 0, "test": ""}
    with seeded(tree, fault):
        for ring, marks in enumerate(RINGS, 1):
            code, output = run_tests(tree, ["-x", "-m", marks, *fault.tests.split(" ")], limit_s)
            if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                continue
            outcome, test = "hang" if code is None else "killed", failed_test(output)
            if not test:  # a wrong file or expression, or a module that does not load
                outcome, test = "unsound", f"pytest ended with {code}: {output.strip()[-300:]}"
            return {"outcome": outcome, "ring": ring, "test": test}
    return found


def main() -> int:
    """Return 1 if a fault is alive that is not accepted, or unsound."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run")
    parser.add_argument("--jobs", type=int, default=1, help="copies to work on at a time")
    parser.add_argument("--tree", default="", help="a commit, in place of the working tree")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are written")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for each fault")
    parser.add_argument("names", nargs="*", help="faults; all of them by default")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in FAULTS]:
        parser.error(f"no such faults: {', '.join(unknown)}")
    chosen = [FAULTS[name] for name in args.names or FAULTS]
    head = "git describe --always --dirty --exclude=* --abbrev=12".split()
    commit = args.tree or subprocess.check_output(head, cwd=ROOT, text=True).strip()
    # What is known of other faults stays, each with its own commit.
    known = json.loads(args.out.read_text())["faults"] if args.out.exists() else {}
    trees: SimpleQueue[Path] = SimpleQueue()

    def work(fault: Fault) -> dict[str, Any]:
        began, tree = time.monotonic(), trees.get()
        try:
            result = outcome_of(tree, fault, args.limit)
        except ValueError as error:  # its text is not in the tree
            result = {"outcome": "unsound", "ring": 0, "test": str(error)}
        finally:
            trees.put(tree)
        detail = result["test"] or (fault.accepted and f"accepted: {fault.accepted}")
        print(f"{result['outcome']:8}{fault.name}  {detail}", flush=True)
        return {**result, "seconds": round(time.monotonic() - began, 1)}

    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        for number in range(args.jobs):
            copy_tree(tree := Path(folder, str(number)), args.tree)
            trees.put(tree)
        for fault, result in zip(chosen, pool.map(work, chosen), strict=True):
            known[fault.name] = {
                "file": fault.file,
                "wrong": fault.wrong,
                **result,
                "commit": commit,
            }
            _save(args.out, known)
        rows = [known[fault.name] for fault in chosen]
        killers = {row["test"] for row in rows if row["outcome"] in ("killed", "hang")}
        limit_s = args.limit * len(killers)
        _, output = run_tests(trees.get(), sorted(killers), limit_s) if killers else (0, "")
    for fault in chosen:
        test = known[fault.name]["test"]
        if test in killers and f"\n{test} PASSED" not in output:
            known[fault.name]["outcome"] = "unsound"
            print(f"unsound {fault.name}  {test} fails without it, too")
    _save(args.out, known)
    outcomes = [known[fault.name]["outcome"] for fault in chosen]
    text = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in sorted(set(outcomes)))
    print(f"{len(chosen)} faults at {commit}: {text}")
    open_ones = [
        fault.name
        for fault, outcome in zip(chosen, outcomes, strict=True)
        if outcome == "unsound" or (outcome == "alive" and not fault.accepted)
    ]
    if open_ones:
        print(f"no test notices: {', '.join(open_ones)}")
    return 1 if open_ones else 0


def _save(out: Path, known: dict[str, Any]) -> None:
    """Write the results of the faults that the table has, in its order."""
    kept = {name: known[name] for name in FAULTS if name in known}
    out.write_text(json.dumps({"faults": kept}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
