"""The rows of the tables that hold on each transport."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import deselect
from tests.transports.collectives import Case
from tests.transports.features import FEATURES


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
