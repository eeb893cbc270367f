"""The stall inspector: it warns about stragglers after a minute, and can shut the job down.

It runs on rank 0, with Horovod's text and variables (HOROVOD_STALL_...).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from hvdtrain.hvd.engine.coordinator import Coordinator
from hvdtrain.hvd.engine.settings import Settings
from hvdtrain.hvd.exceptions import SHUT_DOWN
from hvdtrain.liveness.failure import print_stderr

_NAMES = 6  # tensors listed for each rank; " ..." stands for the others


class StallInspector:
    """Checks the operations that wait for ranks. The control thread calls it after each wait.

    `describe_rank` returns the process and the host of a rank, as text; `tensors_of` the names of a
    channel's gradients.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        settings: Settings,
        describe_rank: Callable[[int], str],
        tensors_of: Callable[[str], list[str]],
    ) -> None:
        self._coordinator = coordinator
        self._settings = settings
        self._describe_rank = describe_rank
        self._tensors_of = tensors_of
        self._next = 0.0

    def check(self, now: float) -> None:
        """Warn once about each operation, and each optimizer step, that waits for too long.

        Shut down if one exceeds HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.
        """
        settings = self._settings
        if settings.stall_check_disable or now < self._next:
            return
        # Half the limit, so that a warning comes at most half of it late.
        self._next = now + min(0.5, settings.stall_check_time_s / 2)
        if fresh := self._stalled(now - settings.stall_check_time_s, only_new=True):
            self._warn(fresh)
        limit = settings.stall_shutdown_time_s
        if limit > 0 and (overdue := self._stalled(now - limit)):
            who = "; ".join(
                f"rank {rank} ({self._describe_rank(rank)}): {', '.join(names)}"
                for rank, names in overdue.items()
            )
            self._coordinator.shut_down(f"{SHUT_DOWN} Waited longer than {limit:g} s for {who}")

    def _stalled(self, before: float, only_new: bool = False) -> dict[int, list[str]]:
        """Return the tensors that have waited for each rank since a time, or longer.

        `only_new`: those that a call with it has not returned yet.
        """
        found: dict[int, list[str]] = defaultdict(list)
        for waiting, name, missing in self._coordinator.waiting():
            if waiting.since >= before or (only_new and waiting.warned) or not missing:
                continue
            waiting.warned |= only_new
            # A channel stands for all of its tensors.
            names = [f"allreduce.{tensor}@{name}" for tensor in self._tensors_of(name)] or [name]
            for rank in missing:
                found[rank] += names
        return dict(sorted(found.items()))

    def _warn(self, stalled: dict[int, list[str]]) -> None:
        seconds = f"{self._settings.stall_check_time_s:g}"
        lines = [
            "One or more tensors were submitted to be reduced, gathered or broadcasted by subset "
            f"of ranks and are waiting for remainder of ranks for more than {seconds} seconds. "
            "This may indicate that different ranks are trying to submit different tensors or that "
            "only subset of ranks is submitting tensors, which will cause deadlock.",
            "Missing ranks:",
        ]
        for rank, names in stalled.items():
            more = " ..." if len(names) > _NAMES else ""
            lines.append(f"{rank}: [{', '.join(names[:_NAMES])}{more}]")
        print_stderr("\n".join(lines))
