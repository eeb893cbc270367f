"""The checkpoints that the tests of this folder damage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.test_checkpoint import save


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint directory with the steps 10 and 20."""
    root = tmp_path / "checkpoints"
    save(root, 10)
    save(root, 20)
    return root
