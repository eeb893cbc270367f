"""The fixture of live ranks on a transport, and the rows of the tables that hold on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import _kept, deselect
from tests.transports.collectives import Case
from tests.transports.features import FEATURES
from tests.transports.pool import Peers


@pytest.fixture(scope="session")
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    """Live ranks of one transport: see pool.py."""
    with _kept("peers", Peers(*request.param)) as pool:
        yield pool


@pytest.hookimpl(tryfirst=True)  # before pytest selects by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect(config, items, _holds)


def _holds(item: pytest.Item, params: dict[str, Any]) -> bool:
    """Return whether a test's row holds on its ranks; mark it by where else it is run."""
    if "peers" not in params:
        return True
    row, arm = params["row"], params["peers"]
    is_case = isinstance(row, Case)
    if not (row.is_first_on(*arm) if is_case else arm[0] in FEATURES[row].split()):
        item.add_marker(pytest.mark.exhaustive)
    if is_case and row.is_repeat_on(*arm):
        item.add_marker(pytest.mark.slow)
    return not is_case or row.holds_on(*arm)
