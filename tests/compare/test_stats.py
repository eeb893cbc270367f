"""Intervals and verdicts: what they must be by arithmetic, and how often they are right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import t

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.analysis.stats import Ratio, block_ms, significant, verdict
from tests.environments import rows

Arrays = tuple[dict[int, float], dict[int, float], dict[int, int]]


def test_the_time_of_a_block_is_the_mean_step_of_its_slowest_rank() -> None:
    assert block_ms([[5.0, 2.0, 5.0], [1.0, 9.0, 3.0]]) == pytest.approx(13 / 3)
    assert block_ms([[10.0, 10.0, 10.0, 50.0]]) == block_ms([[20.0] * 4])  # the same throughput
    nothings: list[list[list[float]]] = [[], [[]], [[1.0, math.nan], [1.0, 2.0]]]
    for nothing in nothings:
        assert math.isnan(block_ms(nothing))


def test_ratios_are_of_the_same_block_and_over_one_for_a_fast_arm() -> None:
    base = {0: 10.0, 1: 20.0, 2: 30.0, 4: 50.0}
    found = stats.ratio(base, {1: 10.0, 2: 15.0, 3: 1.0, 4: math.nan}, {})
    assert found.value == pytest.approx(2.0)
    assert found.blocks == 2
    assert found.low is found.p is None  # too few
    assert stats.ratio({}, base, {}) == stats.ratio({0: 1.0}, {0: 0.0}, {}) == Ratio()


def test_of_one_start_blocks_count_and_outliers_do_not() -> None:
    values = np.linspace(0.9, 1.1, 21)
    base, one = dict(enumerate(values)), dict.fromkeys(range(21), 1.0)
    spoilt = {**base, 20: 50.0}
    assert stats.ratio(base, one, {}) == stats.ratio(spoilt, one, {})
    assert stats.ratio(dict.fromkeys(range(5), 1.0), one, {}).low is None
    six = stats.ratio({i: 1.0 + i / 100 for i in range(6)}, one, {})
    assert (six.low, six.high) == pytest.approx((1.0, 1.05))


def test_of_several_starts_each_counts_once() -> None:
    """Student's interval of their medians, however many blocks they have."""
    medians = np.log([1.4, 1.5, 1.5, 1.7])
    start_of = {block: min(block // 5, 3) for block in range(40)}
    base = {block: math.exp(medians[start]) for block, start in start_of.items()}
    found = stats.ratio(base, dict.fromkeys(base, 1.0), start_of)
    margin = t.ppf(0.975, 3) * np.std(medians, ddof=1) / 2
    wanted = np.exp(np.mean(medians) + np.array([0, -margin, margin]))
    assert (found.value, found.low, found.high) == pytest.approx(tuple(wanted))


def simulated(rng: np.random.Generator, starts: int, sd: float, factor: float = 1.0) -> Arrays:
    """An arm that takes `factor` times as long, in starts of 10 blocks, which differ by `sd`: every
    block with as much noise, and one in twenty longer by 40 % and more.
    """
    blocks = 10 * starts if starts > 1 else 20

    def times(mean: float) -> Any:
        spikes = rng.exponential(0.4, blocks) * (rng.random(blocks) < 0.05)
        return mean * np.exp(sd * rng.standard_normal(blocks)) * (1 + spikes)

    # With one start its own ratio is what the interval is of.
    of_start = sd * rng.standard_normal(starts) if starts > 1 else np.zeros(1)
    start_of = {block: block // 10 % starts for block in range(blocks)}
    arm = times(factor) * np.exp([of_start[start_of[block]] for block in range(blocks)])
    return dict(enumerate(times(1.0))), dict(enumerate(arm)), start_of


@pytest.mark.parametrize("starts", [1, 2, 4, 6])
@pytest.mark.parametrize("sd", [0.01, 0.02, 0.05])
@pytest.mark.exhaustive
def test_the_interval_holds_the_truth_in_95_percent(starts: int, sd: float) -> None:
    rng, count = np.random.default_rng(1), 1000
    found = [stats.ratio(*simulated(rng, starts, sd)) for _ in range(count)]
    held = np.mean([(one.low or 9) <= 1 <= (one.high or 0) for one in found])
    assert held >= 0.93
    # And it is not merely wide.
    wide = {1: 3.0, 4: 5.0, 6: 3.2}.get(starts)
    assert wide is None or np.median([one.reach for one in found]) < wide * sd


@pytest.mark.parametrize(("starts", "found_least"), [(4, 0.8), (6, 0.95)])
@pytest.mark.exhaustive
def test_how_often_the_whole_decision_is_right(starts: int, found_least: float) -> None:
    """Five arms at once, of which one is slower by 10 %; starts differ by 2 %."""
    rng, count = np.random.default_rng(2), 300
    false = caught = 0
    for _ in range(count):
        arms = {
            name: stats.ratio(*simulated(rng, starts, 0.02, 1.1 if name == "slow" else 1.0))
            for name in ("slow", "b", "c", "d", "e")
        }
        noise = stats.ratio(*simulated(rng, starts, 0.02)).spread
        differ = significant(arms)
        said = {name: verdict(one, name in differ, noise) for name, one in arms.items()}
        caught += said.pop("slow") == "slower"
        false += set(said.values()) != {"same"}
    assert caught >= found_least * count
    assert false <= 0.03 * count


def known(value: float, low: float, high: float, p: float = 0.001) -> Ratio:
    return Ratio(value, low, high, p, 30)


@pytest.mark.parametrize(
    ("numbers", "differs", "said"),
    rows("""
    1.34 1.30 1.38 0.001 | True | faster
    0.71 0.69 0.73 0.001 | True | slower
    1.20 0.99 1.40 0.06 | False | same
    # The baseline differs as much from itself.
    1.02 1.01 1.03 0.001 | True | same
    0.98 0.97 0.99 0.001 | True | same
    0.967 0.96 0.98 0.001 | True | slower
    1.34 | False | unknown
    | False | unknown
    """),
)
def test_verdicts(numbers: str, differs: str, said: str) -> None:
    ratio = Ratio(*map(float, numbers.split()))  # type: ignore[arg-type]
    assert verdict(ratio, differs == "True", 0.03) == said
    assert verdict(ratio, differs == "True", None) == "unknown"


def test_the_correction_counts_the_arms() -> None:
    arms = {"a": known(2, 1, 3, 0.011), "b": known(2, 1, 3, 0.04), "c": known(2, 1, 3, 0.2)}
    assert significant(arms) == {"a"}  # 0.05 / 3, then 0.05 / 2
    assert significant({"b": arms["b"]}) == {"b"}
    assert significant({"b": arms["b"], "c": Ratio()}) == {"b"}


def test_reach_and_spread_are_factors() -> None:
    low, high = known(0.97, 0.93, 1.01), known(1.0, 0.8, 1.1)
    assert (high.reach, high.spread, low.spread) == pytest.approx((0.25, 0.25, 1 / 0.93 - 1))
    assert (Ratio(1.0).reach, Ratio(1.0).spread) == (math.inf, None)
