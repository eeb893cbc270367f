"""The arms of the tables, and which of their rows `make test` runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import deselect
from tests.hvd.behaviour import Case

# `make test` runs each row once on ours: on the first of these arms where it holds.
FIRST = [("hvd-torchrun", 2), ("hvd-torchrun", 3)]
# `make test-rest` runs each row once more on ours and once on the real Horovod. The rows take these
# arms in turn: each launcher, transport and number of ranks gets a part of every file.
OTHERS = [("hvd-torchrun", 3), ("hvd-mpirun", 2), ("hvd-horovodrun", 3), ("hvd-torchrun", 1)]
REAL = [("horovod-gloo", 2), ("horovod-mpi", 3), ("horovod-mpi", 2)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect rows on arms where they do not hold or that others show, and mark the rest."""
    deselect(config, items, _is_kept)


def _is_kept(item: pytest.Item, params: dict[str, Any]) -> bool:
    row = params.get("row")
    if not isinstance(row, Case):
        return True
    arm = params["hvd_ranks"]
    first = next((a for a in FIRST if row.holds_on(*a)), None)
    if arm == first or (arm[0] == "exact" and row.holds_on(*arm)):
        return True
    item.add_marker(pytest.mark.exhaustive)
    others = REAL if arm[0].startswith("horovod") else OTHERS
    possible = [a for a in others if a != first and row.holds_on(*a)]
    return bool(possible) and arm == possible[row.number % len(possible)]
