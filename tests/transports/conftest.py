"""The fixture of live ranks on a transport, and the rows of the table that hold on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import _kept
from tests.transports.collectives import Case
from tests.transports.pool import Peers


@pytest.fixture(scope="session")
def peers(request: pytest.FixtureRequest) -> Iterator[Peers]:
    """Live ranks of one transport: see pool.py."""
    with _kept("peers", Peers(*request.param)) as pool:
        yield pool


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    return f"{val[0]}-x{val[1]}" if argname == "peers" and isinstance(val, tuple) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the others. (Made by one parametrize, tests would not share a session's ranks.)"""
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        callspec = getattr(item, "callspec", None)
        params = callspec.params if callspec is not None else {}
        row = params.get("row")
        fits = not isinstance(row, Case) or row.holds_on(*params["peers"])
        (kept if fits else dropped).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)
