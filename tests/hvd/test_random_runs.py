"""Random runs: no hang, and no gradient of another step, pass, rank or parameter."""

from __future__ import annotations

import pytest

from tests.hvd.pool import REAL_ARMS, HvdRanks
from tests.hvd.random_runs import make_plan, run_seeds

SEEDS = range(200)
PER_CALL = 40
OURS = "hvd-torchrun"
# `make test` runs some seeds, `make test-rest` some with more ranks, and on the real Horovod;
# `make soak` all.
RUNS = [
    pytest.param(("small-buckets", 2), SEEDS[1:40:2]),
    *(
        pytest.param(arm, SEEDS[:30], marks=pytest.mark.exhaustive)
        for arm in [(OURS, 3), *REAL_ARMS]
    ),
    *(
        pytest.param((arm, n), SEEDS[first : first + PER_CALL], marks=pytest.mark.soak)
        for n in (2, 3)
        for arm in (OURS, "small-buckets")
        for first in SEEDS[::PER_CALL]
    ),
]


@pytest.mark.parametrize(("hvd_ranks", "seeds"), RUNS, indirect=["hvd_ranks"], ids=str)
def test_trains_as_one_process(hvd_ranks: HvdRanks, seeds: range) -> None:
    results = hvd_ranks.run(run_seeds, list(seeds))
    assert not any(results), "\n".join(line for lines in results for line in lines)


def test_seeds_reach_everything() -> None:
    """So that no later change of the generator makes the runs easy."""
    plans = [make_plan(seed, 3) for seed in SEEDS]
    epochs = [steps for plan in plans for steps in plan.epochs]
    shares = [share for steps in epochs for step in steps for share in step.shares]
    assert sum(any(None in step.shares for step in steps) for steps in epochs) > 40
    assert sum(plan.same_names for plan in plans) > 20
    assert sum(max(plan.passes) > 1 for plan in plans) > 80
    for what in ("late", "frozen", "metrics"):
        assert sum(bool(share) and any(getattr(share, what)) for share in shares) > 200
