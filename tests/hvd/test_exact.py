"""HVDTRAIN_EXACT_HOROVOD=1: what deviates otherwise is as under the real Horovod, bit by bit; see
behaviour.py for the rows that hold in this mode."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hvd.optimizer_table import adamw, batch, loss, net, sgd, shard
from tests.hvd.pool import HvdRanks


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
def test_bit_by_bit_as_the_real_one(hvd_ranks: HvdRanks) -> None:
    with contextlib.closing(HvdRanks("exact", 2)) as exact:
        for real, ours in zip(hvd_ranks.run(results), exact.run(results), strict=True):
            assert len(real) == len(ours)
            for a, b in zip(real, ours, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b), (a, b)
