"""When a comparison starts its processes anew, and ends.

`comparison` asks it between blocks. The rules are fixed beforehand, from the options alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from hvdtrain.compare.compare_options import CompareOptions

# Starts of the processes: at most, and at least if there are several, because Student's interval of
# two is a dozen times as wide as they differ; and blocks after each.
MAX_STARTS, MIN_STARTS, MIN_BLOCKS_PER_START = 6, 3, 8
# With 5 blocks even their whole range contains the median with a probability of only 1 - 2/2**5 =
# 93.75 %, less than the 95 % that an interval needs.
MIN_BLOCKS = 6
SETTLED_BLOCKS = 10  # kept, before narrow intervals may end a comparison


class BlockSchedule:
    """The remaining starts, and the end, of one comparison."""

    def __init__(self, options: CompareOptions) -> None:
        self._options = options
        self._deadline = time.monotonic() + options.budget_s
        self.generation = 0
        """The number of restarts so far."""
        self.restarts_left = 0
        self._start_s = 0.0
        """Longest time from a start of the processes to their first block."""
        self._began = (0, 0.0)
        """The block index and the time at which the current start began."""

    def plan_restarts(self, start_s: float) -> None:
        """Set the number of restarts, at most MAX_STARTS - 1.

        With `options.blocks`: so that each start has MIN_BLOCKS_PER_START blocks; else at most half
        of the remaining time goes to restarts. `start_s`: how long it took from the start of the
        processes to the end of the warm-up.
        """
        self._start_s = start_s
        if self._options.blocks is not None:
            possible = self._options.blocks // MIN_BLOCKS_PER_START - 1
        else:
            possible = int((self._deadline - time.monotonic()) / 2 / start_s)
        self.restarts_left = min(MAX_STARTS - 1, possible) if possible >= MIN_STARTS - 1 else 0
        self._began = (0, time.monotonic())

    def restart_is_due(self, index: int) -> bool:
        """Return whether this start has used its share of the remaining blocks or time."""
        if not self.restarts_left:
            return False
        first, began = self._began
        shares = self.restarts_left + 1
        if self._options.blocks is not None:
            return index - first >= (self._options.blocks - first) / shares
        now, blocks = time.monotonic(), index - first
        left = self._deadline - began - self.restarts_left * self._start_s
        if blocks < MIN_BLOCKS_PER_START or now - began < left / shares:
            return False
        # Not if the blocks of the next start would not fit: a start of one block says nothing.
        needed_s = self._start_s + MIN_BLOCKS_PER_START * (now - began) / blocks
        num_needed = max(1, MIN_STARTS - 1 - self.generation)
        return now + num_needed * needed_s <= self._deadline

    def time_left(self) -> str:
        """Describe how many blocks there are, or how much time is left."""
        if self._options.blocks:
            return f"{self._options.blocks} in all"
        left = max(0, round(self._deadline - time.monotonic()))
        return f"at most {left // 60} min {left % 60} s left"

    def restarted(self, index: int, start_s: float) -> None:
        """Note that all processes have been started anew before the block `index`."""
        self._start_s = max(self._start_s, start_s)
        self.generation += 1
        self.restarts_left -= 1
        self._began = (index, time.monotonic())

    def why_to_stop(self, num_blocks: int, num_kept: int, reaches: Iterable[float]) -> str | None:
        """Return why there are enough blocks, or None. Only `num_kept` of `num_blocks` count.

        `reaches`: how far the interval of each arm's ratio extends; read only where it counts.
        """
        options = self._options
        if options.blocks is not None:
            return "the number of blocks asked for" if num_blocks >= options.blocks else None
        if num_blocks >= MIN_BLOCKS and time.monotonic() > self._deadline:
            return "the time"
        is_settled = num_kept >= SETTLED_BLOCKS and not self.restarts_left
        if is_settled and all(reach <= options.target_ci for reach in reaches):
            return "the width of the intervals"
        return None
