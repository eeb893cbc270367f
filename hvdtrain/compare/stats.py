"""Paired ratios of block times, their intervals, and what may be said of them.

The figure is the median over blocks of baseline time / arm time, both taken in the same block, so
that what slows the machine for minutes slows both. Blocks are resampled, never steps: the steps of
a block share its moment and are no independent measurements.

The interval is the percentile bootstrap of the median, at a level raised for few blocks so that it
holds what it says ("expanded percentile", Hesterberg 2015, What Teachers Should Know About the
Bootstrap). At the plain level it held the truth in 87 % of 7 blocks, 92 % of 15, 94 % of 20, BCa no
more often, and the "basic" bootstrap in 70 to 86 %; expanded it is 95 to 98 % of 6 to 60 blocks,
also with spikes (3,000 samples each).

An arm is called faster or slower if its interval excludes 1 and it is further from 1 than the
interval of the baseline against a duplicate of itself reaches. Of 20,000 simulated comparisons
each, every arm with 5 % of noise per block (log-normal), and slower by 40 % (the mean of an
exponential) in one block of twenty:

    blocks   identical, told apart   10 % slower, found   5 % slower, found   3 % slower: "faster"
    20       0.3 %                   84 %                 25 %                0 %
    30       0.5 %                   96 %                 45 %                0 %
    40       0.7 %                   99 %                 65 %                0 %
    60       0.4 %                   99.9 %               80 %                0 %

So 30 blocks are needed for 10 %, and 20 suffice with 3 % of noise; with 8 % of noise 60 find it in
93 %. Stopping as soon as the intervals are narrow costs one to two points of what they hold (93 to
95 %), and leaves false verdicts at about 1 %.

What no interval over blocks can see is that one start of the very same program is faster than the
next, by where its memory happens to lie (Kalibera and Jones 2013, Rigorous Benchmarking in
Reasonable Time). If starts differ by 0.5 % (standard deviation), 1 % of identical arms are told
apart; by 1 %, 3 %; by 2 %, 12 %, of 60 blocks with 5 % of noise. Spread over four starts each, it
is 1 % and 3 % in the latter two. More blocks do not help; only more starts do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special
from scipy.stats import bootstrap

from hvdtrain.compare.options import MIN_BLOCKS

RESAMPLES = 9_999
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A median over `blocks` blocks and its 95 % interval; all NaN if there are none."""

    median: float
    low: float
    high: float
    blocks: int


NOTHING = Interval(math.nan, math.nan, math.nan, 0)


def slowest(step_ms: Sequence[Sequence[float]]) -> Floats:
    """Each step's time on its slowest rank, from [rank][step]; up to the shortest rank's last."""
    if not step_ms:
        return np.empty(0)
    steps = min(len(rank) for rank in step_ms)
    times: Floats = np.max([np.asarray(rank[:steps], dtype=float) for rank in step_ms], axis=0)
    return times


def block_ms(step_ms: Sequence[Sequence[float]]) -> float:
    """The time of an arm in a block: median over steps of the slowest rank. NaN without steps."""
    times = slowest(step_ms)
    return float(np.median(times)) if times.size else math.nan


def paired(base: Mapping[int, float], arm: Mapping[int, float]) -> Floats:
    """How many times as fast the arm is as the base, in each block that both have finished."""
    both = [(base[block], arm[block]) for block in sorted(base.keys() & arm.keys())]
    usable = [b / a for b, a in both if 0 < b < math.inf and 0 < a < math.inf]
    return np.asarray(usable, dtype=float)


def level(blocks: int) -> float:
    """The confidence level to ask of the percentile bootstrap for 95 % at so few blocks."""
    t = float(special.stdtrit(blocks - 1, 0.975))
    return float(1 - 2 * special.ndtr(-math.sqrt(blocks / (blocks - 1)) * t))


def interval(values: Iterable[float]) -> Interval:
    """The median of one value per block, and its 95 % interval. NaN are left out."""
    sample = _finite(values)
    n = sample.size
    if n == 0:
        return NOTHING
    median = float(np.median(sample))
    if n == 1 or np.ptp(sample) == 0:
        return Interval(median, float(sample.min()), float(sample.max()), n)
    found = bootstrap(
        (sample,),
        np.median,
        n_resamples=RESAMPLES,
        confidence_level=level(n),
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    # Interpolating between two equal values can end in another last bit than both.
    low = min(max(found.low, sample.min()), median)
    high = max(min(found.high, sample.max()), median)
    return Interval(median, float(low), float(high), n)


def reach(values: Iterable[float]) -> float:
    """How far `interval` reaches from the median on its longer side, relative to the median,
    without resampling: for a stop rule.

    Infinite with fewer than MIN_BLOCKS blocks.
    """
    sample = np.sort(_finite(values))
    n = sample.size
    if n < MIN_BLOCKS:
        return math.inf
    low = _limit(sample)
    high = -_limit(-sample[::-1])
    median = float(np.median(sample))
    return max(high - median, median - low) / median


def _limit(ordered: Floats) -> float:
    """The lower limit of the bootstrap of the median, whose distribution is known (Efron 1979).

    The median of a resample is at most x when over half of its n draws are; each of them is with
    probability k/n, if x is the k-th smallest.
    """
    n = ordered.size
    tail = (1 - level(n)) / 2
    share = np.arange(1, n + 1) / n
    # With an even n the median is the mean of two, which take the n/2-th and the next draw.
    halves = {(n - 1) // 2, n // 2}
    ranks = [int(np.searchsorted(special.bdtrc(half, n, share), tail)) for half in halves]
    return float(np.mean(ordered[ranks]))


def spread(again: Interval) -> float | None:
    """How far from 1 the interval of the baseline against itself reaches. None: not known."""
    if again.blocks < MIN_BLOCKS:
        return None
    return max(abs(again.low - 1), abs(again.high - 1))


def excludes_1(ratio: Interval) -> bool:
    """Whether there is an interval, and 1 is not in it."""
    return ratio.blocks >= MIN_BLOCKS and not ratio.low <= 1 <= ratio.high


def verdict(ratio: Interval, noise: float | None) -> str:
    """Say "faster", "slower", "same" (not to be told apart), "unknown" or "no A/A" of a ratio.

    `noise` is the A/A spread.
    """
    if ratio.blocks < MIN_BLOCKS:
        return "unknown"
    if noise is None:
        return "no A/A"
    if not excludes_1(ratio) or abs(ratio.median - 1) <= noise:
        return "same"
    return "faster" if ratio.median > 1 else "slower"


def sentence(arm: str, base: str, ratio: Interval, noise: float | None) -> str:
    """One plain sentence on an arm against the baseline. `noise` is the A/A spread."""
    said = verdict(ratio, noise)
    figure = figures(ratio)
    if ratio.blocks < MIN_BLOCKS:
        return f"{arm} against {base}: not enough blocks ({ratio.blocks}) to tell"
    if noise is None:
        return f"{arm} against {base}: {figure} as fast, but no verdict without an A/A duplicate"
    if said == "same":
        return (
            f"{arm} and {base}: no significant difference ({figure}; A/A spread {_percent(noise)})"
        )
    return f"{arm} is {'slower: ' * (said == 'slower')}{figure} as fast as {base}"


def warning(again: str, base: str, ratio: Interval) -> str:
    """What to say of an A/A pair whose interval excludes 1."""
    return (
        f"{again} is the same as {base}, and yet {figures(ratio)} as fast: something favoured one "
        f"of two equal arms, so no difference below {_percent(spread(ratio) or 0.0)} means anything"
    )


def figures(ratio: Interval) -> str:
    """Say "1.34x [1.30, 1.38]", with a third decimal where two would move a limit onto 1."""
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
