"""Equality is the first test: every backend against a hand-written loop of plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import EVERY_ARM
from tests.methods.arms import TWO
from tests.parity.reference import CASES, reference
from tests.parity.trained import train
from tests.ranks import Ranks

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("ranks", EVERY_ARM, indirect=True)
def test_every_backend(ranks: Ranks, tmp_path: Path) -> None:
    """Sums over micro-batches, clipping and momentum in fp32, and AdamW in fp64."""
    check_fp32(ranks, "sgd-cosine", tmp_path / "fp32")
    check_fp64(ranks, "adamw", tmp_path / "fp64")


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
    check_fp32(ranks, case, tmp_path / "fp32")
    check_fp64(ranks, case, tmp_path / "fp64")


def check_fp32(ranks: Ranks, case: str, folder: Path) -> None:
    """At one and two ranks bit by bit; beyond, the order of a sum is the transport's."""
    expected = reference(CASES[case], ranks.n, "fp32")
    for state in ranks.run(train, CASES[case], "fp32", folder):
        for name, t in state.items():
            if ranks.n <= 2:
                assert torch.equal(t, expected[name]), name
            else:
                torch.testing.assert_close(t, expected[name], rtol=1e-4, atol=1e-6)


def check_fp64(ranks: Ranks, case: str, folder: Path) -> None:
    """Within 1e-12 of one process on the same global batch, whatever the number of ranks."""
    expected = reference(CASES[case], 1, "fp64")
    states = ranks.run(train, CASES[case], "fp64", folder)
    for state in states:
        for name, t in state.items():
            assert t.dtype == torch.float64
            assert (t - expected[name]).abs().max() <= 1e-12, name
            assert torch.equal(t, states[0][name]), f"the ranks differ in {name}"
