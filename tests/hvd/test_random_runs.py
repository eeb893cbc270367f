"""Random runs: no hang, and no gradient of another step, pass, rank or parameter."""

from __future__ import annotations

import pytest

from tests.hvd.pool import REAL_ARMS, HvdRanks
from tests.hvd.random_runs import Plan, run_seeds

SEEDS = range(200)
OF_THREE = SEEDS[20:50]
PER_CALL = 40
OURS = "hvd-torchrun"
# `make test` runs some seeds, `make test-rest` some with more ranks, and on the real Horovod;
# `make soak` all.
RUNS = [
    pytest.param(("small-buckets", 2), SEEDS[1:40:2]),
    pytest.param((OURS, 3), OF_THREE, marks=pytest.mark.exhaustive),
    *(pytest.param(arm, SEEDS[:30], marks=pytest.mark.exhaustive) for arm in REAL_ARMS),
    *(
        pytest.param((arm, n), SEEDS[first : first + PER_CALL], marks=pytest.mark.soak)
        for n in (2, 3)
        for arm in (OURS, "small-buckets")
        for first in SEEDS[::PER_CALL]
    ),
]


@pytest.mark.parametrize(("hvd_ranks", "seeds"), RUNS, indirect=["hvd_ranks"], ids=str)
def test_trains_as_one_process(hvd_ranks: HvdRanks, seeds: range) -> None:
    hvd_ranks.run(run_seeds, list(seeds))


@pytest.mark.parametrize(("seeds", "least"), [(SEEDS, 5), (OF_THREE, 1)])
def test_seeds_reach_what_is_rare(seeds: range, least: int) -> None:
    plans = [Plan(seed, 3) for seed in seeds]
    assert sum(plan.same_names for plan in plans) > least
    steps = [step for plan in plans for steps in plan.epochs for step in steps]
    orders = [{(*share.steps,) for share in step.shares if share} for step in steps]
    assert sum(len(each) > 1 for each in orders) > least
