"""Some arms that play together: their live ranks by key, started at once, ended together.

One that fails leaves, and the others go on. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import methodcaller
from typing import Any, TypeVar

from hvdtrain.compare.job import Job
from hvdtrain.compare.ranks import ArmFailed, Ranks

T = TypeVar("T")


class Cast:
    """The arms that are `live`. `lost(key, reason)` is told of one that failed, once it is gone."""

    def __init__(self, lost: Callable[[str, str], None]) -> None:
        self.live: dict[str, Ranks] = {}
        self._lost = lost

    def start(
        self, launch: Callable[[str], Ranks], jobs: Mapping[str, Job]
    ) -> dict[str, list[Any]]:
        """Launch arms, and have each make its model and its loop: what their ranks said, by key."""
        for key in jobs:
            try:
                self.live[key] = launch(key)
            except ArmFailed as error:
                self._lost(key, str(error))
        # All at once, as most of it is waiting; nothing is timed yet.
        patience = 60.0 + 6.0 * sum(self.live[key].size for key in jobs if key in self.live)
        for key, job in jobs.items():
            self.attempt(key, methodcaller("meet", patience))
            self.attempt(key, methodcaller("begin", "open", job))
        said = {key: self.attempt(key, lambda ranks: ranks.finish(patience)) for key in jobs}
        return {key: facts for key, facts in said.items() if facts is not None}

    def attempt(self, key: str, do: Callable[[Ranks], T]) -> T | None:
        """Do something with an arm's ranks; None if it has failed, now or before."""
        if key not in self.live:
            return None
        try:
            return do(self.live[key])
        except ArmFailed as error:
            self.leave(key, gently=False)
            self._lost(key, str(error))
            return None

    def leave(self, key: str, gently: bool) -> None:
        """End an arm, unless it has gone already. `gently`: as programs end, else killed."""
        ranks = self.live.get(key)
        if ranks is not None:
            ranks.end(gently)  # ours until then, should Ctrl-C come in between
            self.live.pop(key, None)

    def end(self, gently: bool) -> None:
        """End all that are left."""
        if gently:
            for ranks in self.live.values():
                ranks.release()
        for ranks in self.live.values():
            ranks.end(gently)
        self.live.clear()
