"""Pools of live ranks, on which the tests run their functions.

Importing torch takes a rank seconds. So the ranks of one arm (a backend under one launcher) stay
alive for all tests of that arm: the real launcher starts them, they open the backend and connect to
a Unix socket. After a call that hung, or failed on some ranks only, the ranks may disagree on the
next collective: they are killed and started again. tests/hvd/pool.py does this for a Horovod API.
They stay for what they save: two ranks forked for each test (forkserver.py) cost it 0.65 s of CPU
more, where the 246 tests of transports/test_collectives.py take 0.14 s each.

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
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from hvdtrain import Backend, BackendOptions, World
from hvdtrain.backends.single import Single
from tests.forkserver import warm
from tests.launching import started

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

START_S = 60.0
CALL_S = 120.0


@dataclass(frozen=True)
class Arm:
    """A backend, or a Horovod API by its module, under one launcher.

    `{n}` in the command is the number of ranks. The transport `auto` is shm on one host.
    """

    name: str
    backend: str
    command: str
    transport: str = "auto"

    def line(self, n: int) -> list[str]:
        return self.command.format(n=n, python=sys.executable).split()


COMMANDS = {
    "none": "{python} -m",
    "torchrun": "torchrun --nproc-per-node {n} -m",
    "mpirun": "mpirun -np {n} {python} -m",
    "horovodrun": "horovodrun -np {n} --gloo {python} -m",
}
# Each backend, with its launcher, its transport and its numbers of ranks. Those of `make test` have
# a "!": every backend and every transport once, and three ranks once.
_TABLE = """
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
"""
ARMS: dict[str, Arm] = {}
SIZES: dict[str, list[str]] = {}
for _row in _TABLE.strip().splitlines():
    _name, _launcher, _transport, *SIZES[_name] = _row.split()
    ARMS[_name] = Arm(_name, _name.partition("-")[0], COMMANDS[_launcher], _transport)


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


class Pool(Generic[S]):
    """`n` live ranks of one arm, each with an open subject S (a backend, or a Horovod API)."""

    entry = "tests.rank"
    env: Mapping[str, str] = {}
    call_s = CALL_S
    # Whether a call that all ranks failed alike, too, may have left operations pending.
    stops_on_failure = False

    def __init__(self, arm: Arm, n: int) -> None:
        self.arm = arm
        self.n = n
        self._stack = contextlib.ExitStack()
        self._connections: list[Connection] = []
        self._log: Path | None = None

    def run(
        self, function: Callable[Concatenate[S, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Call `function(subject, *args)` on every rank and return the results in rank order."""
        outcomes = self.outcomes(function, *args, **kwargs)
        if traces := _traces(outcomes):
            if self.stops_on_failure:
                self.stop()
            raise RankError(f"{function.__name__} failed on {self.arm.name} x {self.n}:{traces}")
        return outcomes

    def outcomes(
        self, function: Callable[Concatenate[S, P], T], *args: P.args, **kwargs: P.kwargs
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

    def _receive(self, outcomes: list[Any], what: str) -> None:
        """Fill in `outcomes` by rank. Raises RankError if a rank hangs or dies."""
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + self.call_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(map(str, waiting.values()))
                raise RankError(
                    f"{what} hung on {self.arm.name} x {self.n}: ranks {late}"
                    f"{_traces(outcomes)}\n{self._output()}"
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
        arm, name = self.arm, f"{self.arm.name} x {self.n}"
        command = [*arm.line(self.n), self.entry, address, arm.backend, arm.transport]
        env = {**self.env, "HVDTRAIN_TRANSPORT": arm.transport}
        process, self._log = self._stack.enter_context(started(warm(command), env=env))
        # Listener itself has no timeout.
        socket = listener._listener._socket  # type: ignore[attr-defined]
        deadline = time.monotonic() + START_S
        by_rank: dict[int, Connection] = {}
        while len(by_rank) < self.n:
            socket.settimeout(0.5)  # to notice a launcher that ends early
            try:
                connection = listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RankError(f"{name} did not start:\n{self._output()}") from None
                continue
            self._stack.callback(connection.close)
            rank: Any = None
            with contextlib.suppress(EOFError):
                if connection.poll(max(0.0, deadline - time.monotonic())):
                    rank = receive(connection)
            if not isinstance(rank, int):
                text = rank.trace if isinstance(rank, Raised) else self._output()
                raise RankError(f"{name} did not open:\n{text}")
            by_rank[rank] = connection
        self._connections = [by_rank[rank] for rank in range(self.n)]

    def _output(self) -> str:
        return self._log.read_text(errors="replace")[-4000:] if self._log is not None else ""

    def stop(self) -> None:
        """Kill the ranks. The next call starts new ones."""
        self._connections = []
        self._stack.close()
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        """Let the ranks close their subject and end. Raises RankError if one does not."""
        if not self._connections:
            return
        for connection in self._connections:
            send(connection, None)
        deadline = time.monotonic() + 30
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0, deadline - time.monotonic())):
                text = self._output()
                self.stop()
                raise RankError(f"rank {rank} of {self.arm.name} x {self.n} did not close:\n{text}")
            with contextlib.suppress(EOFError):
                farewell = receive(connection)
                assert not isinstance(farewell, Raised), farewell.trace
        self.stop()


class Ranks(Pool[Backend]):
    """`n` live ranks of one backend under one launcher."""

    def __init__(self, arm: str, n: int) -> None:
        super().__init__(ARMS[arm], n)


def single(**options: Any) -> Single:
    """Return the backend of one process, for runs in the test's own."""
    return Single(World(), BackendOptions(**options))
