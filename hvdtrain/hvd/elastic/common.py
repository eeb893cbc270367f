"""The names of `horovod.common.elastic`: states, the retry loop, and notifications of host changes.

Used by `hvd.elastic`. hvdrun's notices are polled; another source of them (a scheduler) makes one
call on rank 0, from any thread: `notification_manager.handle_hosts_updated(timestamp, added)`.

    hvdrun -> rank 0     handle_hosts_updated() queues the update in every running `State`
    rank 0 -> all ranks  commit() or check_host_updates() broadcasts the queued updates
    all ranks            raise HostsUpdatedInterrupt together
    all ranks            the loop of `run_fn` calls `reset`, syncs the state, and calls `func` again
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar, cast

from hvdtrain.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from hvdtrain.job import elastic_world
from hvdtrain.job.elastic_world import HostUpdateResult
from hvdtrain.job.world import detect, hvdrun_restart, launch_env

__all__ = [
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "notification_manager",
    "run_fn",
]

F = TypeVar("F", bound=Callable[..., Any])

_log = logging.getLogger("hvdtrain")
_POLL_S = 1.0


class WorkerNotificationManager:
    """Forwards host updates to the registered listeners. Thread-safe, as changes of a set are."""

    def __init__(self) -> None:
        self._listeners: set[Any] = set()
        self._is_receiving = False

    def init(self) -> None:
        """Receive the notices of hvdrun from now on, in a thread, if it has started this process in
        an elastic job. A second call does nothing.
        """
        if not self._is_receiving and elastic_world.is_elastic():
            self._is_receiving = True
            threading.Thread(target=self._poll, daemon=True, name="elastic").start()

    def _poll(self) -> None:
        latest = b""
        while True:
            time.sleep(_POLL_S)
            if os.environ["HOROVOD_RANK"] != "0":
                continue
            with suppress(OSError):  # the launcher has ended: `launcher_watch` reports it
                notice = elastic_world.request("hosts/update")
                if notice not in (b"", latest):
                    latest = notice
                    timestamp, kind = notice.decode().split(",")
                    self.handle_hosts_updated(float(timestamp), HostUpdateResult(int(kind)))

    def register_listener(self, listener: Any) -> None:
        """Forward every later change to `listener.on_hosts_updated`, from the source's thread."""
        self._listeners.add(listener)

    def remove_listener(self, listener: Any) -> None:
        """Stop forwarding changes to `listener`."""
        self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Report a change of hosts. Only reports on rank 0 have an effect.

        A change counts if its `timestamp`, in seconds, is later than that of the last one.
        """
        for listener in list(self._listeners):  # a copy: a listener may register or remove one
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()


class State:
    """The state that elastic training keeps across resets. Override save, restore, sync and reset.

    `bcast_object(obj)` returns rank 0's object on every rank, `get_rank()` this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages = queue.SimpleQueue[tuple[float, HostUpdateResult]]()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Add callbacks to run after every reset, in order: to scale a learning rate, say."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt to the new world: drop queued host updates, call `reset()`, run the callbacks."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Queue the update for the next `check_host_updates`. Not collective; from any thread."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, which a failure restores, and check for changes of hosts.

        Collective. Raises HostsUpdatedInterrupt on all ranks if rank 0 has a queued update.
        """
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Broadcast rank 0's queued host updates. Collective.

        Raises HostsUpdatedInterrupt on all ranks if there are any.
        """
        seen = latest = self._last_updated_timestamp
        change = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                change |= update
        # Rank 0's `seen` is sent too: a rank that started later has no timestamp yet.
        seen, latest, change = self._bcast_object((seen, latest, change))
        self._last_updated_timestamp = latest
        if latest > seen:
            raise HostsUpdatedInterrupt(change == HostUpdateResult.removed)

    def save(self) -> None:
        """Store a copy of the state in this process's memory. Not collective."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the copy that was saved last. Not collective."""
        raise NotImplementedError

    def sync(self) -> None:
        """Overwrite every rank's state with rank 0's. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to a new world, before the state is synchronised. Not collective."""


class ObjectState(State):
    """A state of plain picklable objects, one attribute for each keyword.

    Objects are saved by reference, as in Horovod: change an attribute by assigning to it, since
    `restore()` does not undo a change inside a list or dict.
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
        """Set the attributes to the values saved last. Not collective."""
        self._set_attrs()

    def sync(self) -> None:
        """Overwrite every rank's attributes with rank 0's, and save them. Collective.

        Sends the current values. Horovod sends those saved last, and so loses what changed between
        a commit and a change of hosts.
        """
        if self._saved_state:
            self.save()
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


def _warn_of_restart() -> None:
    """Log, on rank 0, that the launcher has started new processes, which have no commits."""
    env = launch_env()
    number = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    if info := hvdrun_restart(env):
        number = str(info["number"])
    if number != "0" and detect().rank == 0:
        _log.warning(
            "elastic: the launcher restarted all ranks (restart %s): earlier commits are lost and "
            "training starts over; write the state to a file after each commit and load it before "
            "hvd.elastic.run, or train with hvdtrain.Trainer",
            number,
        )


def run_fn(func: F, reset: Callable[[], object]) -> F:
    """Wrap `func(state, ...)` so that it survives failures and changes of the world.

    The wrapper is collective. HorovodInternalError restores the last commit, however often it is
    raised; HostsUpdatedInterrupt keeps the current state. After both, `reset` enters a new world,
    and `func` is called again. Any other error is raised. `reset` returns whether a process has
    joined that needs the state; the state is then synchronised whatever has happened.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        notification_manager.init()
        _warn_of_restart()
        notification_manager.register_listener(state)
        try:
            is_synced = False  # whether all ranks have the same state, so that no sync is needed
            while True:
                try:
                    if not is_synced:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    _log.warning("elastic: restored the last commit after: %s", error)
                    state.restore()
                    is_synced = False
                except HostsUpdatedInterrupt as interrupt:
                    is_synced = interrupt.skip_sync
                is_synced = not reset() and is_synced
                state.on_reset()
        finally:
            notification_manager.remove_listener(state)

    return cast("F", wrapper)
