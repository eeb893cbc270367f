"""The arms of the tables, and which of their rows `make test` runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import deselect
from tests.hvd.behaviour import Case

# Three ranks show what two show; with two, the sums of ours can be compared with Horovod's.
OUR_TORCHRUN = [
    pytest.param(("hvd-torchrun", 2), marks=pytest.mark.exhaustive),
    pytest.param(("hvd-torchrun", 3)),
]
# `make test` runs each row on the first of these arms where it holds: once on the real Horovod and
# once on ours. The launcher and the number of ranks make a difference to few rows.
_FIRST = {
    "horovod": [("horovod-gloo", 2), ("horovod-mpi", 3), ("horovod-gloo", 3), ("horovod-mpi", 2)],
    "hvd": [("hvd-torchrun", 3), ("hvd-torchrun", 2), ("hvd-mpirun", 2), ("hvd-torchrun", 1)],
}
# Every launcher, and every number of ranks, but not each with each: rows that hold on another arm
# of the same API are not run on these.
_SPARE = [("horovod-gloo", 3), ("horovod-mpi", 2), ("hvd-mpirun", 2), ("hvd-horovodrun", 3)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect rows on arms where they do not hold, and mark those that another arm shows."""
    deselect(config, items, _is_kept)


def _is_kept(item: pytest.Item, params: dict[str, Any]) -> bool:
    row = params.get("row")
    if not isinstance(row, Case):
        return True
    arm = params["hvd_ranks"]
    if not row.holds_on(*arm):
        return False
    first = next((a for a in _FIRST[arm[0].partition("-")[0]] if row.holds_on(*a)), arm)
    if arm in _SPARE and first not in _SPARE:
        return False
    if arm != first:
        item.add_marker(pytest.mark.exhaustive)
    return True
