"""Nets that torch.compile has wrapped, on live ranks of every backend. Each takes seconds."""

from __future__ import annotations

import pytest

from tests.backends import contract
from tests.conftest import EVERY_ARM
from tests.ranks import Ranks

IN_MAKE_TEST = [("ddp-torchrun", 2), ("compat-torchrun", 2)]
ARMS = [
    pytest.param(*arm.values, marks=() if arm.values[0] in IN_MAKE_TEST else pytest.mark.exhaustive)
    for arm in EVERY_ARM
]


@pytest.mark.parametrize("ranks", ARMS, indirect=True)
def test_compiled_nets_train_the_same(ranks: Ranks) -> None:
    ranks.run(contract.compiled_nets)
