"""The Monitor: one set of connections by which this rank and the others know of each other.

`backends.open_backend` opens one in each rank, a star around rank 0 (see `peers`), with one thread.
Its users have a topic each, and do not see each other's messages:

    hang_watch            who keeps the others waiting, and in which line
    training.preemption   after which step all ranks save and end

    topic = monitor.open("preemption 1", on_message, on_lost)
    topic.send([0], ["signal", "SIGTERM at rank 1"])
    topic.close()

Two more have `Peers` of their own: the engine of `hvd`, whose scripts open no backend, and the
hosts of `shm`, which need a mesh.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain.job.addresses import listen_addresses
from hvdtrain.job.world import World
from hvdtrain.liveness.peer_sockets import Header, InvalidMessage, parse
from hvdtrain.liveness.peers import OnLost, OnMessage, Peers

_TICK_S = 1.0  # interval of heartbeats
_OPENED = ""  # a message of a rank to itself
_MAX_EARLY = 1000  # messages that are kept for topics which this rank has not opened yet


@dataclass
class RankProgress:
    """What the heartbeat reports of a rank. The Trainer sets it; a user's own loop may."""

    step: int | None = None
    """The optimizer step at work, counted from 1."""
    run_dir: str | None = None
    """The run directory; on rank 0."""


class Monitor:
    """This rank's connections. The constructor is collective.

    `hosts` are the hosts of all ranks. `progress` is sent to rank 0, and its own to all, every
    second. Raises PeerLost naming the ranks that did not arrive.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        hosts: Sequence[str],
        progress: RankProgress,
        timeout_s: float,
    ) -> None:
        self.world, self._hosts = world, hosts
        self.lost: dict[int, str] = {}
        """Why each rank that is lost counts as lost, as a predicate. Rank 0 knows of all, the
        others of rank 0.
        """
        self.numbers = itertools.count()
        """For the names of topics that are opened again and again, on all ranks alike."""
        self._progress = {world.rank: progress}
        self._topics: dict[str, Topic] = {}
        self._closed: set[str] = set()
        self._early: defaultdict[str, list[tuple[int, Header, bytes]]] = defaultdict(list)
        self._peers = Peers(
            PrefixStore("monitor", store),
            world.rank,
            world.size,
            None,
            listen_addresses(world) if world.rank == 0 else [],
            timeout_s,
            tick_s=_TICK_S,
            status=lambda: json.dumps([progress.step, progress.run_dir]).encode(),
            thread_name="monitor",
        )
        self._peers.start(self._on_message, self._on_lost, self._on_tick)

    def open(
        self,
        name: str,
        on_message: OnMessage,
        on_lost: OnLost,
        on_tick: Callable[[], None] = lambda: None,
    ) -> Topic:
        """Open a topic, with a new name that all ranks give it; not collective.

        The thread calls all three: `on_message(sender, header, payload)`, also for what has arrived
        before; `on_lost(rank, why)`, also for ranks that are lost already; `on_tick` once a second
        or more often.
        """
        topic = Topic(name, self, on_message, on_lost, on_tick)
        self._topics[name] = topic
        self._peers.send(self.world.rank, [_OPENED, name])
        return topic

    def describe(self, rank: int) -> str:
        """Return a rank's number and host, such as "rank 3 (gpu07)"."""
        return f"rank {rank} ({self._hosts[rank]})" if self._hosts else f"rank {rank}"

    def progress(self, rank: int) -> RankProgress:
        """Return what is known of a rank's progress: to rank 0 of all, to others of rank 0."""
        return self._progress.get(rank, RankProgress())

    def silent_s(self, rank: int) -> float:
        """Return for how many seconds nothing has arrived from a connected rank; else 0."""
        return self._peers.silent_s(rank)

    def close(self) -> None:
        """Close the connections. Twice is safe."""
        self._peers.close()

    # In the thread of the connections

    def _on_message(self, rank: int, header: Header, payload: bytes) -> None:
        name, *rest = header
        if not isinstance(name, str):
            raise InvalidMessage("a topic without a name")
        if name == "alive":
            self._progress[rank] = RankProgress(*check(parse(payload), int | None, str | None))
        elif name == _OPENED and rank == self.world.rank:
            if (topic := self._topics.get(*rest)) is not None:  # else it is closed again
                topic.is_ready = True
                for lost, why in list(self.lost.items()):
                    topic.on_lost(lost, why)
                for early in self._early.pop(topic.name, []):
                    topic.on_message(*early)
        elif (known := self._topics.get(name)) is not None and known.is_ready:
            known.on_message(rank, rest, payload)
        elif name not in self._closed:
            if sum(map(len, self._early.values())) >= _MAX_EARLY:
                raise InvalidMessage(f"{_MAX_EARLY} messages of topics that are not open")
            self._early[name].append((rank, rest, payload))

    def _on_lost(self, rank: int, why: str) -> None:
        self.lost[rank] = why
        for topic in list(self._topics.values()):
            if topic.is_ready:
                topic.on_lost(rank, why)

    def _on_tick(self) -> None:
        for topic in list(self._topics.values()):
            if topic.is_ready:
                topic.on_tick()


@dataclass(eq=False)
class Topic:
    """The messages of one user of the Monitor: see `Monitor.open`."""

    name: str
    _monitor: Monitor
    on_message: OnMessage
    on_lost: OnLost
    on_tick: Callable[[], None]
    is_ready: bool = False
    """Whether the thread has seen that the topic is open; it then calls its functions."""

    def send(self, ranks: Sequence[int], header: Header, payload: bytes = b"") -> None:
        """Send the same to some ranks: rank 0 reaches all, the others rank 0 and themselves. In any
        thread; never blocks. Ranks that are lost are skipped.
        """
        self._monitor._peers.send_all(ranks, [self.name, *header], payload)

    def close(self) -> None:
        """Drop messages that are still to come. In any thread."""
        self._monitor._closed.add(self.name)
        self._monitor._topics.pop(self.name, None)


def check(values: Any, *kinds: Any) -> list[Any]:
    """Return `values`, a list of these types. Raises InvalidMessage for any other value."""
    is_list = isinstance(values, list) and len(values) == len(kinds)
    if is_list and all(map(isinstance, values, kinds)):
        return list(values)
    raise InvalidMessage(f"values that are not {kinds}")
