"""Random runs: no hang, and no gradient of another step, pass, rank or parameter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hvd.pool import HvdRanks
from tests.hvd.random_runs import make_plan, run_seeds

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("hvd-random_runs")

SEEDS = range(200)
PER_CALL = 40


class Patient(HvdRanks):
    """Ranks that get the time for many runs."""

    call_s = 90.0


class SmallBuckets(Patient):
    """Ranks for which a few parameters fill a bucket."""

    env = {**HvdRanks.env, "HOROVOD_FUSION_THRESHOLD": "200"}


KINDS = {"big": Patient, "small": SmallBuckets}


# `make test` runs a few seeds, `make test-rest` a few with more ranks, `make soak` all.
RUNS = [
    pytest.param((2, "small"), range(1, 16, 2)),
    pytest.param((3, "big"), range(0, 30, 2), marks=pytest.mark.exhaustive),
    *(
        pytest.param(
            (n, kind), SEEDS[first : first + PER_CALL][kind == "small" :: 2], marks=pytest.mark.soak
        )
        for n in (2, 3)
        for kind in ("small", "big")
        for first in SEEDS[::PER_CALL]
    ),
]


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[HvdRanks]:
    n, kind = request.param
    ranks = KINDS[kind]("hvd-torchrun", n)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(("pool", "seeds"), RUNS, indirect=["pool"], ids=str)
def test_trains_as_one_process(pool: HvdRanks, seeds: range) -> None:
    """Odd seeds with small buckets, even ones with big."""
    results = pool.run(run_seeds, list(seeds))
    assert not any(results), "\n".join(line for lines in results for line in lines)


def test_seeds_reach_everything() -> None:
    """So that no later change of the generator makes the runs easy."""
    plans = [make_plan(seed, 3) for seed in SEEDS]
    shares = [share for plan in plans for step in plan.steps for share in step.shares]
    joined = [plan for plan in plans if any(None in step.shares for step in plan.steps)]
    assert len(joined) > 40
    assert sum(len(plan.branches) == 2 for plan in plans) > 40
    assert sum(plan.same_names for plan in plans) > 20
    assert sum(max(plan.passes) > 1 for plan in plans) > 80
    assert sum(bool(share and any(share.late)) for share in shares) > 200
    assert sum(bool(share and len(share.metrics) > 1) for share in shares) > 200
    assert sum(bool(share and any(share.frozen)) for share in shares) > 200
    assert sum(share.steps == [1, 0] for share in shares if share) > 50
