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
from tests.hvd.pool import HvdRanks
from tests.ranks import Ranks

CONTRACT = [
    contract.is_described,
    contract.all_reduce,
    contract.bad_ops,
    contract.broadcast_from_every_root,
    contract.objects,
    contract.errors_are_shared,
    contract.prepare_makes_equal,
    contract.different_models,
    contract.parameters_of_one_but_not_the_other,
    contract.channels_last,
    contract.state_of_any_kind,
    contract.state_loads_after_prepare,
    contract.gradients_are_means,
    contract.gradient_hooks_run_once,
    contract.sparse_gradients,
    contract.unused_parameters_are_named,
    contract.unused_in_the_last_micro_batch,
    contract.unused_as_zero,
    contract.thawed_in_training,
    contract.frozen_in_training,
    contract.buffers_follow_their_policy,
    contract.buffers_that_grow,
    contract.two_models,
    contract.a_step_without_averaging,
    contract.sync_batch_norm,
    contract.sync_batch_norm_of_an_evaluation,
]
# Each takes seconds: torch.compile.
COMPILED_IN_MAKE_TEST = [("ddp-torchrun", 2)]


@pytest.mark.parametrize("holds", CONTRACT, ids=lambda function: function.__name__)
@pytest.mark.parametrize("ranks", EVERY_ARM, indirect=True)
def test_contract(ranks: Ranks, holds: Callable[[Backend], None]) -> None:
    ranks.run(holds)


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(*arm.values, marks=[] if kept else [pytest.mark.exhaustive, *slow])
        for arm, (_, size) in zip(EVERY_ARM, ARMS, strict=True)
        for kept in [arm.values[0] in COMPILED_IN_MAKE_TEST]
        for slow in [[pytest.mark.slow] * (size > 2)]
    ],
    indirect=True,
)
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
def test_compat_uses_the_hvd_of_the_script(hvd_ranks: HvdRanks) -> None:
    assert hvd_ranks.run(opens_compat) == [4.0, 4.0]
