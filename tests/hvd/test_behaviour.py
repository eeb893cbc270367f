"""Every case of the table, on the real Horovod and on ours: see behaviour.py."""

from __future__ import annotations

import pytest

from tests.hvd import (
    behaviour_adasum,
    behaviour_allgather,
    behaviour_allreduce,
    behaviour_alltoall,
    behaviour_beyond,
    behaviour_broadcast,
    behaviour_engine,
    behaviour_functions,
    behaviour_gradients,
    behaviour_grouped,
    behaviour_join,
    behaviour_lifecycle,
    behaviour_reducescatter,
    behaviour_sets,
)
from tests.hvd.behaviour import TABLE, Case, run_case
from tests.hvd.pool import OUR_ARMS, REAL_ARMS, HvdRanks

GROUPS = (
    behaviour_lifecycle,
    behaviour_engine,
    behaviour_allreduce,
    behaviour_grouped,
    behaviour_gradients,
    behaviour_adasum,
    behaviour_allgather,
    behaviour_broadcast,
    behaviour_alltoall,
    behaviour_reducescatter,
    behaviour_join,
    behaviour_sets,
    behaviour_functions,
    behaviour_beyond,
)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("hvd_ranks", [*REAL_ARMS, *OUR_ARMS], indirect=True)
def test_behaves(hvd_ranks: HvdRanks, row: Case) -> None:
    hvd_ranks.run(run_case, row.function, row.uneven, row.ends)
    if row.ends:
        hvd_ranks.stop()


@pytest.mark.parametrize("hvd_ranks", [("hvd-torchrun", 1)], indirect=True)
def test_gradients_of_one_rank(hvd_ranks: HvdRanks) -> None:
    hvd_ranks.run(behaviour_gradients.gradients_are_those_of_finite_differences)


def test_every_group_is_in_the_table() -> None:
    assert {row.function.__module__ for row in TABLE} == {group.__name__ for group in GROUPS}
