"""Rules for the source of the transports and of the engine, read with `ast`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hvdtrain

ROOT = Path(hvdtrain.__file__).parent
# Those of torch that make a tensor on the default device unless they are given one.
FACTORIES = """arange as_tensor asarray empty empty_strided eye full linspace logspace ones rand
    randint randn randperm scalar_tensor sparse_coo_tensor tensor zeros""".split()


@pytest.mark.parametrize("package", ["transports", "hvd"])
def test_factories_name_their_device(package: str) -> None:
    """A blocking collective runs in the caller's thread, whose default device may be another."""
    unnamed = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in FACTORIES
                and ast.unparse(node.func.value) == "torch"
                and "device" not in [keyword.arg for keyword in node.keywords]
            ):
                unnamed.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not unnamed, "without device=:\n" + "\n".join(unnamed)
