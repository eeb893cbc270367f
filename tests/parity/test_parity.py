"""Equality is the first test: every backend against a hand-written loop of plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import EVERY_ARM
from tests.methods.arms import on
from tests.parity.reference import ADAMW, SGD, reference
from tests.parity.trained import train
from tests.ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")


@on(*EVERY_ARM)
def test_every_backend(ranks: Ranks, tmp_path: Path) -> None:
    """Sums over micro-batches, clipping and momentum in fp32: at one and two ranks bit by bit;
    beyond, the order of a sum is the transport's. And AdamW in fp64: within 1e-12 of one process,
    and alike on all ranks.
    """
    rtol, atol = (0.0, 0.0) if ranks.n <= 2 else (1e-4, 1e-6)
    expected = reference(SGD, ranks.n, "fp32")
    for state in ranks.run(train, SGD, "fp32", tmp_path / "fp32"):
        torch.testing.assert_close(state, expected, rtol=rtol, atol=atol)
    expected = reference(ADAMW, 1, "fp64")
    states = ranks.run(train, ADAMW, "fp64", tmp_path / "fp64")
    for state in states:
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)
