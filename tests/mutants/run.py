"""What the tests can see: `make mutants` seeds one fault after another, and runs its tests.

    python -m tests.mutants.run [--jobs N] [--tree COMMIT] [--out FILE] [names of faults]

Each job works on a copy of the tree in a temporary folder. A fault is `killed` by a test that fails
with it, of `make test` or else of `make test-rest`; by a `hang` if its tests do not end in time;
else it is `alive`. At the end all tests that
have killed a fault run once without any: a fault whose test fails then is `unsound`, as is one
whose tests could not be run. The results are written with the commit. Ends with 1 if a fault is
unsound, or alive and not accepted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import psutil
import pytest
import torch  # noqa: F401  so that no pytest has to: see `_become_pytest`

from tests.launching import clean_env
from tests.mutants.fault import Fault
from tests.mutants.table import FAULTS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/mutants.json"
LIMIT_S = 300.0
"""For the tests of one fault: what hangs with a fault waits for the limits of the tests."""
_MARK = "TEST_MUTANTS_TREE"
RINGS = ("not exhaustive and not soak", "exhaustive and not soak")
"""The marks of `make test` and of `make test-rest`."""


def copy_tree(target: Path, commit: str) -> None:
    """Copy the files of the working tree that git knows, or those of a commit."""
    target.mkdir()
    if commit:
        archive = subprocess.Popen(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", target], stdin=archive.stdout, check=True)
        if archive.wait():
            raise SystemExit(f"git has no tree {commit}")
    else:
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True
        )
        subprocess.run(
            ["tar", "-c", "--null", "--files-from=-", "--ignore-failed-read", "-f", target / "t"],
            cwd=ROOT,
            input=listed.stdout,
            check=True,
        )
        subprocess.run(["tar", "-x", "-f", "t"], cwd=target, check=True)
        (target / "t").unlink()
    for other_mpi in ROOT.glob(".venv-*"):
        (target / other_mpi.name).symlink_to(other_mpi)


@contextlib.contextmanager
def seeded(tree: Path, fault: Fault) -> Iterator[None]:
    """Apply a fault to a tree inside the block."""
    file = tree / "hvdtrain" / fault.file
    before = file.read_text()
    try:
        _write(file, fault.apply(before))
        yield
    finally:
        _write(file, before)


_times = iter(range(10**9, 2 * 10**9))


def _write(file: Path, source: str) -> None:
    file.write_text(source)
    # Python takes compiled code for current by the second and the size of its source.
    os.utime(file, (time.time(), next(_times)))


def run_tests(tree: Path, arguments: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run pytest in a tree; return its exit code, or None after the limit, and its output."""
    line = ["-v", "-n", "0", "-p", "no:cacheprovider", *arguments]
    env = clean_env({"PYTHONPATH": str(tree), _MARK: str(tree)})
    log = tree / "pytest.log"
    pid = os.fork()
    if pid == 0:
        _become_pytest(tree, line, env, log)
    code, deadline = None, time.monotonic() + limit_s
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.1)
    finally:
        _kill_all(tree, pid)
        if code is None:
            os.waitpid(pid, 0)
    return code, log.read_text(errors="replace")


def _become_pytest(tree: Path, line: list[str], env: dict[str, str], log: Path) -> NoReturn:
    """Run pytest in this process, a fork of one that has imported torch but nothing of ours."""
    code = 3
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        for fd in (1, 2):
            os.dup2(out, fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(tree)
        os.environ.clear()
        os.environ.update(env)
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("hvdtrain", "tests"):
                del sys.modules[name]
        sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
        sys.argv = ["pytest", *line]
        code = int(pytest.main(line))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _kill_all(tree: Path, group: int) -> None:
    """Kill all processes of the tests in `tree`, also those that others have adopted."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == str(tree):
                process.kill()


def failed_test(output: str) -> str:
    """Return the id of the test that failed, which is the last one of `pytest -x -v`; "" if none
    has begun.
    """
    progress = re.split(r"^=+ (?:FAILURES|ERRORS) =+$", output, flags=re.MULTILINE)[0]
    line = r"^(tests/\S+?::.+?)(?: +(?:PASSED|FAILED|ERROR|SKIPPED|XFAIL|\++ Timeout)\b.*)? *$"
    return str(([""] + re.findall(line, progress, re.MULTILINE))[-1])


def test_fault(tree: Path, fault: Fault, limit_s: float) -> dict[str, Any]:
    """Run the tests of one fault, first those of `make test`. Return its outcome, the ring and the
    test that has killed it.
    """
    began = time.monotonic()
    found: dict[str, Any] = {"outcome": "alive", "ring": 0, "test": ""}
    with seeded(tree, fault):
        for ring, marks in enumerate(RINGS, 1):
            code, output = run_tests(tree, ["-x", "-m", marks, *fault.tests.split(" ")], limit_s)
            if code == pytest.ExitCode.OK or (
                ring == 2 and code == pytest.ExitCode.NO_TESTS_COLLECTED
            ):
                continue
            outcome, test = "hang" if code is None else "killed", failed_test(output)
            if (
                not test
            ):  # none has begun: a wrong file or expression, or a module that does not load
                outcome, test = "unsound", f"pytest ended with {code}: {output.strip()[-300:]}"
            found = {"outcome": outcome, "ring": ring, "test": test}
            break
    return {**found, "seconds": round(time.monotonic() - began, 1)}


test_fault.__test__ = False  # type: ignore[attr-defined]


def failing_without_fault(tree: Path, tests: Sequence[str], limit_s: float) -> set[str]:
    """Return those of the tests that do not pass in a tree without a fault."""
    if not tests:
        return set()
    code, output = run_tests(tree, tests, limit_s * len(tests))
    if code == pytest.ExitCode.USAGE_ERROR:  # which says nothing of any test
        raise SystemExit(f"pytest ended with {code}: {output.strip()[-300:]}")
    return {test for test in tests if f"\n{test} PASSED" not in output}


def main() -> int:
    """Return 1 if a fault is alive that is not accepted, or unsound."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run")
    parser.add_argument("--jobs", type=int, default=1, help="copies to work on at a time")
    parser.add_argument("--tree", default="", help="a commit, in place of the working tree")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are written")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for each fault")
    parser.add_argument("names", nargs="*", help="faults; all of them by default")
    args = parser.parse_args()
    by_name = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in args.names if name not in by_name]:
        parser.error(f"no such faults: {', '.join(unknown)}")
    chosen = [by_name[name] for name in args.names] or list(FAULTS)
    head = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    commit = (
        args.tree
        or subprocess.run(
            head, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
        ).stdout.strip()
    )
    # What is known of other faults stays, each with its own commit.
    known = json.loads(args.out.read_text())["faults"] if args.out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(args.jobs):
            copy_tree(tree := Path(folder, str(number)), args.tree)
            trees.put(tree)

        def work(fault: Fault) -> dict[str, Any]:
            tree = trees.get()
            try:
                result = test_fault(tree, fault, args.limit)
            except ValueError as error:  # its text is not in the tree
                result = {"outcome": "unsound", "ring": 0, "test": str(error), "seconds": 0.0}
            finally:
                trees.put(tree)
            detail = result["test"] or (fault.accepted and f"accepted: {fault.accepted}")
            print(f"{result['outcome']:8}{fault.name}  {detail}", flush=True)
            return result

        with ThreadPoolExecutor(args.jobs) as pool:
            for fault, result in zip(chosen, pool.map(work, chosen), strict=True):
                about = {"file": fault.file, "wrong": fault.wrong, **result, "commit": commit}
                known[fault.name] = about
                _save(args.out, known)
        killers = sorted({known[fault.name]["test"] for fault in chosen} - {""})
        failing = failing_without_fault(trees.get(), killers, args.limit)
        for fault in chosen:
            if known[fault.name]["test"] in failing:
                known[fault.name]["outcome"] = "unsound"
                print(f"unsound {fault.name}  {known[fault.name]['test']} fails without it, too")
        _save(args.out, known)
    outcomes = {fault.name: known[fault.name]["outcome"] for fault in chosen}
    num = {kind: list(outcomes.values()).count(kind) for kind in sorted(set(outcomes.values()))}
    text = ", ".join(f"{count} {kind}" for kind, count in num.items())
    print(f"{len(chosen)} faults at {commit}: {text}")
    open_ones = [
        fault.name
        for fault in chosen
        if outcomes[fault.name] == "unsound"
        or (outcomes[fault.name] == "alive" and not fault.accepted)
    ]
    if open_ones:
        print(f"no test notices: {', '.join(open_ones)}")
    return 1 if open_ones else 0


def _save(out: Path, known: dict[str, Any]) -> None:
    """Write the results of the faults that the table has, in its order."""
    kept = {fault.name: known[fault.name] for fault in FAULTS if fault.name in known}
    out.write_text(json.dumps({"faults": kept}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
