"""A pool of running arms, by key: started in parallel, called one at a time, ended together.

`stage` has one for the arms of the comparison and one for the trials of `--tune`. An arm that fails
leaves the pool, and the others continue. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import methodcaller
from typing import Any, TypeVar

from hvdtrain.compare.run.arm_process import ArmFailed, Ranks
from hvdtrain.compare.run.messages import Job

T = TypeVar("T")


class Cast:
    """The running arms, in `live`. `lost(key, reason)` is called after a failed arm has ended."""

    def __init__(self, lost: Callable[[str, str], None]) -> None:
        self.live: dict[str, Ranks] = {}
        self._lost = lost

    def start(
        self, launch: Callable[[str], Ranks], jobs: Mapping[str, Job]
    ) -> dict[str, list[Any]]:
        """Launch arms, open model and loop in each, and return the facts of their ranks by key."""
        for key in jobs:
            try:
                self.live[key] = launch(key)
            except ArmFailed as error:
                self._lost(key, str(error))
        # In parallel: a start is mostly waiting, and nothing is timed yet.
        patience = 60.0 + 6.0 * sum(self.live[key].size for key in jobs if key in self.live)
        # Send "open" to all before waiting for any answer: opening can take long, too.
        for key, job in jobs.items():
            self.attempt(key, methodcaller("meet", patience))
            self.attempt(key, methodcaller("begin", "open", job))
        said = {key: self.attempt(key, lambda ranks: ranks.finish(patience)) for key in jobs}
        return {key: facts for key, facts in said.items() if facts is not None}

    def attempt(self, key: str, do: Callable[[Ranks], T]) -> T | None:
        """Return `do(ranks)` for an arm; None if the arm fails now or has failed before."""
        if key not in self.live:
            return None
        try:
            return do(self.live[key])
        except ArmFailed as error:
            self.leave(key, gently=False)
            self._lost(key, str(error))
            return None

    def leave(self, key: str, gently: bool) -> None:
        """End an arm that is still in the pool. `gently`: by a normal exit, else by SIGKILL."""
        ranks = self.live.get(key)
        if ranks is not None:
            ranks.end(gently)  # stays in `live` until it has ended, in case of Ctrl-C
            self.live.pop(key, None)

    def end(self, gently: bool) -> None:
        """End all arms of the pool."""
        if gently:  # ask all first, so that they exit in parallel
            for ranks in self.live.values():
                ranks.release()
        for ranks in self.live.values():
            ranks.end(gently)
        self.live.clear()
