"""Statistics: paired ratios of block times, their confidence intervals, and verdicts.

`speed` reports them, and `block_schedule` stops by them. The estimate is the median over blocks
of baseline time / arm time, both measured in the same block, so that a slow phase of the machine
affects both. Blocks are resampled, never steps: the steps of one block are not independent
measurements.

The interval is the percentile bootstrap of the median: of one start from its exact distribution,
of several by resampling starts, and then the blocks of each. Its level is raised for few blocks to
keep its coverage ("expanded percentile", Hesterberg 2015, What Teachers Should Know About the
Bootstrap). At the plain level the coverage of 95 % intervals was 87 % with 7 blocks, 92 % with 15,
94 % with 20; that of BCa was no higher, and that of the "basic" bootstrap 70 to 86 %. Expanded, it
is 95 to 98 % with 6 to 60 blocks, also with spikes (3,000 samples each).

An arm is called faster or slower if its interval excludes 1 and its ratio is further from 1 than
the A/A interval, that of the baseline against its duplicate, reaches. Results of 20,000 simulated
comparisons each, every arm with 5 % of noise per block (log-normal), and slower by 40 % (the mean
of an exponential) in one block of twenty:

    blocks   identical: false alarm  10 % slower: found   5 % slower: found   3 % slower: "faster"
    20       0.3 %                   84 %                 25 %                0 %
    30       0.5 %                   96 %                 45 %                0 %
    40       0.7 %                   99 %                 65 %                0 %
    60       0.4 %                   99.9 %               80 %                0 %

So a difference of 10 % needs 30 blocks, or 20 with 3 % of noise; with 8 % of noise, 60 blocks find
it in 93 %. Stopping as soon as the intervals are narrow costs one to two points of coverage (93 to
95 %), and leaves false verdicts at about 1 %.

No interval over blocks can show that one start of the same program is faster than the next because
of its memory layout (Kalibera and Jones 2013, Rigorous Benchmarking in Reasonable Time). If starts
differ by 0.5 % (standard deviation), 1 % of identical arms get a false verdict; by 1 %, 3 %; by
2 %, 12 % (60 blocks, 5 % of noise). With the blocks spread over four starts, the latter two are
0.2 % and 0.8 %, and 10 % slower is found in 99 % and 91 % (500 identical and 300 slower arms each;
if blocks were resampled without regard to starts, 2.2 % would be false at 2 %). More blocks do not
help; only more starts do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from hvdtrain.compare.compare_options import MIN_BLOCKS

RESAMPLES = 9_999
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A median over `blocks` blocks and its 95 % interval; all NaN without blocks."""

    median: float
    low: float
    high: float
    blocks: int


NOTHING = Interval(math.nan, math.nan, math.nan, 0)


def slowest(step_ms: Sequence[Sequence[float]]) -> Floats:
    """Return each step's time on its slowest rank, from [rank][step], up to the shortest list."""
    if not step_ms:
        return np.empty(0)
    steps = min(len(rank) for rank in step_ms)
    times: Floats = np.max([np.asarray(rank[:steps], dtype=float) for rank in step_ms], axis=0)
    return times


def block_ms(step_ms: Sequence[Sequence[float]], period: int = 1) -> float:
    """Return an arm's time in a block: median over steps of the slowest rank. NaN without steps.

    With a `period`, a rank's steps count as the means of whole periods: local SGD averages in one
    step of each, which a median over steps would never show.
    """
    if period > 1:
        whole = [np.asarray(rank[: len(rank) // period * period], dtype=float) for rank in step_ms]
        step_ms = [rank.reshape(-1, period).mean(axis=1).tolist() for rank in whole]
    times = slowest(step_ms)
    return float(np.median(times)) if times.size else math.nan


def paired(base: Mapping[int, float], arm: Mapping[int, float]) -> Floats:
    """Return how many times as fast as the base the arm is, in each block that both finished."""
    both = [(base[block], arm[block]) for block in sorted(base.keys() & arm.keys())]
    usable = [b / a for b, a in both if 0 < b < math.inf and 0 < a < math.inf]
    return np.asarray(usable, dtype=float)


def level(blocks: int) -> float:
    """Return the level to ask of the percentile bootstrap for 95 % coverage with few blocks."""
    t = float(special.stdtrit(blocks - 1, 0.975))
    return float(1 - 2 * special.ndtr(-math.sqrt(blocks / (blocks - 1)) * t))


def interval(values: Iterable[float], starts: Iterable[int] = ()) -> Interval:
    """Return the median of one value per block and its 95 % interval. NaNs are left out.

    `starts`: by block, in which start of the processes it was measured. With several, starts are
    resampled first, and then the blocks of each.
    """
    every = np.asarray(list(values), dtype=float)
    of_start = np.asarray(list(starts), dtype=int)
    sample = _finite(every)
    n = sample.size
    if n == 0:
        return NOTHING
    median = float(np.median(sample))
    if n == 1 or np.ptp(sample) == 0:
        return Interval(median, float(sample.min()), float(sample.max()), n)
    of_start = of_start[np.isfinite(every)] if of_start.size else np.zeros(n, dtype=int)
    if np.ptp(of_start) == 0:
        low, high = _limits(sample)
    else:
        tail = (1 - level(n)) / 2
        low, high = np.quantile(_resampled_medians(sample, of_start), [tail, 1 - tail])
    # Interpolation between two equal values can differ from both in the last bit.
    low = min(max(low, sample.min()), median)
    high = max(min(high, sample.max()), median)
    return Interval(median, float(low), float(high), n)


def _resampled_medians(sample: Floats, of_start: NDArray[np.int_]) -> Floats:
    """Return the medians of RESAMPLES resamples: of as many starts, with replacement, and of each
    an equal number of its blocks.
    """
    rng = np.random.default_rng(0)
    groups = [sample[of_start == start] for start in np.unique(of_start)]
    sizes = np.array([group.size for group in groups])
    firsts = np.cumsum(sizes) - sizes
    per_start = -(-sample.size // len(groups))
    chosen = rng.integers(len(groups), size=(RESAMPLES, len(groups), 1))
    draws = rng.random((RESAMPLES, len(groups), per_start))
    picked = firsts[chosen] + (draws * sizes[chosen]).astype(int)
    medians: Floats = np.median(np.concatenate(groups)[picked].reshape(RESAMPLES, -1), axis=1)
    return medians


def reach(values: Iterable[float]) -> float:
    """Return how far `interval` extends from the median on its longer side, as a factor less 1:
    0.02 if its upper limit is 1.02 times the median, or the median 1.02 times its lower limit.

    The stop rule calls it after each block, so it does not resample starts. Infinite with fewer
    than MIN_BLOCKS blocks.
    """
    sample = _finite(values)
    if sample.size < MIN_BLOCKS:
        return math.inf
    low, high = _limits(sample)
    median = float(np.median(sample))
    return max(high / median, median / low) - 1


def _limits(sample: Floats) -> tuple[float, float]:
    """Return both bootstrap limits of the median."""
    ordered = np.sort(sample)
    return _limit(ordered), -_limit(-ordered[::-1])


def _limit(ordered: Floats) -> float:
    """Return the lower bootstrap limit of the median, from its exact distribution (Efron 1979).

    The median of a resample is at most x if more than half of its n draws are at most x. For the
    k-th smallest value x, each draw is so with probability k/n.
    """
    n = ordered.size
    tail = (1 - level(n)) / 2
    share = np.arange(1, n + 1) / n
    # With an even n the median is the mean of the n/2-th smallest draw and the next.
    halves = {(n - 1) // 2, n // 2}
    ranks = [int(np.searchsorted(special.bdtrc(half, n, share), tail)) for half in halves]
    return float(np.mean(ordered[ranks]))


def spread(again: Interval) -> float | None:
    """Return how far from 1 the interval of an A/A pair extends, as a factor: 0.25 for a limit of
    1.25, or of 0.8. None with too few blocks.
    """
    if again.blocks < MIN_BLOCKS:
        return None
    return max(_factor(again.low), _factor(again.high)) - 1


def _factor(ratio: float) -> float:
    """Return the ratio, or its inverse: whichever is over 1. Both are the same difference."""
    return max(ratio, 1 / ratio) if ratio > 0 else math.inf


def excludes_1(ratio: Interval) -> bool:
    """Return whether there are enough blocks for an interval, and it excludes 1."""
    return ratio.blocks >= MIN_BLOCKS and not ratio.low <= 1 <= ratio.high


def verdict(ratio: Interval, noise: float | None) -> str:
    """Return "faster", "slower", "same" (no significant difference), "unknown" or "no A/A".

    `noise` is the A/A spread.
    """
    if ratio.blocks < MIN_BLOCKS:
        return "unknown"
    if noise is None:
        return "no A/A"
    if not excludes_1(ratio) or _factor(ratio.median) - 1 <= noise:
        return "same"
    return "faster" if ratio.median > 1 else "slower"


def sentence(arm: str, base: str, ratio: Interval, noise: float | None) -> str:
    """Return one plain sentence on an arm against the baseline. `noise` is the A/A spread."""
    found = verdict(ratio, noise)
    figure = figures(ratio)
    if ratio.blocks < MIN_BLOCKS:
        return f"{arm} against {base}: not enough blocks ({ratio.blocks}) to tell"
    if noise is None:
        return f"{arm} against {base}: {figure} as fast, but no verdict without a repeat of it"
    if found == "same":
        about = f"{figure}; noise {_percent(noise)}"
        return f"{arm} and {base}: no significant difference ({about})"
    return f"{arm} is {'slower: ' * (found == 'slower')}{figure} as fast as {base}"


def what_shows(blocks: int) -> str:
    """Return a line on how small a difference so many blocks can show, from the table above."""
    found = f"about {blocks} blocks; where noise is 5 % in a block, a difference of"
    return f"{found} {_percent(0.41 / math.sqrt(blocks))} is found four times in five"


def warning(again: str, base: str, ratio: Interval) -> str:
    """Return the warning for an A/A pair whose interval excludes 1."""
    least = _percent(spread(ratio) or 0.0)
    return (
        f"{again} is the same command as {base}, and yet {figures(ratio)} as fast: something "
        f"favoured one of them, so no difference below {least} means anything"
    )


def figures(ratio: Interval) -> str:
    """Return "1.34x [1.30, 1.38]", with a third decimal if two would round a limit to 1."""
    exact = (ratio.low, ratio.high, ratio.median)
    digits = 3 if any(0.0005 <= abs(x - 1) < 0.005 for x in exact[:2]) else 2
    low, high, median = (f"{x:.{digits}f}" for x in exact)
    return f"{median}x [{low}, {high}]"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def _finite(values: Iterable[float]) -> Floats:
    sample = np.asarray(list(values), dtype=float)
    kept: Floats = sample[np.isfinite(sample)]
    return kept
