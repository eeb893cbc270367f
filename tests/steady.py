"""`make steady PYTEST="tests/launch/test_elastic.py"`: find tests that fail only sometimes.

    python -m pytest -p tests.steady [--times 20] [--busy 2] [--seed N] [pytest's arguments]

A plugin of pytest. It runs each test `--times` times, in random order, beside `--busy` processes
that compute without a pause. At the end it prints which tests failed, and how often. A test that
waits for seconds in place of an event, or needs another test before it, shows here.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest

_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=int, default=20, help="runs of each test")
    parser.addoption("--busy", type=int, default=2, help="processes that keep the cores busy")
    parser.addoption("--seed", default=str(time.time_ns() % 10**6), help="of the order")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Repeat each test, as pytest-repeat does."""
    metafunc.fixturenames.append("steady_run")
    runs = [f"run{number}" for number in range(metafunc.config.getoption("--times"))]
    metafunc.parametrize("steady_run", runs)


@pytest.hookimpl(trylast=True)  # after pytest has ordered them by their fixtures
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the tests by the seed; those of one pool of live ranks stay together."""
    chance = random.Random(config.getoption("--seed"))
    places = defaultdict[str, float](chance.random)

    def place(item: pytest.Item) -> tuple[float, float]:
        group = item.get_closest_marker("xdist_group")
        return places[group.args[0] if group is not None else item.nodeid], chance.random()

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def _busy(pytestconfig: pytest.Config, _nothing_stays_behind: None) -> Iterator[None]:
    """Keep processes busy. They end before conftest.py looks for what has stayed behind."""
    num = pytestconfig.getoption("--busy")
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(num)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print how often each test failed."""
    stats = terminalreporter.stats
    names = (report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ()))
    failed = Counter(re.sub(r"\[run\d+\]|-run\d+|run\d+-", "", name) for name in names)
    for name, count in failed.items():
        times = config.getoption("--times")
        terminalreporter.write_line(f"failed {count} of {times} times: {name}")
    seed = config.getoption("--seed")
    terminalreporter.write_line(f"tests that are not steady: {len(failed)}, at --seed {seed}")
