"""Which ranks `make test` has for the tests of methods; `make test-rest` has the others."""

from __future__ import annotations

import pytest

from tests.methods.arms import IN_MAKE_TEST


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests on other ranks, unless a test has none of those that are kept."""
    of_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        own = item.path.parent.name == "methods"
        if own and callspec is not None and isinstance(callspec.params.get("ranks"), tuple):
            of_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in of_test.values():
        left_out = [item for item in group if item.callspec.params["ranks"] not in IN_MAKE_TEST]  # type: ignore[attr-defined]
        if len(left_out) < len(group):
            for item in left_out:
                item.add_marker(pytest.mark.exhaustive)
