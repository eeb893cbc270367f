"""The fixture of live ranks on a transport, and the rows of the table that hold on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import _kept, deselect
from tests.transports.collectives import Case
from tests.transports.pool import Peers


@pytest.fixture(scope="session")
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    """Live ranks of one transport: see pool.py."""
    with _kept("peers", Peers(*request.param)) as pool:
        yield pool


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect(config, items, _holds)


def _holds(_: pytest.Item, params: dict[str, Any]) -> bool:
    row = params.get("row")
    return not isinstance(row, Case) or row.holds_on(*params["peers"])
