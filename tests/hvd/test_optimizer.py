"""Every case of DistributedOptimizer's table, on the real Horovod and on ours."""

from __future__ import annotations

import pytest

from tests.hvd import (
    optimizer_arguments,
    optimizer_changes,
    optimizer_class,
    optimizer_hooks,
    optimizer_ownership,
    optimizer_passes,
    optimizer_reduction,
    optimizer_state,
    optimizer_training,
    optimizer_uneven,
)
from tests.hvd.behaviour import Case, run_case
from tests.hvd.optimizer_table import TABLE
from tests.hvd.pool import OUR_ARMS, REAL_ARMS, HvdRanks

GROUPS = (
    optimizer_arguments,
    optimizer_changes,
    optimizer_class,
    optimizer_hooks,
    optimizer_ownership,
    optimizer_passes,
    optimizer_reduction,
    optimizer_state,
    optimizer_training,
    optimizer_uneven,
)
ARMS = [*REAL_ARMS, *OUR_ARMS, ("horovod-gloo", 1), ("hvd-torchrun", 1)]


def name(row: Case) -> str:
    return f"{row.function.__module__.rpartition('optimizer_')[2]}-{row.function.__name__}"


@pytest.mark.parametrize("row", TABLE, ids=name)
@pytest.mark.parametrize("hvd_ranks", ARMS, indirect=True)
def test_behaves(hvd_ranks: HvdRanks, row: Case) -> None:
    hvd_ranks.run(run_case, row.function, row.uneven, row.ends)


def test_every_group_has_rows() -> None:
    assert {row.function.__module__ for row in TABLE} == {group.__name__ for group in GROUPS}
