"""Fixtures: pools of live ranks, and leak checks for variables, threads, folders and processes."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.job import world
from tests import forkserver
from tests.environments import EXHAUSTIVE
from tests.launching import descendants, is_mapped, no_shared_memory_left
from tests.messages import message  # noqa: F401  (a fixture)
from tests.ranks import SIZES, Ranks

# A shell starts background jobs with SIGINT ignored, nohup ignores SIGHUP, and child processes
# inherit both. The tests of Ctrl-C and of a terminal that closes need the default handlers.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure() -> None:
    # The secret of the job is a file there: tests neither use nor create that of the user. Not at
    # the import of this module: a rank that runs a test's function imports it, too.
    os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="hvdtrain-test-config-")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-messages", action="store_true", help="write tests/messages.txt anew: messages.py"
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the reporter's: after its last line
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Say at the end how many tests were left out for want of a program, and which had begun when
    the session was interrupted.
    """
    yield
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and not hasattr(session.config, "workerinput"):
        reasons = [str(report.longrepr) for report in reporter.stats.get("skipped", ())]
        if line := left_out(reasons):
            reporter.write_line(line)
        for nodeid in sorted(_running):
            reporter.write_line(f"interrupted: {nodeid}")


_running: set[str] = set()  # tests, of all workers


def pytest_runtest_logstart(nodeid: str) -> None:
    _running.add(nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _running.discard(nodeid)


def left_out(reasons: list[str]) -> str:
    """Return how many tests were skipped without each program; "" if none was. See `require`."""
    found = Counter(re.findall(r"without \w[^'\"()]*", " ".join(reasons)))
    lines = "; ".join(f"{n} {what}" for what, n in found.items())
    return f"left out: {lines}" if lines else ""


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["XDG_CONFIG_HOME"])


# Usage: `@pytest.mark.parametrize("ranks", EVERY_ARM, indirect=True)`. pytest groups the tests by
# the parameter of a session-scoped fixture, so that one pool at a time is alive.
ARMS = [*SIZES["ranks"]]
EVERY_ARM = [
    pytest.param(arm, marks=() if in_make_test else EXHAUSTIVE)
    for arm, in_make_test in SIZES["ranks"].items()
]
TWO_RANKS = [param for param, arm in zip(EVERY_ARM, ARMS, strict=True) if arm[1] == 2]


_alive: list[Ranks] = []


def _live_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Yield the live ranks of one arm."""
    name, n = request.param
    _alive.append(pool := Ranks(name, n, request.fixturename or ""))
    yield pool
    _alive.remove(pool)
    pool.close()


ranks = pytest.fixture(scope="session", name="ranks")(_live_ranks)
hvd_ranks = pytest.fixture(scope="session", name="hvd_ranks")(_live_ranks)
peers = pytest.fixture(scope="session", name="peers")(_live_ranks)


@pytest.fixture(autouse=True)
def _idle_ranks_end(request: pytest.FixtureRequest) -> None:
    """End live ranks before a test that uses none: idle ones of Horovod poll every millisecond.

    A later test that uses them starts them again.
    """
    for pool in _alive:
        if pool.fixture not in request.fixturenames:
            pool.close()


@pytest.hookimpl(tryfirst=True)  # before the one of pytest-xdist, which reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Send the tests of one pool to one worker of pytest-xdist.

    Those of all pools of real Horovod, too: its ranks poll without a pause, and two pools at a time
    make each other several times slower.
    """
    for item in items:
        callspec = getattr(item, "callspec", None)
        for fixture in SIZES:
            if callspec is not None and fixture in callspec.params:
                arm = "-".join(map(str, callspec.params[fixture]))
                group = "horovod" if arm.startswith("horovod") else f"{fixture}-{arm}"
                item.add_marker(pytest.mark.xdist_group(group))


def deselect(
    config: pytest.Config,
    items: list[pytest.Item],
    holds: Callable[[pytest.Item, dict[str, Any]], bool],
) -> None:
    """Deselect the items for which `holds`, called with the item and its parameters, is false.

    One parametrize with only the pairs that hold would not let the tests share a session's ranks.
    """
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        params = callspec.params if callspec is not None else {}
        (kept if holds(item, params) else dropped).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail if pytest-xdist ignores the groups: each worker would start every pool."""
    marked = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if getattr(session.config.option, "loadgroup", False) and marked:
        assert "@" in marked[0].nodeid, "pytest-xdist has not grouped the tests of one pool"


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    if argname in SIZES and isinstance(val, tuple):
        return f"{val[0]}-x{val[1]}"
    return None


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread in this process, as its runs and live ranks do: the sums inside an
    operation depend on their number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _launch_env_is_forgotten() -> Iterator[None]:
    """Let every test have a launch environment of its own: see `world.launch_env`."""
    yield
    world._launch_env.clear()


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    """Fail a test that leaves another working folder, other variables, or more threads."""
    environment, folder = dict(os.environ), Path.cwd()
    threads = set(threading.enumerate())
    yield
    assert Path.cwd() == folder
    changed = {
        name
        for name in {*environment, *os.environ}
        if environment.get(name) != os.environ.get(name)
        # set by pytest, by torch with the first optimizer, and by scikit-learn at its import
        and not name.startswith(("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "KMP_"))
    }
    assert not changed, f"environment variables leaked: {changed}"
    left = {t for t in threading.enumerate() if t not in threads and not t.daemon}
    assert not left, f"threads leaked: {left}"


@pytest.fixture(autouse=True, scope="session")
def _nothing_stays_behind() -> Iterator[None]:
    """Fail the session if processes (and so their ports) or shared memory stay behind."""
    # Outside CI other programs may create some meanwhile.
    with no_shared_memory_left() if "CI" in os.environ else contextlib.nullcontext():
        yield
        forkserver.stop()
        deadline = time.monotonic() + 60
        while (alive := descendants(os.getpid())) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not alive, f"processes stayed behind: {alive}"
        for path in Path("/dev/shm").iterdir():
            if path.name.startswith(
                ("mpich_shm_", "vader_segment.", "sm_segment.")
            ) and not is_mapped(path):
                path.unlink(missing_ok=True)  # MPI leaves it when a rank is killed
