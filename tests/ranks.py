"""Pools of live ranks, on which the tests run their functions.

Importing torch takes a rank seconds. So the ranks of one arm stay alive for all tests of that arm:
the real launcher starts them, they open what the arm names (rank.py) and connect to a Unix socket.
After a call that failed or hung, the ranks may disagree on the next collective: they are killed,
and the next call starts new ones. They stay for what they save: two ranks forked for each test
(forkserver.py) cost it 0.65 s of CPU more, where the 246 tests of transports/test_collectives.py
take 0.14 s each.

    test                                     rank (tests/rank.py)
     |<------ rank, or Raised ----------------|   once the backend is open
     |------- (function, args, kwargs) ------>|
     |<------ result, or Raised --------------|   repeated for every call
     |------- None -------------------------->|
     |<------ None, or Raised ----------------|   once the backend is closed
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from hvdtrain import BackendOptions, World
from hvdtrain.backends.single import Single
from tests.environments import OTHER_MPIS, other_mpi
from tests.forkserver import warm
from tests.launching import Started, started, variables

P = ParamSpec("P")
T = TypeVar("T")

START_S = 60.0
CALL_S = 120.0

# {bin} is the folder that tests/environments.py finds, or the tests of the arm are skipped.
COMMANDS = {
    "none": "{python} -m",
    "torchrun": "torchrun --nproc-per-node {n} -m",
    "mpirun": "mpirun -np {n} {python} -m",
    "horovodrun": "horovodrun -np {n} --gloo {python} -m",
    **dict.fromkeys(OTHER_MPIS, "{bin}/mpiexec -n {n} {bin}/python -m"),
}
# What is alive, by the fixture of its pool: a backend, a Horovod API (ours but for `horovod`), or
# torch.distributed on a transport. Each row is an arm: its name, its launcher, its transport, its
# numbers of ranks, and its variables; `auto` is shm on one host. `make test` has the numbers with a
# "!": every backend and every transport once, and three ranks once. Which rows of their tables the
# others run is in the conftest.py of hvd and of transports.
_TABLES = {
    "ranks": """
single            none       auto 1!
ddp-torchrun      torchrun   auto 1 2! 3!
ddp-gloo          torchrun   gloo 2 3
ddp-mpirun        mpirun     auto 2
ddp-mpi           mpirun     mpi  2! 3
horovod-gloo      horovodrun auto 1 2 3
horovod-mpi       mpirun     auto 1 2! 3
compat-torchrun   torchrun   auto 1 2! 3
compat-gloo       torchrun   gloo 2 3
compat-mpirun     mpirun     gloo 2!
compat-mpi        mpirun     mpi  2
compat-horovodrun horovodrun auto 2
""",
    # The cycle time is how soon a name is free again. What the kernel does in a thread's name, such
    # as the copy of a forked rank's pages, counts as its own time: milliseconds on a busy one. Of
    # `small-buckets` a few parameters fill a bucket; in `exact` all is as under the real Horovod.
    "hvd_ranks": """
horovod-gloo   horovodrun auto 2 3
horovod-mpi    mpirun     auto 2 3
hvd-torchrun   torchrun   auto 2 3 HOROVOD_CYCLE_TIME=20
hvd-mpirun     mpirun     gloo 2 3 HOROVOD_CYCLE_TIME=20
hvd-horovodrun horovodrun gloo 2 3 HOROVOD_CYCLE_TIME=20
small-buckets  torchrun   auto     HOROVOD_CYCLE_TIME=20 HOROVOD_FUSION_THRESHOLD=200
exact          torchrun   auto     HOROVOD_CYCLE_TIME=20 HVDTRAIN_EXACT_HOROVOD=1
""",
    # Each rank of mpi4py counts as a host, so that all goes through MPI; four count as ranks of
    # several hosts. `shm-pure` is without page.c.
    "peers": """
shm             torchrun shm    2 3 4
mpi4py          mpirun   mpi4py 2 3 4
gloo            torchrun gloo   2 3
shm-pure        torchrun shm    2 3 HVDTRAIN_PURE_PYTHON=1
mpi4py-mpich    mpich    mpi4py 2
mpi4py-openmpi5 openmpi5 mpi4py 2
""",
}


@dataclass(frozen=True)
class Arm:
    """What each rank opens, and under which launcher."""

    name: str
    launcher: str
    transport: str
    env: Mapping[str, str]

    @property
    def backend(self) -> str:
        return self.name.partition("-")[0]


ARMS_OF: dict[str, dict[str, Arm]] = {}
SIZES: dict[str, dict[tuple[str, int], bool]] = {}
"""By fixture: the arms with each of their numbers of ranks, and whether it has a "!"."""
for _fixture, _table in _TABLES.items():
    ARMS_OF[_fixture], SIZES[_fixture] = {}, {}
    for _row in _table.strip().splitlines():
        _name, _launcher, _transport, *_words = _row.split()
        _env = variables(" ".join(word for word in _words if "=" in word))
        ARMS_OF[_fixture][_name] = Arm(_name, _launcher, _transport, _env)
        for _size in _words[: len(_words) - len(_env)]:
            SIZES[_fixture][_name, int(_size.rstrip("!"))] = "!" in _size
ARMS = ARMS_OF["ranks"]


@dataclass(frozen=True)
class Raised:
    """An exception in a call on one rank, as text."""

    kind: str
    text: str
    trace: str


def send(connection: Connection, value: object) -> None:
    """Send by plain pickle: the pickler of multiprocessing would share tensors, not copy them."""
    connection.send_bytes(pickle.dumps(value))


def receive(connection: Connection) -> Any:
    """Receive a value from `send`. Raises EOFError if the other process has ended."""
    return pickle.loads(connection.recv_bytes())


class RankError(AssertionError):
    """A call failed on at least one rank."""


def _traces(outcomes: list[Any]) -> str:
    """Return the tracebacks of the ranks that raised; "" if none did."""
    raised = ((rank, out) for rank, out in enumerate(outcomes) if isinstance(out, Raised))
    return "".join(f"\n--- rank {rank}\n{out.trace}" for rank, out in raised)


class Ranks:
    """`n` live ranks of one arm. The first argument of what they call is what they have open."""

    def __init__(self, name: str, n: int, fixture: str = "hvd_ranks") -> None:
        self.fixture, self.arm, self.n = fixture, ARMS_OF[fixture][name], n
        self.name = f"{name} x {n}"
        is_other = self.arm.launcher in OTHER_MPIS
        self._bin, self._env = other_mpi(self.arm.launcher) if is_other else (Path(), {})
        self._stack = contextlib.ExitStack()
        self._connections: list[Connection] = []
        self._process: Started | None = None

    def run(
        self, function: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call `function(subject, *args)` on every rank and return the results in rank order."""
        outcomes = self.outcomes(function, *args, **kwargs)
        if traces := _traces(outcomes):
            self.stop()  # what failed may have left operations pending
            raise RankError(f"{function.__name__} failed on {self.name}:{traces}")
        return outcomes

    def outcomes(
        self, function: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[Any]:
        """Like `run`, but return an exception as Raised, in the place of its rank's result."""
        outcomes: list[Any] = [None] * self.n
        try:
            if not self._connections:
                self._start()
            for connection in self._connections:
                send(connection, (function, args, kwargs))
            self._receive(outcomes, function.__name__)
        except BaseException:
            self.stop()
            raise
        failed = sum(isinstance(out, Raised) for out in outcomes)
        # A rank that raised early has left out collectives that the others have called.
        if 0 < failed < self.n:
            self.stop()
        return outcomes

    def _receive(self, outcomes: list[Any], what: str, seconds: float = CALL_S) -> None:
        """Fill in `outcomes` by rank. Raises RankError if a rank hangs or dies."""
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), timeout=max(0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, waiting.values()))
                raise RankError(
                    f"{what} hung on {self.name}: ranks {late}{_traces(outcomes)}\n{self._output()}"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    outcomes[rank] = receive(connection)
                except EOFError:
                    raise RankError(f"rank {rank} died in {what}:\n{self._output()}") from None

    def _start(self) -> None:
        """Start the command, and connect to its ranks. Raises RankError if one does not open."""
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-test-"))
        address = str(Path(folder) / "socket")
        listener = self._stack.enter_context(Listener(address, "AF_UNIX", backlog=self.n))
        arm, command = self.arm, COMMANDS[self.arm.launcher]
        line = command.format(n=self.n, python=sys.executable, bin=self._bin).split()
        line += ["tests.rank", address, self.fixture, arm.backend, arm.transport]
        env = {**self._env, **arm.env, "HVDTRAIN_TRANSPORT": arm.transport}
        if self.fixture == "hvd_ranks":
            env["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        self._process, _ = self._stack.enter_context(started(warm(line), env=env))
        # Listener itself has no timeout.
        socket = listener._listener._socket  # type: ignore[attr-defined]
        deadline = time.monotonic() + START_S
        by_rank: dict[int, Connection] = {}
        while len(by_rank) < self.n:
            socket.settimeout(0.5)  # to notice a launcher that ends early
            try:
                connection = listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RankError(f"{self.name} did not start:\n{self._output()}") from None
                continue
            self._stack.callback(connection.close)
            rank: Any = None
            with contextlib.suppress(EOFError):
                if connection.poll(max(0.0, deadline - time.monotonic())):
                    rank = receive(connection)
            if not isinstance(rank, int):
                text = rank.trace if isinstance(rank, Raised) else self._output()
                raise RankError(f"{self.name} did not open:\n{text}")
            by_rank[rank] = connection
        self._connections = [by_rank[rank] for rank in range(self.n)]

    def _output(self) -> str:
        return self._process.text[-4000:] if self._process is not None else ""

    def stop(self) -> None:
        """Kill the ranks. The next call starts new ones."""
        self._connections = []
        self._stack.close()
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        """Let the ranks close what they have open, and end. Raises RankError if one does not."""
        outcomes: list[Any] = [None] * self.n
        try:
            for connection in self._connections:
                send(connection, None)
            self._receive(outcomes, "close", seconds=30)
        finally:
            self.stop()
        assert not _traces(outcomes), _traces(outcomes)


def single(**options: Any) -> Single:
    """Return the backend of one process, for runs in the test's own."""
    return Single(World(), BackendOptions(**options))
