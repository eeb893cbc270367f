"""The fixture of live ranks on a transport, and the rows of the tables that hold on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import _kept, deselect
from tests.transports.collectives import Case
from tests.transports.features import Feature
from tests.transports.pool import Peers


@pytest.fixture(scope="session")
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    """Live ranks of one transport: see pool.py."""
    with _kept("peers", Peers(*request.param)) as pool:
        yield pool


@pytest.hookimpl(tryfirst=True)  # before pytest selects by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect(config, items, _holds)
    for item in items:
        row, where = _row(item)
        if row is not None and not row.is_first_on(*where):
            item.add_marker(pytest.mark.exhaustive)


def _holds(item: pytest.Item, _: dict[str, Any]) -> bool:
    row, where = _row(item)
    return row is None or row.holds_on(*where)


def _row(item: pytest.Item) -> tuple[Case | Feature | None, tuple[str, int]]:
    """Return the row that a test runs, and its transport and number of ranks."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec is not None else {}
    row = params.get("row")
    if not isinstance(row, Case | Feature):
        return None, ("", 0)
    return row, params["peers"]
