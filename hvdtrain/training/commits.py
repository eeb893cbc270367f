"""The commits of an elastic run: copies of its state in the memory of every rank.

`elastic_training` keeps one `Commits` in each process, from world to world; the Trainer uses it.

    every N steps, after each epoch and checkpoint   take          each rank copies its state
    after each of them                               check_hosts   raises if the hosts have changed
    in the next world                                agree         finds the newest commit

Ranks may lose a peer before or after the same commit, so their newest ones may differ. The newest
of all counts: after a step that one rank has finished, all ranks have sent their gradients for it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import DistError

from hvdtrain.backends.base import Backend
from hvdtrain.errors import PeerLost, WorldError, first_line
from hvdtrain.hvd.elastic.common import State
from hvdtrain.hvd.exceptions import SHUT_DOWN, HorovodInternalError, HostsUpdatedInterrupt
from hvdtrain.training.run_state import Progress
from hvdtrain.training.snapshot import Snapshot

_MAX_CAUSE = 200  # characters of an error's text

LOST_PEER = (WorldError, PeerLost, HorovodInternalError, DistError)
"""The exceptions for a lost rank: those of the backends and of the rendezvous."""


@dataclass(frozen=True)
class CommitInfo:
    """What a process knows of the worlds before, and sends to the ranks of the next one."""

    step: int = -1
    """The step of its commit; -1 without one."""
    last_step: int = 0
    """The steps done when the last world ended."""
    first_size: int = 0
    """The ranks of the first world; 0 in a process that has just been started."""
    size: int = 0
    """The ranks of the last world."""
    run_dir: str = ""
    cause: str = ""
    """Why the last world ended."""


class Commits:
    """The newest commit of this process, and what all ranks have agreed on."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._snapshot = Snapshot()
        self._backend: Backend | None = None
        self.hosts = State(self._broadcast, lambda: 0)
        """Receives the launcher's notices of hosts."""
        self.parts: dict[str, Any] = {}
        """The commit, in the form of a checkpoint; empty before the first one."""
        self.own = CommitInfo()
        self.agreed = CommitInfo()
        """The newest CommitInfo of the ranks of this world, as it was when the world began."""
        self.root: int | None = None
        """The lowest rank with the newest commit; None if there is no commit."""

    def agree(self, backend: Backend) -> None:
        """Find the newest commit. Collective, once in each world."""
        self._backend, size = backend, backend.world.size
        by_rank = backend.all_gather_object(self.own)
        newest = max(by_rank, key=lambda one: (one.step, bool(one.run_dir), one.size))
        self.root = by_rank.index(newest) if newest.step >= 0 else None
        first_size = newest.first_size or size
        last_step = max(one.last_step for one in by_rank)
        self.agreed = replace(newest, last_step=last_step, first_size=first_size)
        self.own = replace(self.agreed, step=self.own.step, size=size, cause="")

    def keep_run_dir(self, path: Path | None) -> None:
        """Keep the run directory, `path` on rank 0, for the next world. Collective."""
        mine = "" if path is None else str(path.absolute())
        self.own = replace(self.own, run_dir=self._broadcast(mine))

    def is_due(self, step: int) -> bool:
        """Return whether `--commit-every` asks for a commit after a step."""
        return step % self._every == 0

    def take(self, step: int, parts: dict[str, Any]) -> None:
        """Copy the state after a step. Not collective."""
        self.parts = self._snapshot.take(parts)
        self.own = replace(self.own, step=step)

    def check_hosts(self) -> None:
        """Raise HostsUpdatedInterrupt, on every rank, if hosts have come or gone. Collective."""
        self.hosts.check_host_updates()

    def ends_world(self, error: BaseException) -> bool:
        """Return whether `error` means that this world has ended, and the next one goes on: a lost
        peer, or hosts that have changed. Not collective.
        """
        if isinstance(error, WorldError) and error.launcher_ended:
            return False
        if isinstance(error, (*LOST_PEER, HostsUpdatedInterrupt)):
            return True
        if self._backend is None or not isinstance(error, Exception):
            return False
        return self._backend._peer_error(error) is not None

    def leave(self, error: Exception, last_step: int | None) -> None:
        """Record why this process leaves its world, and the last step done there. Not collective.

        `last_step` is None if that world ended before its first epoch: the steps that the world
        before it lost are then still to be reported, by the next one.
        """
        if last_step is None:
            last_step = self.own.last_step
        cause = first_line(error)[:_MAX_CAUSE]
        if isinstance(error, HostsUpdatedInterrupt):
            cause = "hosts have changed"
        elif cause in SHUT_DOWN:  # a text of Horovod's that names no rank
            cause = "a rank is lost"
        self.own = replace(self.own, last_step=last_step, cause=cause)
        self._backend = None

    def describe(self) -> str:
        """Return a line about the new world's size and the lost steps; "" for the first world."""
        before, now = self.agreed, self.own.size
        if not before.size:
            return ""
        what = "no commit was taken: training starts as it did before"
        if self.root is not None:
            lost = self.lost_steps
            steps = "1 step" if lost == 1 else f"{lost} steps"
            what = f"lost {steps} since the commit at step {before.step}"
        ranks = "1 rank" if now == 1 else f"{now} ranks"
        return f"world {before.size} -> {ranks}: {what} ({before.cause})"

    def as_dict(self, progress: Progress) -> dict[str, Any]:
        """Return what run.json says of this world: its size, where it begins, what was lost."""
        lost = {"lost_steps": self.lost_steps, "cause": self.agreed.cause}
        return {"ranks": self.own.size, **asdict(progress), **(lost if self.agreed.size else {})}

    @property
    def lost_steps(self) -> int:
        """The steps that were done after the newest commit, and are taken again."""
        return max(0, self.agreed.last_step - max(0, self.agreed.step))

    def _broadcast(self, value: Any) -> Any:
        assert self._backend is not None
        return self._backend.broadcast_object(value)
