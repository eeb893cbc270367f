"""The arms of the tables, and their rows: those that do not hold on an arm are not tests there."""

from __future__ import annotations

import pytest

from tests.hvd.behaviour import Case
from tests.hvd.pool import OUR_ARMS, REAL_ARMS

# `make test` has what differs: the controllers, our sizes, and ranks that only MPI brings together.
# The others, by launcher and size, are in `make test-all`.
_IN_EVERY_RUN = {
    ("horovod-gloo", 2),
    ("horovod-mpi", 3),
    ("hvd-torchrun", 2),
    ("hvd-torchrun", 3),
    ("hvd-mpirun", 2),
}
ALL_HVD_ARMS = [
    pytest.param(arm, marks=() if arm in _IN_EVERY_RUN else pytest.mark.exhaustive)
    for arm in (*REAL_ARMS, *OUR_ARMS)
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect them. (Made by one parametrize, tests would not share a session's ranks.)"""
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        params = callspec.params if callspec is not None else {}
        row = params.get("row")
        fits = not isinstance(row, Case) or row.holds_on(*params["hvd_ranks"])
        (kept if fits else dropped).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
