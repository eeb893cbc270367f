"""Ranks that do not do the same: unused parameters, fewer batches, another order; see
optimizer_table.py.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.hvd.behaviour import Hvd, last, raises
from tests.hvd.optimizer_table import (
    Data,
    averages,
    batch,
    by_hand,
    case,
    close,
    each_ranks,
    equal_everywhere,
    grads,
    loss,
    net,
    sgd,
    shard,
    synchronized,
    train,
    update,
    wrap,
)

# The branches of a model that each rank takes in each step.
Plan = Sequence[Sequence[Sequence[int]]]


class Branches(nn.Module):
    """Three nets, of which a forward pass takes some."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(net(seed) for seed in range(3))

    def forward(self, x: Tensor, taken: Sequence[int]) -> Tensor:
        return torch.stack([self.nets[i](x) for i in taken]).sum(0)


def branches_loss(model: nn.Module, taken: Sequence[int], data: Data) -> Any:
    return nn.functional.mse_loss(model(data[0], taken), data[1])


def branches_by_hand(hvd: Hvd, plan: Plan) -> nn.Module:
    """Train by the plan: what a rank does not use counts as zeros, and weight decay and momentum
    act on every parameter.
    """
    model = Branches()
    optimizer = sgd(model.parameters())
    n = hvd.size()
    for step, by_rank in enumerate(plan):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        x, y = batch(step)
        for rank, taken in enumerate(by_rank):
            (branches_loss(model, taken, (x[rank::n], y[rank::n])) / n).backward()
        optimizer.step()
    return model


def branches_train(hvd: Hvd, plan: Plan) -> None:
    for set_to_none in (True, False):
        model = Branches()
        optimizer = wrap(hvd, model)
        for step, by_rank in enumerate(plan):
            model.zero_grad(set_to_none=set_to_none)
            branches_loss(model, by_rank[hvd.rank()], shard(hvd, step)).backward()
            optimizer.step()
        close(model, branches_by_hand(hvd, plan))
        equal_everywhere(hvd, model)


@case(sizes=(2, 3))
def parameters_unused_on_some_ranks(hvd: Hvd) -> None:
    ranks = range(hvd.size())
    branches_train(hvd, [[[(rank + step) % 3] for rank in ranks] for step in range(5)])
    branches_train(hvd, [[[0, 1, 2] if rank else [2, 0] for rank in ranks] for _ in range(4)])


@case(sizes=(2, 3))
def parameters_used_now_and_then(hvd: Hvd) -> None:
    """By all ranks alike, in a step or not. The third net is not used in the first steps."""
    plan = [[0], [0, 1], [0, 1, 2], [1], [2, 1], [0, 1, 2], [0, 1, 2], [2]]
    branches_train(hvd, [[taken] * hvd.size() for taken in plan])


@case()
def branches_in_another_order(hvd: Hvd) -> None:
    """The gradients of the ranks become ready in different orders."""
    orders = ([0, 1, 2], [2, 1, 0], [1, 2, 0])
    ranks = range(hvd.size())
    branches_train(hvd, [[orders[(rank + step) % 3] for rank in ranks] for step in range(4)])


@case()
def other_operations_between(hvd: Hvd) -> None:
    """The script's own operations between backward and step: one that blocks, and some that are
    ordered otherwise on each rank, and end before or after the step.
    """
    n = hvd.size()
    model = net()
    optimizer = wrap(hvd, model)
    for step in range(4):
        optimizer.zero_grad()
        value = loss(model, shard(hvd, step))
        value.backward()
        average = hvd.allreduce(value.detach(), name="average_loss")
        with torch.no_grad():
            close([average], [loss(model, batch(step))])
        handles = {}
        for i in range(4)[:: -1 if hvd.rank() % 2 else 1]:
            metric = torch.full((i + 1,), float(i + hvd.rank()))
            handles[i] = hvd.allreduce_async(metric, name=f"metric.{i}", op=hvd.Sum)
        if last(hvd):
            optimizer.step()
        for i, handle in handles.items():
            expected = torch.full((i + 1,), float(n * i + n * (n - 1) // 2))
            assert torch.equal(hvd.synchronize(handle), expected)
        if not last(hvd):
            optimizer.step()
    equal_everywhere(hvd, model)


def step_by_hand(
    hvd: Hvd, model: Any, optimizer: Any, ranks_of_step: dict[int, Sequence[int]]
) -> None:
    """Make one step on the gradients of these ranks in these steps, divided by all ranks."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for step, ranks in ranks_of_step.items():
        local = each_ranks(hvd, model, step)
        for rank in ranks:
            for p, grad in zip(model.parameters(), local[rank], strict=True):
                p.grad += grad / hvd.size()
    optimizer.step()


@case(uneven=True)
def joining_with_fewer_batches(hvd: Hvd) -> None:
    """A rank without more batches joins; averages divide by all ranks all the same."""
    n = hvd.size()
    model, whole = net(), net()
    optimizer, by_itself = wrap(hvd, model), sgd(whole.parameters())
    for epoch in range(n):
        batches = [1 + (rank + epoch) % n for rank in range(n)]  # ranks join in another order
        longest = batches.index(n)
        for step in range(n):
            ranks = [rank for rank in range(n) if step < batches[rank]]
            step_by_hand(hvd, whole, by_itself, {step: ranks})
        train(hvd, model, optimizer, range(batches[hvd.rank()]))
        assert hvd.join() == longest
        if hvd.rank() == longest:
            close(model, whole)
        hvd.broadcast_parameters(model.state_dict(), root_rank=longest)
        hvd.broadcast_optimizer_state(optimizer, root_rank=longest)
        close(model, whole)
    expected = averages(hvd, model, 9)
    optimizer.zero_grad()
    loss(model, shard(hvd, 9)).backward()
    with synchronized(optimizer):
        close(grads(model), expected)


@case(sizes=(2, 3), uneven=True)
def joining_with_groups_and_passes(hvd: Hvd) -> None:
    """The last rank joins after its first step, or before it."""
    n = hvd.size()
    for steps_of_last in (0, 1):
        model, expected = net(), net()
        by_itself = sgd(expected.parameters())
        optimizer = wrap(hvd, model, groups=2, backward_passes_per_step=2)
        for window in range(steps_of_last if last(hvd) else 3):
            update(model, optimizer, *(shard(hvd, step) for step in (2 * window, 2 * window + 1)))
        hvd.join()
        for window in range(3):
            ranks = range(n if window < steps_of_last else n - 1)
            step_by_hand(hvd, expected, by_itself, {2 * window: ranks, 2 * window + 1: ranks})
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        close(model, expected)


@case(stronger="optimizers can be pickled and copied", sizes=(2, 3))
def an_optimizer_of_one_rank_alone(hvd: Hvd) -> None:
    """It is built for an evaluation, or is a copy or an unpickled one, and never steps."""

    def built(both: Any) -> Any:
        other = net()
        return other, wrap(hvd, other)

    def unpickled(both: Any) -> Any:
        return torch.load(io.BytesIO(saved(both)), weights_only=False)

    def saved(both: Any) -> bytes:
        buffer = io.BytesIO()
        torch.save(both, buffer)
        return buffer.getvalue()

    kept = []
    for extra in (built, copy.deepcopy, unpickled):
        model, expected = net(), net()
        if hvd.rank() == 0:
            kept.append(built(None))
        both = model, wrap(hvd, model)
        if hvd.rank() == 0:
            kept.append(extra(both))
        train(hvd, *both, range(2))
        if hvd.rank() == 0:
            kept.append(extra(both))
        second = net(1)
        optimizer = wrap(hvd, second)
        train(hvd, second, optimizer, range(2))
        close(model, by_hand(2, model=expected))
        close(second, by_hand(2, model=net(1)))


@case(stronger="optimizers that could be swapped are refused", sizes=(2,), uneven=True)
def equal_optimizers_in_another_order(hvd: Hvd) -> None:
    models = [net(0), net(1)]
    both = [(model, wrap(hvd, model)) for model in models]
    if last(hvd):
        both.reverse()
    with raises(hvd.HorovodInternalError, "used first, two optimizers"):
        for model, optimizer in both:
            train(hvd, model, optimizer, range(1))
