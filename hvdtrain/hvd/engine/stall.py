"""The stall inspector: it warns about stragglers after a minute, and can shut the job down.

It runs on rank 0, with Horovod's text and variables (HOROVOD_STALL_...).
"""

from __future__ import annotations

from collections.abc import Callable

from hvdtrain.failure import print_stderr
from hvdtrain.hvd.engine.coordinator import Coordinator, LaneSteps, Waiting
from hvdtrain.hvd.engine.settings import Settings
from hvdtrain.hvd.exceptions import SHUT_DOWN

Record = Waiting | LaneSteps
_NAMES = 6  # tensors listed for each rank; " ..." stands for the others


class Inspector:
    """Checks the operations that wait for ranks. Called twice a second by the control thread.

    `person` returns the process and the host of a rank, as text.
    """

    def __init__(
        self, coordinator: Coordinator, settings: Settings, person: Callable[[int], str]
    ) -> None:
        self._coordinator = coordinator
        self._settings = settings
        self._person = person
        self._next = 0.0

    def look(self, now: float) -> None:
        """Warn once about each operation, and each optimizer step, that waits for too long.

        Shut down if one exceeds HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.
        """
        settings = self._settings
        if settings.stall_check_disable or now < self._next:
            return
        # Half the limit, so that a warning comes at most half of it late.
        self._next = now + min(0.5, settings.stall_check_time_s / 2)
        stalled = self._stalled(now, settings.stall_check_time_s)
        fresh = [item for item in stalled if not item[2].warned]
        for _, _, record in fresh:
            record.warned = True
        if fresh:
            self._warn([(name, missing) for name, missing, _ in fresh])
        limit = settings.stall_shutdown_time_s
        if limit > 0 and (hopeless := self._stalled(now, limit)):
            by_rank = _by_rank([(name, missing) for name, missing, _ in hopeless])
            who = "; ".join(
                f"rank {r} ({self._person(r)}): {', '.join(names)}" for r, names in by_rank.items()
            )
            self._coordinator.go_down(
                f"{SHUT_DOWN} Ranks were waited for longer than {limit:g} seconds: {who}", -1, {}
            )

    def _stalled(self, now: float, limit_s: float) -> list[tuple[str, list[int], Record]]:
        found: list[tuple[str, list[int], Record]] = []
        for key, waiting in self._coordinator.waiting.items():
            if now - waiting.since > limit_s:
                found.append((key.name, self._coordinator.missing(key, waiting), waiting))
        for lane, steps in self._coordinator.lanes.items():
            late = self._coordinator.late(steps)
            if late and now - steps.changed > limit_s:
                names = self._coordinator.lane_tensors.get(lane, [])
                found += [(f"allreduce.{name}@{lane}", late, steps) for name in names]
        return found

    def _warn(self, stalled: list[tuple[str, list[int]]]) -> None:
        seconds = f"{self._settings.stall_check_time_s:g}"
        lines = [
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset "
            f"of ranks and are waiting for remainder of ranks for more than {seconds} seconds. "
            "This may indicate that different ranks are trying to submit different tensors or that "
            "only subset of ranks is submitting tensors, which will cause deadlock.",
            "Missing ranks:",
        ]
        for rank, names in _by_rank(stalled).items():
            more = " ..." if len(names) > _NAMES else ""
            lines.append(f"{rank}: [{', '.join(names[:_NAMES])}{more}]")
        print_stderr("\n".join(lines))


def _by_rank(stalled: list[tuple[str, list[int]]]) -> dict[int, list[str]]:
    by_rank: dict[int, list[str]] = {}
    for name, missing in stalled:
        for rank in missing:
            by_rank.setdefault(rank, []).append(name)
    return dict(sorted(by_rank.items()))
