"""Equality is the first test: every backend against a hand-written loop of plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import EVERY_ARM
from tests.parity.reference import CASES, reference
from tests.parity.trained import train
from tests.ranks import Ranks

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.parametrize("ranks", EVERY_ARM, indirect=True),
]


@pytest.mark.parametrize("case", CASES)
def test_fp32_is_bitwise_equal(ranks: Ranks, case: str, tmp_path: Path) -> None:
    """At one and two ranks bit by bit; beyond, the order of a sum is the transport's."""
    expected = reference(CASES[case], ranks.n, "fp32")
    for state in ranks.run(train, CASES[case], "fp32", tmp_path):
        for name, t in state.items():
            if ranks.n <= 2:
                assert torch.equal(t, expected[name]), name
            else:
                torch.testing.assert_close(t, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_fp64_equals_one_process(ranks: Ranks, case: str, tmp_path: Path) -> None:
    """On the same global batch, whatever the number of ranks, within 1e-12."""
    expected = reference(CASES[case], 1, "fp64")
    states = ranks.run(train, CASES[case], "fp64", tmp_path)
    for state in states:
        for name, t in state.items():
            assert t.dtype == torch.float64
            assert (t - expected[name]).abs().max() <= 1e-12, name
            assert torch.equal(t, states[0][name]), f"the ranks differ in {name}"
