"""Every case of the table, on the real Horovod and on ours: see behaviour.py."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.hvd.behaviour import TABLE, Case, run_case
from tests.hvd.conftest import FIRST, OTHERS, REAL
from tests.hvd.pool import OUR_ARMS, REAL_ARMS, HvdRanks

for _kind in ("behaviour_*.py", "optimizer_*.py"):  # which fill the table
    for _path in sorted(Path(__file__).parent.glob(_kind)):
        importlib.import_module(f"tests.hvd.{_path.stem}")


USED = [*FIRST, *OTHERS, *REAL, ("exact", 2)]
ARMS = [*REAL_ARMS, *OUR_ARMS, ("hvd-torchrun", 1), ("exact", 2)]


def test_every_row_is_run() -> None:
    assert [row.name for row in TABLE if not any(row.holds_on(*arm) for arm in USED)] == []


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("hvd_ranks", ARMS, indirect=True)
def test_behaves(hvd_ranks: HvdRanks, row: Case) -> None:
    hvd_ranks.run(run_case, row.function, row.ends)
    if row.ends:
        hvd_ranks.stop()
