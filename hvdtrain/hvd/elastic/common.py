"""The names of `horovod.common.elastic`: states, the loop that tries again, and news of hosts.

A source of news about hosts (a driver, a scheduler's notice) needs one call, on rank 0 and from any
thread: `notification_manager.handle_hosts_updated(timestamp, HostUpdateResult.added)`. It reaches
every state that a decorated function is running with; the next `commit()` or
`check_host_updates()` tells all ranks, which then raise HostsUpdatedInterrupt together. The loop
leaves the world, enters it anew by `reset`, and goes on.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable
from enum import IntFlag
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from hvdtrain.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt

__all__ = [
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "notification_manager",
    "run_fn",
]

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="State")

_log = logging.getLogger("hvdtrain")


class HostUpdateResult(IntFlag):
    """What a change of hosts consists of."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class Listener(Protocol):
    """What is told of changes: every `State` is one."""

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Take note of a change. Called from the thread of the source."""


class WorkerNotificationManager:
    """Hands news of hosts to the states that are in use. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: set[Listener] = set()
        self._warned = False

    def init(
        self,
        rendezvous_addr: str | None = None,
        rendezvous_port: int | None = None,
        nic: str | None = None,
        hostname: str | None = None,
        local_rank: int | None = None,
    ) -> None:
        """Get ready. Nothing is started: a source just calls `handle_hosts_updated`.

        Raises NotImplementedError for the address of Horovod's own elastic driver, and warns once
        under one.
        """
        if os.environ.get("HOROVOD_ELASTIC") == "1" and not self._warned:
            self._warned = True
            _log.warning("elastic: hvdtrain does not hear of the hosts that horovodrun adds")
        if rendezvous_addr is not None:
            raise NotImplementedError(
                f"hvdtrain does not listen to Horovod's elastic driver (at {rendezvous_addr}:"
                f"{rendezvous_port}); call notification_manager.handle_hosts_updated instead"
            )

    def register_listener(self, listener: Listener) -> None:
        """Tell `listener` of every change from now on."""
        with self._lock:
            self._listeners.add(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Tell `listener` no more."""
        with self._lock:
            self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Report a change of hosts. Only what rank 0 is told counts.

        A change counts if its `timestamp`, in seconds, is later than that of the last one.
        """
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()


class State:
    """What elastic training keeps alive over a reset. Override save, restore, sync and reset.

    `bcast_object(obj)` returns rank 0's object on every rank, `get_rank()` this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, HostUpdateResult]]
        self._host_messages = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Call these, in this order, after every reset: to scale a learning rate, for example."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Take note of the new world: drop old news of hosts, `reset()`, run the callbacks."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Keep the news for the next `check_host_updates`. Not collective; from any thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, to come back to after a failure, and check for changes of hosts.

        Collective. Raises HostsUpdatedInterrupt on all ranks if rank 0 was told of a change.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Learn from rank 0 whether hosts have changed. Collective.

        Raises HostsUpdatedInterrupt on all ranks if so.
        """
        seen = latest = self._last_updated_timestamp
        change = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                change |= update
        # Rank 0's `seen` too: a rank that came later has seen nothing yet.
        seen, latest, change = self._bcast_object((seen, latest, change))
        self._last_updated_timestamp = latest
        if latest > seen:
            raise HostsUpdatedInterrupt(change == HostUpdateResult.removed)

    def save(self) -> None:
        """Keep a copy of the state in this process's memory. Not collective."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last. Not collective."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the state of rank 0 that of every rank. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new world, before the state is synchronised. Not collective."""


class ObjectState(State):
    """A state of plain picklable objects, one attribute for each keyword.

    Objects are saved by reference, as in Horovod: change an attribute by assigning to it, for what
    is changed inside a list or dict is not undone by `restore()`.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        """Save the attributes. Not collective."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Set the attributes to what was saved last. Not collective."""
        self._set_attrs()

    def sync(self) -> None:
        """Make rank 0's attributes those of every rank, and save them. Collective.

        They are the present ones, where Horovod takes those saved last and so loses what changed
        between a commit and a change of hosts.
        """
        if self._saved_state:
            self.save()
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


def run_fn(
    func: Callable[Concatenate[S, P], T], reset: Callable[[], object]
) -> Callable[Concatenate[S, P], T]:
    """Make `func(state, ...)` survive failures and changes of the world; `reset` enters a new one.

    The returned function is collective. HorovodInternalError goes back to the last commit, for as
    often as it is raised; HostsUpdatedInterrupt goes on from where it is. Any other error is
    raised.
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> T:
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            in_step = False
            while True:
                try:
                    if not in_step:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    _log.warning("elastic: back to the last commit after: %s", error)
                    state.restore()
                    in_step = False
                except HostsUpdatedInterrupt as interrupt:
                    in_step = interrupt.skip_sync
                reset()
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return wrapper  # type: ignore[return-value]  # `state=` may be given by name too
