"""The contract, on live ranks of every backend at 1, 2 and 3 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvdtrain import Backend, BackendOptions, open_backend
from hvdtrain.errors import InputError
from hvdtrain.hvd.basics import basics
from tests.backends import contract
from tests.conftest import ARMS, EVERY_ARM
from tests.ranks import Ranks

# These show what one launcher of each transport shows, and the first transport of each backend.
REPEATS = ["ddp-mpirun", "compat-gloo", "compat-horovodrun"]
AT_TWO_RANKS = ["ddp-gloo", "ddp-mpi", "horovod-gloo"]


def arms(is_repeat: Callable[[str, int], bool]) -> list[Any]:
    """Return all arms; those that repeat what others show run in `make test-all` alone."""
    slow = [pytest.mark.exhaustive, pytest.mark.slow]
    return [
        pytest.param(*param.values, marks=slow) if is_repeat(*arm) else param
        for param, arm in zip(EVERY_ARM, ARMS, strict=True)
    ]


@pytest.mark.parametrize("holds", contract.CONTRACT, ids=lambda function: function.__name__)
@pytest.mark.parametrize(
    "ranks",
    arms(lambda name, n: name in REPEATS or (name in AT_TWO_RANKS and n != 2)),
    indirect=True,
)
def test_contract(ranks: Ranks, holds: Callable[[Backend], None]) -> None:
    ranks.run(holds)


@pytest.mark.exhaustive  # each takes seconds
@pytest.mark.parametrize("ranks", arms(lambda name, n: name in REPEATS or n != 2), indirect=True)
def test_compiled_nets_train_the_same(ranks: Ranks) -> None:
    ranks.run(contract.compiled_nets)


def opens_compat(hvd: Any) -> float:
    """Open the backend in a script that has called `hvd.init`; return what is left afterwards."""
    other = BackendOptions(transport="gloo")
    with pytest.raises(InputError, match=r"hvd.init\(\) was called before .* HVDTRAIN_TRANSPORT"):
        open_backend("compat", options=other)
    engine = basics.engine
    with open_backend("compat") as backend:
        assert basics.engine is engine
        total = backend.all_reduce(torch.ones(1), "sum")
    assert basics.engine is engine
    return float(total.item() + hvd.allreduce(torch.ones(1), op=hvd.Sum).item())


@pytest.mark.parametrize("hvd_ranks", [("hvd-torchrun", 2)], indirect=True)
def test_compat_uses_the_hvd_of_the_script(hvd_ranks: Ranks) -> None:
    assert hvd_ranks.run(opens_compat) == [4.0, 4.0]
