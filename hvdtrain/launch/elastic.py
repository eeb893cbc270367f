"""The elastic launcher: a world that changes while its ranks keep their processes and memory.

Used by `hvdtrain launch --host-discovery-script`. Ranks start and end one by one, below one
`supervisor` on each host. A generation is a world of fixed ranks; the launcher forms the next one
when every live rank has asked for its place in it:

    a rank ends           its peers lose it, go back to their last commit, and request a new rank
    a host comes          the launcher starts a process there; when that has requested a rank, the
                          launcher notifies rank 0 (see `elastic_server.update`), and at their next
                          commit all ranks request new ones
    a host goes           the launcher notifies rank 0; ranks of that host get the rank -1, and exit

Ranks of the previous generation keep their order, so rank 0 is the oldest and has the state. No
rank waits for a process that starts: until it requests a rank, the others train on. One thread
makes all decisions, from the state of the workers. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import queue
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdtrain.errors import InputError, WorldError
from hvdtrain.job.elastic_world import ADDRESS, NUMBERS, SECRET, WORKER, HostUpdateResult
from hvdtrain.launch.discovery import Discovery, FailedHosts
from hvdtrain.launch.elastic_server import ElasticServer, RankRequest
from hvdtrain.launch.event_loop import (
    EventLoop,
    HostConnection,
    Job,
    Rank,
    RankFailed,
)
from hvdtrain.launch.host_list import Host

_JOIN_S = 10.0  # how long a ready process waits for starting ones, so that they join together
_LEAVE_S = 30.0  # how long a rank that has lost its place may take to exit


@dataclass(frozen=True)
class ElasticOptions:
    """How the world of a job may change."""

    hosts: str | Callable[[], list[Host]]
    """A discovery script, or a function: the hosts that may be used now."""
    min_np: int
    max_np: int | None = None
    first_np: int | None = None
    """Ranks that the first generation waits for, if they are more than `min_np`."""
    slots: int = 1
    timeout_s: float = 600.0
    reset_limit: int | None = None
    cooldown_s: tuple[float, float] = (10.0, 300.0)

    def __post_init__(self) -> None:
        """Raise InputError for numbers of ranks that exclude each other."""
        least = max(self.min_np, self.first_np or 0)
        if self.max_np is not None and least > self.max_np:
            raise InputError(
                f"--max-np {self.max_np} is less than the {least} ranks of --min-np or -np; raise "
                "--max-np"
            )


class Worker(Rank):
    """One process of the job, and its rank in the current generation."""

    def __init__(self, number: int, connection: HostConnection, slot: int) -> None:
        place = f"{connection.host}.{slot}"  # its rank may change, its place does not
        super().__init__(number, connection, slot, place)
        self.name = f"{connection.host}:{number}"
        """Its identity in requests to the server: HOST:NUMBER, unique for each process."""
        self.rank = -1
        """Its rank in the current generation; -1 until it is part of one."""
        self.request: RankRequest | None = None
        self.asked_at = math.inf
        self.end_by = math.inf
        """The time at which a worker without a place is ended, if it has not exited by itself."""
        self.is_leaving = False

    @property
    def label(self) -> object:
        """Its rank, once it has one."""
        return self.rank if self.is_member else f"{self.host}:{self.slot}"

    @property
    def is_member(self) -> bool:
        """Whether it is part of the present generation."""
        return self.rank >= 0

    @property
    def age(self) -> tuple[bool, int]:
        """The order of seniority: members by rank, then the others by their start."""
        return (not self.is_member, self.rank if self.is_member else self.number)

    def drop_request(self) -> None:
        """Drop the open request, if there is one: it would keep a thread and a connection."""
        if self.request is not None:
            self.request.reply.put(None)
        self.request, self.asked_at = None, math.inf

    def end(self) -> None:
        """Let its supervisor end it: SIGTERM, then SIGKILL."""
        self.connection.send(end=self.number)


class ElasticJob(EventLoop[Worker]):
    """A job whose world changes. `job.hosts` is not used: the script names the hosts."""

    def __init__(self, job: Job, options: ElasticOptions) -> None:
        super().__init__(job)
        self.options = options
        self.hosts: list[Host] = []
        self.generation = 0
        self.size = 0
        self._last_failure: RankFailed | None = None  # the first of the last generation
        self._is_finished = False  # a rank has ended with 0: the job does not grow any more
        self._failed_hosts = FailedHosts(*options.cooldown_s)
        self._causes: list[str] = []  # of the next generation
        self._changed_at = time.monotonic()  # the first of them
        self._notified: tuple[frozenset[int], frozenset[int]] | None = None
        self._short_since: float | None = None
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)

    def run(self) -> None:
        """Run until the ranks have ended. Raises RankFailed, WorldError, InputError, and what
        `launcher.run` raises for signals.
        """
        self._server = ElasticServer(
            lambda request: self._post(lambda: self._record_request(request))
        )
        try:
            super().run()
        finally:
            self._server.stop()
            self._wake_read.close()
            self._wake_write.close()

    def _run(self) -> None:
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        discovery = Discovery(
            self.options.hosts,
            self.options.slots,
            lambda hosts: self._post(lambda: self._set_hosts(hosts)),
            lambda why: self._post(lambda: self._say(f"{why}; the hosts stay as they were")),
        )
        try:
            discovery.start()
            while not self._is_over():
                self._relay()
                self._advance()
        finally:
            discovery.stop()

    # Events

    def _post(self, call: Callable[[], object]) -> None:
        """Queue a call for the main thread. Callable in any thread."""
        self._calls.put(call)
        with contextlib.suppress(OSError):  # it is full: the thread wakes anyway; or all is over
            self._wake_write.send(b".")

    def _set_hosts(self, hosts: list[Host]) -> None:
        self.hosts = hosts

    def _record_request(self, request: RankRequest) -> None:
        for worker in self._live:
            if worker.name == request.worker:
                worker.drop_request()
                worker.request, worker.asked_at = request, time.monotonic()
                return
        request.reply.put(None)  # of a rank that has ended

    def _relay(self) -> None:
        super()._relay()
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(1 << 16)
        while not self._calls.empty():
            self._calls.get()()

    def _handle_exit(self, worker: Worker, code: int) -> None:
        """Record a rank's exit: expected, the end of a finished job, or a failure."""
        worker.drop_request()
        if self.stopped_by is not None or self._is_ending or worker.is_leaving:
            return
        if code == 0 and (worker.is_member or self.generation == 0):
            self._is_finished = True
            return
        who = (
            f"rank {worker.rank} on {worker.host}"
            if worker.is_member
            else f"a new rank on {worker.host}"
        )
        failure = RankFailed(who, code, worker.rank if worker.is_member else None)
        if self._is_finished:
            self.error = self.error or failure
            return
        if self.generation == 0 and not self._live:
            self.error = failure
        if worker.is_member:
            self._changed_at = self._changed_at if self._causes else time.monotonic()
            self._causes.append(str(failure))
            if not self._server.is_broken:  # else it may only have lost the first that failed
                self._last_failure = failure
            self._server.is_broken = True
        else:
            self._say(str(failure))
        rest_s = self._failed_hosts.add(worker.host)
        self._say(f"{worker.host} gets no new ranks for {rest_s:.0f} s")

    def _handle_lost(self, connection: HostConnection, code: int | None) -> None:
        for number in sorted(connection.ranks):
            self._end_rank(self.ranks[number], -signal.SIGKILL if code is None else code or 255)

    # Decisions

    @property
    def _live(self) -> list[Worker]:
        numbers = (number for connection in self.connections for number in connection.ranks)
        return sorted((self.ranks[number] for number in numbers), key=lambda worker: worker.age)

    def _is_over(self) -> bool:
        if self.stopped_by is not None:
            return not self._live or time.monotonic() > self._deadline
        if self.error is not None and not self._is_finished:
            return True
        if self.generation == 0:
            return self._is_finished and not self._live
        if any(worker.is_member for worker in self._live):
            return False
        if not self._is_finished:
            self.error = self._last_failure
        return True

    def _advance(self) -> None:
        """Start, end and notify workers, and form the next generation, as their states require."""
        if self.stopped_by is not None or (self.error is not None and not self._is_finished):
            return
        now = time.monotonic()
        for worker in self._live:
            if now > worker.end_by:
                worker.end_by = math.inf
                worker.end()
        stay, leave = self._split_workers()
        if not self._is_finished:
            self._start_missing_workers(stay)
        for worker in leave:
            if not worker.is_member and not worker.is_leaving:
                worker.is_leaving = True
                worker.end()
        self._notify_rank_0(stay, leave)
        self._form_generation(stay, leave)

    def _split_workers(self) -> tuple[list[Worker], list[Worker]]:
        """Return the live workers that have a place in the next generation, and the others."""
        stay: list[Worker] = []
        leave: list[Worker] = []
        room = {host.name: host.slots for host in self.hosts}
        live = [worker for worker in self._live if not worker.is_leaving]
        members = [worker for worker in live if worker.is_member]
        listed = [worker for worker in members if room.get(worker.host)]
        for worker in live:
            # Without a member that stays, the state would be lost: then the oldest stays.
            is_last = not listed and members[:1] == [worker]
            has_room = room.get(worker.host, 0) > 0 and len(stay) < (self.options.max_np or 1 << 30)
            may_join = not self._is_finished or self.generation == 0
            if is_last or (has_room and (worker.is_member or may_join)):
                room[worker.host] = room.get(worker.host, 0) - 1
                stay.append(worker)
            else:
                leave.append(worker)
        return stay, leave

    def _start_missing_workers(self, stay: list[Worker]) -> None:
        """Start a process in each free slot, the lowest slot of a host first.

        A new process gets its slot as local rank, and so a GPU that no other rank uses.
        """
        count, live = len(stay), self._live
        for host in self.hosts:
            used = {worker.slot for worker in live if worker.host == host.name}
            for slot in (slot for slot in range(host.slots) if slot not in used):
                wanted = self.options.max_np is None or count < self.options.max_np
                may_start = wanted and len(used) < host.slots
                may_start = may_start and not self._failed_hosts.has(host.name)
                if may_start and self._start_worker(host, slot, count):
                    used.add(slot)
                    count += 1

    def _start_worker(self, host: Host, slot: int, rank: int) -> bool:
        """Start a rank; return False, and put the host aside, if it has no address."""
        try:
            address = self._address_for(host.name)
            connection = self._connection_to(host.name)
        except InputError:  # a pod can be listed before its name is known
            rest_s = self._failed_hosts.add(host.name)
            self._say(f"{host.name} does not resolve yet; it gets no new ranks for {rest_s:.0f} s")
            return False
        worker = Worker(len(self.ranks), connection, slot)
        # Until it has asked, its rank is a guess, for scripts that print it before `hvd.init`.
        numbers = (rank, rank + 1, slot, slot + 1, 0, 1)
        variables = {
            "HOROVOD_ELASTIC": "1",
            **dict(zip(ADDRESS, (address, str(self._server.port)), strict=True)),
            "HOROVOD_HOSTNAME": host.name,
            "HOROVOD_ELASTIC_TIMEOUT": f"{self.options.timeout_s + _LEAVE_S:g}",
            SECRET: self._server.secret,
            WORKER: worker.name,
            **dict(zip(NUMBERS, map(str, numbers), strict=True)),
        }
        self._start(worker, host.slots, variables)
        return True

    def _connection_to(self, host: str) -> HostConnection:
        """Return a host's connection, a new one if it has no ranks, for such a one is ending."""
        if self.job.remote.is_shared:
            for connection in self.connections:
                if connection.host == host and connection.ranks:
                    return connection
        return self._connect(host)

    def _notify_rank_0(self, stay: list[Worker], leave: list[Worker]) -> None:
        """Set the notice of a change that rank 0 reads when it polls; clear it if there is none."""
        ready = [w for w in stay if not w.is_member and w.request is not None]
        starting = any(not w.is_member and w.request is None for w in stay)
        waited_s = time.monotonic() - min((w.asked_at for w in ready), default=math.inf)
        joining = frozenset(w.number for w in ready if not starting or waited_s > _JOIN_S)
        going = frozenset(w.number for w in leave if w.is_member)
        size = len(joining) + len([w for w in stay if w.is_member])
        if not (joining or going) or size < self.options.min_np:
            self._notified, self._server.update = None, ""
        elif (joining, going) != self._notified and self.generation > 0:
            self._notified = joining, going
            kind = HostUpdateResult.added * bool(joining) | HostUpdateResult.removed * bool(going)
            self._server.update = f"{time.time()},{kind}"

    def _form_generation(self, stay: list[Worker], leave: list[Worker]) -> None:
        """Form the next generation if every member, or at the start every worker, has asked."""
        now, options = time.monotonic(), self.options
        members = [worker for worker in self._live if worker.is_member and not worker.is_leaving]
        must_ask = members or stay
        asked = [worker for worker in must_ask if worker.request is not None]
        ready = [worker for worker in stay if worker.request is not None]
        first = options.first_np or 0 if self.generation == 0 else 0
        wanted = max(first, options.min_np)
        wanted = 1 if self._is_finished else wanted  # the ranks that are left end as well
        if members and not asked:
            self._short_since = None
            return
        late = [worker for worker in must_ask if worker.request is None]
        since = min((worker.asked_at for worker in asked), default=self._changed_at)
        if late and self.generation > 0:
            if now > since + options.timeout_s:
                for worker in late:
                    who = f"rank {worker.rank} on {worker.host}"
                    self._say(f"{who} requested no next rank within --elastic-timeout; it is ended")
                    worker.end()
                    self._end_rank(worker, -signal.SIGKILL)
        elif len(ready) >= wanted and not late:
            self._start_generation(
                ready, [worker for worker in leave if worker.request is not None]
            )
        else:
            self._short_since = self._short_since or now
            if now > self._short_since + options.timeout_s:
                text = f"{len(ready)} ranks are ready"
                if len(ready) < wanted:
                    text += f", fewer than {wanted} (--min-np)"
                if late:
                    names = ", ".join(dict.fromkeys(worker.host for worker in late))
                    text += f", {len(late)} on {names} did not call hvd.init()"
                self.error = WorldError(
                    f"{text}, after --elastic-timeout {options.timeout_s:g} s; add hosts, or lower "
                    "--min-np"
                )

    def _start_generation(self, ready: list[Worker], leaving: list[Worker]) -> None:
        """Number the ranks of the next generation, host by host, and answer all of them."""
        options, joined = self.options, [worker for worker in ready if not worker.is_member]
        if self.generation and not self._causes:
            self._changed_at = min(worker.asked_at for worker in ready if worker.is_member)
        for worker in leaving:
            self._causes.append(f"rank {worker.rank} on {worker.host} leaves")
        if self.generation and joined:
            names = ", ".join(dict.fromkeys(worker.host for worker in joined))
            self._causes.append(f"{_ranks(len(joined))} joined on {names}")
        if self.generation and not self._causes:
            self._causes.append("the ranks lost contact with each other")
        if options.reset_limit is not None and self.generation > options.reset_limit:
            self.error = WorldError(
                f"{'; '.join(self._causes)}, after --reset-limit {options.reset_limit} changes"
            )
            return
        self._short_since = self._notified = None
        self.generation += 1
        self._server.begin(self.generation)
        hosts = list(dict.fromkeys(worker.host for worker in ready))
        ordered = [worker for host in hosts for worker in ready if worker.host == host]
        for rank, worker in enumerate(ordered):
            slots = sorted(other.slot for other in ordered if other.host == worker.host)
            local = (slots.index(worker.slot), len(slots))
            cross = (hosts.index(worker.host), len(hosts))
            worker.rank = rank
            self._answer(worker, (rank, len(ordered), *local, *cross, self.generation))
        for worker in leaving:
            worker.is_leaving, worker.end_by = True, time.monotonic() + _LEAVE_S
            self._answer(worker, (-1,) * 6)
        after_s = time.monotonic() - self._changed_at
        before, self.size = self.size, len(ordered)
        change = f"world {before} -> {_ranks(self.size)}" if before else _ranks(self.size)
        causes = "; ".join([*self._causes, change])
        self._say(f"{causes}, generation {self.generation}, after {after_s:.1f} s")
        self._causes.clear()

    def _answer(self, worker: Worker, numbers: Sequence[int]) -> None:
        assert worker.request is not None
        worker.request.reply.put(",".join(map(str, numbers)))
        worker.request, worker.asked_at = None, math.inf

    def _say(self, text: str) -> None:
        self._output.say(f"elastic: {text}")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"
