"""Equality is the first test: every backend against a hand-written loop of plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import EVERY_ARM
from tests.methods.arms import TWO, on
from tests.parity.reference import CASES, reference
from tests.parity.trained import train
from tests.ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")


@on(*EVERY_ARM)
def test_every_backend(ranks: Ranks, tmp_path: Path) -> None:
    """Sums over micro-batches, clipping and momentum in fp32, and AdamW in fp64."""
    check(ranks, "sgd-cosine", "adamw", tmp_path)


@pytest.mark.parametrize(
    "case",
    [  # the others are among those of every backend
        pytest.param(name, marks=() if name == "adamw-step" else pytest.mark.exhaustive)
        for name in CASES
    ],
)
@TWO
def test_every_case(ranks: Ranks, case: str, tmp_path: Path) -> None:
    """The optimizer and the schedule are the same code on every backend."""
    check(ranks, case, case, tmp_path)


def check(ranks: Ranks, fp32: str, fp64: str, folder: Path) -> None:
    """Compare a case in fp32: at one and two ranks bit by bit; beyond, the order of a sum is the
    transport's. And one in fp64: within 1e-12 of one process, and alike on all ranks.
    """
    rtol, atol = (0.0, 0.0) if ranks.n <= 2 else (1e-4, 1e-6)
    expected = reference(CASES[fp32], ranks.n, "fp32")
    for state in ranks.run(train, CASES[fp32], "fp32", folder / "fp32"):
        torch.testing.assert_close(state, expected, rtol=rtol, atol=atol)
    expected = reference(CASES[fp64], 1, "fp64")
    states = ranks.run(train, CASES[fp64], "fp64", folder / "fp64")
    for state in states:
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(state, states[0], rtol=0, atol=0)
