"""When a comparison starts its processes anew, and ends.

`comparison` asks it between blocks. The rules are fixed beforehand, from the options alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from hvdtrain.compare.compare_options import MIN_BLOCKS, CompareOptions

# At most this many starts of the processes; at least this many blocks after each.
MAX_STARTS, MIN_BLOCKS_PER_START = 4, 8
SETTLED_BLOCKS = 10  # kept, before narrow intervals may end a comparison
MAX_BUDGETS = 2  # times the budget, if too few blocks count for a verdict


class BlockSchedule:
    """The remaining starts, and the end, of one comparison."""

    def __init__(self, options: CompareOptions) -> None:
        self._options = options
        self._deadline = time.monotonic() + options.budget_s
        self._last_deadline = time.monotonic() + MAX_BUDGETS * options.budget_s
        self.generation = 0
        """The number of restarts so far."""
        self._restarts_left = 0
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
            left = self._deadline - time.monotonic()
            possible = int(left / 2 / start_s)
        self._restarts_left = max(0, min(MAX_STARTS - 1, possible))
        self._began = (0, time.monotonic())

    def expected_blocks(self, block_s: float) -> int:
        """Return about how many blocks there will be. `block_s`: the time of one."""
        if self._options.blocks is not None:
            return self._options.blocks
        left = self._deadline - time.monotonic() - self._restarts_left * self._start_s
        return max(MIN_BLOCKS, int(left / block_s))

    def restart_is_due(self, index: int) -> bool:
        """Return whether this start has used its share of the remaining blocks or time."""
        if not self._restarts_left:
            return False
        first, began = self._began
        shares = self._restarts_left + 1
        if self._options.blocks is not None:
            return index - first >= (self._options.blocks - first) / shares
        now, blocks = time.monotonic(), index - first
        left = self._deadline - began - self._restarts_left * self._start_s
        if blocks < MIN_BLOCKS_PER_START or now - began < left / shares:
            return False
        # Not if the blocks of the next start would not fit: a start of one block says nothing.
        needed_s = self._start_s + MIN_BLOCKS_PER_START * (now - began) / blocks
        return now + needed_s <= self._deadline

    def restarted(self, index: int, start_s: float) -> None:
        """Note that all processes have been started anew before the block `index`."""
        self._start_s = max(self._start_s, start_s)
        self.generation += 1
        self._restarts_left -= 1
        self._began = (index, time.monotonic())

    def why_to_stop(
        self, num_blocks: int, num_kept: int, num_arms: int, widths: Iterable[float]
    ) -> str | None:
        """Return why there are enough blocks, or None. Only `num_kept` of `num_blocks` count.

        At the end of the time too few may count for a verdict, because others used the CPU: the
        comparison then goes on, up to MAX_BUDGETS times the time. `widths`: how far the interval of
        each arm's ratio extends; read only where it counts.
        """
        options = self._options
        if num_arms < 2:
            return "the loss of the other arms"
        if options.blocks is not None:
            return "the number of blocks asked for" if num_blocks >= options.blocks else None
        now = time.monotonic()
        if num_kept >= MIN_BLOCKS and now > self._deadline:
            return "the time"
        if num_blocks >= MIN_BLOCKS and now > self._last_deadline:
            return "the time, with too few blocks that count"
        is_settled = num_kept >= SETTLED_BLOCKS and not self._restarts_left
        if is_settled and all(width <= options.target_ci for width in widths):
            return "the width of the intervals"
        return None
