"""The elastic launcher: a world that changes while its ranks keep their processes and memory.

Used by `hvdtrain launch --host-discovery-script`. Ranks start and end one by one, below one
`supervisor` on each host. A generation is a world of fixed ranks; the launcher forms the next one
when every live rank has asked for its place in it:

    a rank ends           its peers lose it, go back to their last commit, and request a new rank
    a host comes          the launcher starts a process there; when that has requested a rank, the
                          launcher notifies rank 0 (see `HOSTS_UPDATE`), and at their next
                          commit all ranks request new ones
    a host goes           the launcher notifies rank 0; ranks of that host get the rank -1, and exit

Ranks of the previous generation keep their order, so rank 0 is the oldest and has the state. No
rank waits for a process that starts: until it requests a rank, the others train on. One thread
makes all decisions, from the state of the workers, after each change of it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import signal
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hvdtrain.errors import InputError, WorldError, first_line
from hvdtrain.job.elastic_world import ADDRESS, NUMBERS, SECRET, WORKER, HostUpdateResult
from hvdtrain.launch.discovery import FailedHosts, find_hosts
from hvdtrain.launch.elastic_server import HOSTS_UPDATE, ElasticServer, Reply
from hvdtrain.launch.event_loop import (
    POLL_S,
    EventLoop,
    HostConnection,
    Job,
    Rank,
    RankFailed,
)
from hvdtrain.launch.host_list import Host
from hvdtrain.launch.remote import own_address

_DISCOVERY_S = 1.0  # between two runs of the discovery script
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
                f"--max-np {self.max_np} is less than --min-np or -np ({least}); raise --max-np"
            )


@dataclass(eq=False)
class Worker(Rank):
    """One process of the job, and its rank in the current generation."""

    rank: int = -1
    """Its rank in the current generation; -1 until it is part of one."""
    reply: Reply | None = None
    """Of its open request for a rank in the next generation."""
    asked_at: float = math.inf
    """When it has requested a rank; infinity without a request."""
    has_place: bool = False
    """Whether it has a place in the next generation."""
    leave_by: float = 0.0
    """The time at which a worker without a place is ended, if it has not exited by itself; infinity
    after that, 0 while it has a place.
    """

    @property
    def name(self) -> str:
        """Its identity in requests to the server: HOST:NUMBER, unique for each process."""
        return f"{self.host}:{self.number}"

    @property
    def label(self) -> object:
        """Its rank, once it has one."""
        return self.rank if self.is_member else f"{self.host}:{self.slot}"

    @property
    def title(self) -> str:
        """Its rank and host, for messages."""
        return f"{f'rank {self.rank}' if self.is_member else 'a new rank'} on {self.host}"

    @property
    def is_member(self) -> bool:
        """Whether it is part of the present generation."""
        return self.rank >= 0

    @property
    def age(self) -> tuple[bool, int]:
        """The order of seniority: members by rank, then the others by their start."""
        return (not self.is_member, self.rank if self.is_member else self.number)

    def answer(self, text: str | None = None) -> None:
        """Answer the open request, if there is one; without a text close its connection: the
        request would keep a thread.
        """
        if self.reply:
            self.reply.put(text)
        self.reply, self.asked_at = None, math.inf


class ElasticJob(EventLoop[Worker]):
    """A job whose world changes. `job.hosts` is not used: the script names the hosts."""

    def __init__(self, job: Job, options: ElasticOptions) -> None:
        super().__init__(job)
        self.options = options
        self.hosts: list[Host] = []
        self.generation = 0
        self.size = 0
        self._most = options.max_np or math.inf
        self._last_failure: RankFailed | None = None  # the first of the last generation
        self._is_finished = False  # a rank has ended with 0: the job does not grow any more
        self._failed_hosts = FailedHosts(*options.cooldown_s)
        self._causes: list[str] = []  # of the next generation: the failures of this one
        self._changed_at = time.monotonic()  # the first of them
        self._notified: object = None  # the workers that come and go, of the last notice
        self._short_since = 0.0  # 0 while there are enough ranks
        self._decide_at = 0.0  # 0 after a change
        self._calls: deque[Callable[[], object]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()

    def run(self) -> None:
        """Run until the ranks have ended. Raises RankFailed, WorldError, InputError, and what
        `launcher.run` raises for signals.
        """
        self._server = ElasticServer(partial(self._post, self._record_request))
        with self._wake_read, self._wake_write:
            try:
                super().run()
            finally:
                self._server.stop()

    def _begin(self) -> None:
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._make_calls)
        self.hosts = find_hosts(self.options.hosts, self.options.slots)
        threading.Thread(target=self._watch_hosts, daemon=True, name="discovery").start()

    # Events

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        """Queue a call for the main thread. Callable in any thread."""
        self._calls.append(partial(call, *arguments))
        with contextlib.suppress(OSError):  # all is over
            self._wake_write.send(b".")

    def _make_calls(self) -> None:
        self._wake_read.recv(1 << 16)
        self._decide_at = 0.0
        while self._calls:
            self._calls.popleft()()

    def _watch_hosts(self) -> None:
        """Find the hosts each second. The first of several consecutive failures is reported, and
        the hosts stay as they were. The loop of a thread.
        """
        last: list[Host] | None = self.hosts
        while True:
            time.sleep(_DISCOVERY_S)
            if self._is_ending:
                return
            hosts = None
            try:
                hosts = find_hosts(self.options.hosts, self.options.slots)
            except (InputError, OSError) as error:
                if last is not None:
                    self._post(self._say, f"{first_line(error)}; the current hosts stay")
            if hosts is not None and hosts != last:
                self._post(setattr, self, "hosts", hosts)
            last = hosts

    def _record_request(self, name: str, reply: Reply) -> None:
        for worker in self._live:
            if worker.name == name:
                worker.answer()
                worker.reply, worker.asked_at = reply, time.monotonic()
                return
        reply.put(None)  # of a rank that has ended

    def _handle_exit(self, worker: Worker, code: int) -> None:
        """Record a rank's exit: expected, the end of a finished job, or a failure."""
        self._decide_at = 0.0
        worker.answer()
        if self.stopped_by is not None or self._is_ending or worker.leave_by:
            return
        if code == 0 and (worker.is_member or self.generation == 0):
            self._is_finished = True
            return
        failure = RankFailed(worker.title, code, worker.rank if worker.is_member else None)
        if self._is_finished:
            self.error = self.error or failure
            return
        if self.generation == 0 and not self._live:
            self.error = failure
        if worker.is_member:
            if not self._causes:  # else it may only have lost the first that failed
                self._changed_at, self._last_failure = time.monotonic(), failure
            self._causes.append(str(failure))
            self._server.store = ""
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
        return [self.ranks[n] for connection in self.connections for n in connection.ranks]

    def _decide(self) -> None:
        """Take the next steps after a change, and else twice a second, for deadlines."""
        now = time.monotonic()
        if now < self._decide_at:
            return
        self._decide_at = now + POLL_S
        if self.stopped_by is None and (self.error is None or self._is_finished):
            self._advance(now)
        # Members decide when the job is over; all ranks, before there are any and once stopped.
        all_count = self.stopped_by is not None or not self.generation
        is_over = not any(all_count or worker.is_member for worker in self._live)
        if self.stopped_by is None and not self._is_finished:
            is_over = is_over and self.generation > 0
            self.error = self.error or (self._last_failure if is_over else None)
            is_over = is_over or self.error is not None
        if is_over:
            self._end()

    def _advance(self, now: float) -> None:
        """Start, end and notify workers, and form the next generation, as their states require."""
        live = [worker for worker in self._live if not worker.leave_by]
        live.sort(key=lambda worker: worker.age)
        self._assign_places(live)
        if not self._is_finished:
            self._start_missing_workers(sum(worker.has_place for worker in live))
        for worker in live:
            if not (worker.is_member or worker.has_place):
                worker.leave_by = now
        for worker in self._live:
            if 0 < worker.leave_by <= now:
                worker.leave_by = math.inf
                worker.connection.send(end=worker.number)
        self._notify_rank_0(live, now)
        self._form_generation(live, now)

    def _assign_places(self, live: list[Worker]) -> None:
        """Decide which workers have a place in the next generation."""
        room, left = Counter({host.name: host.slots for host in self.hosts}), self._most
        if live and not any(room[worker.host] for worker in live if worker.is_member):
            # Without a member that stays, the state would be lost: then the oldest stays.
            room[live[0].host] += live[0].is_member
        may_join = not (self._is_finished and self.generation)
        for worker in live:
            has_room = room[worker.host] > 0 and left > 0
            worker.has_place = has_room and (may_join or worker.is_member)
            room[worker.host] -= worker.has_place
            left -= worker.has_place

    def _start_missing_workers(self, count: int) -> None:
        """Start a process in each free slot, the lowest slot of a host first, until there are
        `count` and these.

        A new process gets its slot as local rank, and so a GPU that no other rank uses.
        """
        used: defaultdict[str, set[int]] = defaultdict(set)
        for worker in self._live:
            used[worker.host].add(worker.slot)
        for host in self.hosts:
            slots = used[host.name]
            for slot in range(host.slots):
                is_free = slot not in slots and len(slots) < host.slots and count < self._most
                may_start = is_free and not self._failed_hosts.has(host.name)
                if may_start and self._start_worker(host, slot, count):
                    slots.add(slot)
                    count += 1

    def _start_worker(self, host: Host, slot: int, rank: int) -> bool:
        """Start a rank; return False, and put the host aside, if it cannot be reached."""
        try:
            address = self.job.master_addr or own_address([host.name])
            # A connection without ranks is ending.
            used = [each for each in self.connections if each.host == host.name and each.ranks]
            connection = used[0] if used else self._connect(host.name)
        except InputError as error:  # a pod can be listed before its name is known
            rest_s = self._failed_hosts.add(host.name)
            self._say(f"{error} ({host.name} gets no new ranks for {rest_s:.0f} s)")
            return False
        # Its rank may change, its place, and so its folder, does not.
        worker = Worker(len(self.ranks), connection, slot, f"{host.name}.{slot}")
        # Until it has asked, its rank is a guess, for scripts that print it before `hvd.init`.
        values = (address, self._server.port, rank, rank + 1, slot, slot + 1, 0, 1)
        variables = {
            "HOROVOD_ELASTIC": 1,
            "HOROVOD_HOSTNAME": host.name,
            "HOROVOD_ELASTIC_TIMEOUT": f"{self.options.timeout_s + _LEAVE_S:g}",
            SECRET: self._server.secret,
            WORKER: worker.name,
            **dict(zip((*ADDRESS, *NUMBERS), values, strict=True)),
        }
        self._start(worker, host.slots, variables)
        return True

    def _notify_rank_0(self, live: list[Worker], now: float) -> None:
        """Set the notice of a change that rank 0 reads when it polls; clear it if there is none."""
        new = [worker for worker in live if worker.has_place and not worker.is_member]
        ready = {worker for worker in new if worker.reply}
        waited_s = now - min((worker.asked_at for worker in new), default=math.inf)
        joining = ready if len(ready) == len(new) or waited_s > _JOIN_S else set()
        members = [worker for worker in live if worker.is_member]
        going = {worker for worker in members if not worker.has_place}
        size = len(members) - len(going) + len(joining)
        if size < self.options.min_np:
            joining = going = set()
        if (joining, going) != self._notified:
            self._notified = joining, going
            kind = HostUpdateResult.added * bool(joining) | HostUpdateResult.removed * bool(going)
            update = f"{time.time()},{kind}" if kind else ""
            self._server.values[HOSTS_UPDATE] = update.encode()

    def _form_generation(self, live: list[Worker], now: float) -> None:
        """Form the next generation if every member, or at the start every worker, has asked."""
        options = self.options
        members = [worker for worker in live if worker.is_member]
        if self.generation and not members:
            return  # the state is lost with them: `_decide` ends the job
        must_ask = members or [worker for worker in live if worker.has_place]
        late = [worker for worker in must_ask if not worker.reply]
        asked = [worker for worker in live if worker.reply]
        ready = [worker for worker in asked if worker.has_place]
        wanted = max(options.min_np, 0 if self.generation else options.first_np or 0)
        wanted = 1 if self._is_finished else wanted  # the ranks that are left end as well
        if members and len(late) == len(members):
            self._short_since = 0.0
        elif late and self.generation > 0:
            since = min(worker.asked_at for worker in must_ask)
            for worker in late if now > since + options.timeout_s else ():
                self._say(
                    f"{worker.title} did not ask for a new rank within --elastic-timeout: ending it"
                )
                worker.connection.send(end=worker.number)
                self._end_rank(worker, -signal.SIGKILL)
        elif len(ready) >= wanted and not late:
            self._start_generation(ready, [worker for worker in asked if not worker.has_place])
        else:
            self._short_since = self._short_since or now
            if now > self._short_since + options.timeout_s:
                text = f"{_ranks(len(ready))} ready"
                if len(ready) < wanted:
                    text += f", fewer than {wanted} (--min-np)"
                if late:
                    text += f", {len(late)} on {_hosts_of(late)} did not call hvd.init()"
                self.error = WorldError(
                    f"{text}, after --elastic-timeout {options.timeout_s:g} s; add hosts, or lower "
                    "--min-np"
                )

    def _start_generation(self, ready: list[Worker], leaving: list[Worker]) -> None:
        """Number the ranks of the next generation, host by host, and answer all of them."""
        options, causes = self.options, self._causes
        if self.generation and not causes:
            self._changed_at = min(worker.asked_at for worker in ready if worker.is_member)
        causes += (f"{worker.title} leaves" for worker in leaving)
        if self.generation:
            if joined := [worker for worker in ready if not worker.is_member]:
                causes.append(f"{_ranks(len(joined))} joined on {_hosts_of(joined)}")
            if not causes:
                causes.append("the ranks lost contact with each other")
        if options.reset_limit is not None and self.generation > options.reset_limit:
            self.error = WorldError(
                f"{'; '.join(causes)}, after --reset-limit {options.reset_limit} changes"
            )
            return
        self._short_since, self._notified = 0.0, None
        self.generation += 1
        self._server.begin(self.generation)
        workers_of: defaultdict[str, list[Worker]] = defaultdict(list)
        for worker in ready:
            workers_of[worker.host].append(worker)
        rank = 0
        for node, workers in enumerate(workers_of.values()):
            slots = sorted(worker.slot for worker in workers)
            for worker in workers:
                local = (slots.index(worker.slot), len(slots), node, len(workers_of))
                worker.rank = rank
                worker.answer(",".join(map(str, (rank, len(ready), *local, self.generation))))
                rank += 1
        for worker in leaving:
            worker.leave_by = time.monotonic() + _LEAVE_S
            worker.answer(",".join(["-1"] * len(NUMBERS)))
        after_s = time.monotonic() - self._changed_at
        change = f"world {self.size} -> " if self.size else ""
        self.size = len(ready)
        change += f"{_ranks(self.size)}, generation {self.generation}, after {after_s:.1f} s"
        causes.append(change)
        self._say("; ".join(causes))
        causes.clear()

    def _say(self, text: str) -> None:
        self._output.say(f"elastic: {text}")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"


def _hosts_of(workers: list[Worker]) -> str:
    return ", ".join(dict.fromkeys(worker.host for worker in workers))
