"""`make steady PYTEST="tests/launch/test_elastic.py"`: find tests that fail only sometimes.

    python -m tests.steady [--times 20] [--busy 2] [pytest's arguments]

Runs each test `--times` times, in random order, in one pytest, beside `--busy` processes that
compute without a pause. Prints which tests failed, and how often; ends with 1 if one did. A test
that waits for seconds in place of an event, or needs another test before it, shows here. Imported
by pytest itself (`-p tests.steady`), this module repeats and shuffles the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]
_TIMES, _SEED = "TEST_STEADY_TIMES", "TEST_STEADY_SEED"
_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


@pytest.fixture
def steady_run(request: pytest.FixtureRequest) -> str:
    """Which of its runs a test is in."""
    return str(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat each test, as pytest-repeat does."""
    metafunc.fixturenames.append("steady_run")
    runs = [f"run{number}" for number in range(1, int(os.environ[_TIMES]) + 1)]
    metafunc.parametrize("steady_run", runs, indirect=True)


@pytest.hookimpl(trylast=True)  # after pytest has ordered them by their fixtures
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the tests by the seed; those of one pool of live ranks stay together."""
    chance, groups = random.Random(os.environ[_SEED]), dict[str, list[pytest.Item]]()
    for item in items:
        mark = item.get_closest_marker("xdist_group")
        groups.setdefault(mark.args[0] if mark is not None else item.nodeid, []).append(item)
    names = list(groups)
    chance.shuffle(names)
    for group in groups.values():
        chance.shuffle(group)
    items[:] = [item for name in names for item in groups[name]]


@contextlib.contextmanager
def busy(num: int) -> Iterator[None]:
    """Keep `num` processes busy in the block."""
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(num)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> int:
    """Return 1 if a test failed in one of its runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.steady")
    parser.add_argument("--times", type=int, default=20, help="runs of each test")
    parser.add_argument("--busy", type=int, default=2, help="processes that keep the cores busy")
    parser.add_argument("--seed", default=str(time.time_ns() % 10**6), help="of the order")
    args, rest = parser.parse_known_args()
    env = {**os.environ, _TIMES: str(args.times), _SEED: args.seed}
    with tempfile.TemporaryDirectory() as folder, busy(args.busy):
        report = Path(folder, "report.xml")
        line = [sys.executable, "-m", "pytest", "-p", "tests.steady", f"--junitxml={report}"]
        code = subprocess.run([*line, *rest], cwd=ROOT, env=env).returncode
        if not report.exists():  # the limit of a test that hangs ends pytest itself, and names it
            print(f"pytest itself ended with {code}, at --seed {args.seed}")
            return 1
        cases = list(ElementTree.parse(report).iter("testcase"))
    runs: dict[str, list[str]] = {}
    for case in cases:
        name = re.sub(r"[\[-]run\d+", "", case.get("name", "")).removesuffix("]")
        name += "]" if "[" in name else ""
        bad = [child for child in case if child.tag in ("failure", "error")]
        why = bad[0].get("message", "").partition("\n")[0] or "failed" if bad else ""
        runs.setdefault(f"{case.get('classname')}::{name}", []).append(why)
    failed = {name: [why for why in found if why] for name, found in runs.items()}
    failed = {name: found for name, found in failed.items() if found}
    for name, found in failed.items():
        print(f"failed {len(found)} of {len(runs[name])} times: {name}: {found[0]}")
    print(f"{len(failed)} of {len(runs)} tests are not steady, at --seed {args.seed}")
    return 1 if failed or not runs else 0


if __name__ == "__main__":
    sys.exit(main())
