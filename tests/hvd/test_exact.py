"""HVDTRAIN_EXACT_HOROVOD=1: what deviates otherwise is as under the real Horovod, bit by bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hvd.behaviour import Run, raises, run_case
from tests.hvd.optimizer_class import defaults_are_lost, state_is_lost
from tests.hvd.optimizer_ownership import held_over_steps
from tests.hvd.optimizer_state import (
    rate_of_plain_sgd_stays_local,
    training_goes_on_from_a_checkpoint,
    weights_move_without_state,
    zeros_are_left_as_gradients,
)
from tests.hvd.optimizer_table import adamw, all_warnings, batch, loss, net, sgd, shard
from tests.hvd.pool import HvdRanks

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("hvd-exact")

# Rows of the real Horovod that hold in this mode.
ROWS: list[Run] = [
    weights_move_without_state,
    rate_of_plain_sgd_stays_local,
    defaults_are_lost,
    state_is_lost,
    zeros_are_left_as_gradients,
    training_goes_on_from_a_checkpoint,
    held_over_steps,
]


class Exact(HvdRanks):
    env = {**HvdRanks.env, "HVDTRAIN_EXACT_HOROVOD": "1"}


@pytest.fixture(scope="module")
def exact() -> Iterator[Exact]:
    pool = Exact("hvd-torchrun", 2)
    yield pool
    pool.close()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)
def test_rows_of_the_real_one(exact: Exact, row: Run) -> None:
    exact.run(run_case, row, False, False)


def floats(data: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return data[0].float(), data[1].float()


def results(hvd: Any) -> list[Tensor]:
    """What training ends with, after everything that deviates otherwise, as one list."""
    found: list[Tensor] = []
    recipes: list[Any] = [
        sgd,
        adamw,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    ]
    for make in recipes:
        for groups in (None, 2):
            model: nn.Module = net(hvd.rank()).float()
            original = make(model.parameters())
            original.param_groups[0]["lr"] *= 1 + hvd.rank()
            if groups:  # state, which is lost
                loss(model, floats(batch(9))).backward()
                original.step()
                original.zero_grad()
            late = list(model.parameters())[-1].requires_grad_(False)
            optimizer = hvd.DistributedOptimizer(
                original, model.named_parameters(), groups=groups, gradient_predivide_factor=3.0
            )
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for step in range(4):
                late.requires_grad_(step > 1)  # each rank's own: it is not averaged
                optimizer.zero_grad()
                loss(model, floats(shard(hvd, step))).backward()
                optimizer.step()
            found += [p.detach().clone() for p in model.parameters()]
            found += [torch.as_tensor(v) for s in optimizer.state.values() for v in s.values()]
    for numel in (4, 50_000):  # by the coordinator, and by a transport
        big = torch.full((numel,), 40_000.0, dtype=torch.float16)
        found.append(hvd.allreduce(big, name=f"big.{numel}"))
    return found


@pytest.mark.exhaustive  # the real Horovod
@pytest.mark.parametrize("hvd_ranks", [("horovod-gloo", 2)], indirect=True)
def test_bit_by_bit_as_the_real_one(hvd_ranks: HvdRanks, exact: Exact) -> None:
    for real, ours in zip(hvd_ranks.run(results), exact.run(results), strict=True):
        assert len(real) == len(ours)
        for a, b in zip(real, ours, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), (a, b)


def closure_with_backward(hvd: Any) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), model.named_parameters())
    with all_warnings() as warned:
        optimizer.step(lambda: loss(model, shard(hvd, 0)).backward())
    assert [text for text in warned if "call optimizer.synchronize() in the closure" in text]
    optimizer.synchronize()


def test_a_closure_with_backward_warns(exact: Exact) -> None:
    exact.run(closure_with_backward)


def on_some_ranks_only(hvd: Any) -> None:
    hvd.shutdown()
    os.environ["HVDTRAIN_EXACT_HOROVOD"] = str(hvd_rank := int(os.environ["RANK"]))
    with raises(ValueError, "HVDTRAIN_EXACT_HOROVOD is set on some ranks only"):
        hvd.init()
    os.environ["HVDTRAIN_EXACT_HOROVOD"] = "1"
    hvd.init()
    assert hvd.rank() == hvd_rank


def test_all_ranks_must_agree(exact: Exact) -> None:
    exact.run(on_some_ranks_only)
