"""Ranks that do not do the same: unused parameters, fewer batches, another order; see
optimizer_table.py.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.hvd.behaviour import Hvd, last
from tests.hvd.optimizer_table import (
    averages,
    batch,
    by_hand,
    case,
    close,
    each_ranks,
    equal_everywhere,
    loss,
    net,
    sgd,
    shard,
    synchronized,
    train,
    update,
    wrap,
)


class Branches(nn.Module):
    """Three nets, of which a forward pass takes some."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(net(seed) for seed in range(3))

    def forward(self, x: Tensor, taken: Sequence[int]) -> Tensor:
        return torch.stack([self.nets[i](x) for i in taken]).sum(0)


def branches_loss(model: nn.Module, taken: Sequence[int], data: tuple[Tensor, Tensor]) -> Any:
    return nn.functional.mse_loss(model(data[0], taken), data[1])


def branches_by_hand(hvd: Hvd, plan: Sequence[Sequence[Sequence[int]]]) -> nn.Module:
    """Train by the plan (the branches of each step and rank): what a rank does not use counts as
    zeros, and weight decay and momentum act on every parameter.
    """
    model = Branches()
    optimizer = sgd(model.parameters())
    n = hvd.size()
    for step, by_rank in enumerate(plan):
        optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        for rank, taken in enumerate(by_rank):
            x, y = batch(step)
            (branches_loss(model, taken, (x[rank::n], y[rank::n])) / n).backward()
        optimizer.step()
    return model


def branches_train(hvd: Hvd, plan: Sequence[Sequence[Sequence[int]]], **options: Any) -> None:
    for set_to_none in (True, False):
        model = Branches()
        optimizer = wrap(hvd, model, **options)
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


@case(sizes=(2, 3))
def parameters_unused_on_one_rank(hvd: Hvd) -> None:
    ranks = range(hvd.size())
    branches_train(hvd, [[[0, 1, 2] if rank else [2, 0] for rank in ranks] for _ in range(4)])


@case(sizes=(2, 3))
def parameters_used_now_and_then(hvd: Hvd) -> None:
    """By all ranks alike, in a step or not."""
    plan = [[0], [0, 1, 2], [1], [2, 1], [0, 1, 2], [0, 1, 2], [2]]
    branches_train(hvd, [[taken] * hvd.size() for taken in plan])


@case()
def unused_parameters_move_too(hvd: Hvd) -> None:
    """A gradient of zeros is applied, so that weight decay acts on what nobody used."""
    model = Branches()
    optimizer = wrap(hvd, model)
    branches_loss(model, [0], shard(hvd, 0)).backward()
    optimizer.step()
    unused = model.nets[2]
    if hvd.size() == 1:  # as without hvd
        assert all(p.grad is None for p in unused.parameters())
        return
    assert all(p.grad is not None and not p.grad.any() for p in unused.parameters())
    close(unused, [p * (1 - 0.1 * 0.01) for p in net(2).parameters()])


@case()
def branches_in_another_order(hvd: Hvd) -> None:
    """The gradients of the ranks become ready in different orders."""
    orders = ([0, 1, 2], [2, 1, 0], [1, 2, 0])
    ranks = range(hvd.size())
    branches_train(hvd, [[orders[(rank + step) % 3] for rank in ranks] for step in range(4)])


@case()
def a_late_rank(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model)
    for step in range(4):
        optimizer.zero_grad()
        value = loss(model, shard(hvd, step))
        if hvd.rank() == step % hvd.size():
            time.sleep(0.05)
        value.backward()
        if hvd.rank() == (step + 1) % hvd.size():
            time.sleep(0.05)
        optimizer.step()
    close(model, by_hand(4))


@case()
def other_operations_between(hvd: Hvd) -> None:
    """Named operations of the script's own between backward and step, ordered otherwise on each
    rank.
    """
    model = net()
    optimizer = wrap(hvd, model)
    n = hvd.size()
    for step in range(4):
        optimizer.zero_grad()
        loss(model, shard(hvd, step)).backward()
        handles = {}
        for i in range(4)[:: -1 if hvd.rank() % 2 else 1]:
            value = torch.full((i + 1,), float(i + hvd.rank()))
            handles[i] = hvd.allreduce_async(value, name=f"metric.{i}", op=hvd.Sum)
        if last(hvd):
            optimizer.step()
        for i, handle in handles.items():
            expected = torch.full((i + 1,), float(n * i + n * (n - 1) // 2))
            assert torch.equal(hvd.synchronize(handle), expected)
        if not last(hvd):
            optimizer.step()
    equal_everywhere(hvd, model)


@case()
def a_blocking_operation_between(hvd: Hvd) -> None:
    """The loss of every step is averaged before the step, as most scripts do."""
    model = net()
    optimizer = wrap(hvd, model)
    for step in range(3):
        optimizer.zero_grad()
        value = loss(model, shard(hvd, step))
        value.backward()
        average = hvd.allreduce(value.detach(), name="average_loss")
        with torch.no_grad():
            close([average], [loss(model, batch(step))])
        optimizer.step()


@case(uneven=True)
def joining_with_fewer_batches(hvd: Hvd) -> None:
    """Who has no more data joins; averages divide by all ranks all the same."""
    n = hvd.size()
    model = net()
    optimizer = wrap(hvd, model)
    for epoch in range(3):
        batches = [1 + (rank + epoch) % n for rank in range(n)]  # a different order every time
        expected = [p.detach().clone() for p in model.parameters()]
        whole = net()
        for p, value in zip(whole.parameters(), expected, strict=True):
            p.data.copy_(value)
        by_itself = sgd(whole.parameters())
        by_itself.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for step in range(max(batches)):
            active = [rank for rank in range(n) if step < batches[rank]]
            local = [each_ranks(hvd, whole, step)[rank] for rank in active]
            for p, *parts in zip(whole.parameters(), *local, strict=True):
                p.grad = torch.stack(parts).sum(0) / n
            by_itself.step()
        train(hvd, model, optimizer, range(batches[hvd.rank()]))
        longest = batches.index(n)
        assert hvd.join() == longest
        if hvd.rank() == longest:
            close(model, whole)
        hvd.broadcast_parameters(model.state_dict(), root_rank=longest)
        hvd.broadcast_optimizer_state(optimizer, root_rank=longest)
        close(model, whole)
    before = averages(hvd, model, 9)
    optimizer.zero_grad()
    loss(model, shard(hvd, 9)).backward()
    with synchronized(optimizer):
        close([p.grad for p in model.parameters() if p.grad is not None], before)


@case(sizes=(2, 3), uneven=True)
def joining_at_once(hvd: Hvd) -> None:
    """A rank that has no batch at all, before anybody has made a step."""
    n = hvd.size()
    model = net()
    optimizer = wrap(hvd, model)
    expected = net()
    by_itself = sgd(expected.parameters())
    if not last(hvd):
        train(hvd, model, optimizer, range(2))
        time.sleep(0.1)
    hvd.join()
    for step in range(2):
        local = each_ranks(hvd, expected, step)[:-1]
        for p, *parts in zip(expected.parameters(), *local, strict=True):
            p.grad = torch.stack(parts).sum(0) / n
        by_itself.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    close(model, expected)


@case(sizes=(2, 3), uneven=True)
def joining_with_groups_and_passes(hvd: Hvd) -> None:
    n = hvd.size()
    model = net()
    optimizer = wrap(hvd, model, groups=2, backward_passes_per_step=2)
    expected = net()
    by_itself = sgd(expected.parameters())
    for window in range(1 if last(hvd) else 3):
        update(model, optimizer, *(shard(hvd, step) for step in (2 * window, 2 * window + 1)))
    hvd.join()
    for window in range(3):
        sums = [torch.zeros_like(p) for p in expected.parameters()]
        for step in (2 * window, 2 * window + 1):
            for local in each_ranks(hvd, expected, step)[: n if window == 0 else n - 1]:
                for total, grad in zip(sums, local, strict=True):
                    total += grad / n
        for p, total in zip(expected.parameters(), sums, strict=True):
            p.grad = total
        by_itself.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    close(model, expected)
