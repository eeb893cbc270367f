"""Accumulation over several backward passes; see optimizer_table.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tests.hvd.behaviour import Hvd, last, raises
from tests.hvd.optimizer_table import (
    averages,
    batch,
    by_hand,
    case,
    close,
    each_ranks,
    grads,
    loss,
    net,
    plain,
    sgd,
    shard,
    side_by_side,
    synchronized,
    twin,
    update,
    wrap,
)
from tests.hvd.optimizer_training import GUARD

TOO_MANY = "Gradients were computed more than backward_passes_per_step times before call to step()"


def windows(hvd: Hvd, lengths: list[int], *, sets_passes: bool = False, **options: Any) -> None:
    """Train over windows of these numbers of passes, in each of which gradients are summed."""
    model, expected = net(), net()
    optimizer, by_itself = wrap(hvd, model, **options), sgd(expected.parameters())
    steps = itertools.count()
    for length in lengths:
        if sets_passes:
            optimizer.set_backward_passes_per_step(length)
            assert optimizer.backward_passes_per_step == length
        window = list(itertools.islice(steps, length))
        update(model, optimizer, *(shard(hvd, step) for step in window))
        update(expected, by_itself, *map(batch, window))
        close(model, expected)


@case()
def passes_are_summed(hvd: Hvd) -> None:
    """Those of a short window are reduced at its step."""
    windows(hvd, [2, 2, 2], backward_passes_per_step=2)
    groupings: tuple[Any, ...] = (None, 2, [])
    for groups in groupings:
        windows(hvd, [3, 1, 3, 2, 3], backward_passes_per_step=3, groups=groups)


@case()
def the_number_can_be_changed(hvd: Hvd) -> None:
    windows(hvd, [1, 1, 3, 3, 2, 2, 1, 1], sets_passes=True)


@case()
def without_zero_grad(hvd: Hvd) -> None:
    """Gradients go on from those that the step before has reduced."""
    for passes in (1, 2):
        for _, model, optimizer, data in side_by_side(hvd, backward_passes_per_step=passes):
            for _ in range(passes):
                loss(model, data).backward()
            optimizer.step()


@case()
def gradients_are_local_between_passes(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model, plain, backward_passes_per_step=2)
    for window in (0, 2):
        optimizer.zero_grad()
        first = each_ranks(hvd, twin(model), window)[hvd.rank()]
        loss(model, shard(hvd, window)).backward()
        close(grads(model), first)
        both = (averages(hvd, twin(model), window + k) for k in (0, 1))
        expected = [sum(pair) for pair in zip(*both, strict=True)]
        loss(model, shard(hvd, window + 1)).backward()
        with synchronized(optimizer):
            close(grads(model), expected)


@case(sizes=(2, 3))
def more_passes_than_allowed(hvd: Hvd) -> None:
    for passes in (1, 2):
        model = net()
        optimizer = wrap(hvd, model, backward_passes_per_step=passes)
        for step in range(passes):
            loss(model, shard(hvd, step)).backward()
        with raises(AssertionError, TOO_MANY):
            loss(model, shard(hvd, passes)).backward()
        optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer.zero_grad()
        expected = averages(hvd, twin(model), 9)
        for _ in range(passes):
            loss(model, shard(hvd, 9)).backward()
        with synchronized(optimizer):
            close(grads(model), [grad * passes for grad in expected])


@case(sizes=(2, 3))
def zero_grad_is_guarded_within_a_window(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model, backward_passes_per_step=3)
    loss(model, shard(hvd, 0)).backward()
    with raises(AssertionError, GUARD):
        optimizer.zero_grad()
    optimizer.step()
    close(model, by_hand(1))


@case(sizes=(2, 3))
def ranks_may_differ_in_the_last_window(hvd: Hvd) -> None:
    """One rank steps early, with fewer passes than the others."""
    model = net()
    optimizer = wrap(hvd, model, plain, backward_passes_per_step=3)
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(3):
        locals_ = each_ranks(hvd, twin(model), step)
        for local in locals_[:-1] if step == 2 else locals_:
            for total, grad in zip(expected, local, strict=True):
                total += grad / hvd.size()
    for step in range(2 if last(hvd) else 3):
        loss(model, shard(hvd, step)).backward()
    with synchronized(optimizer):
        close(grads(model), expected)


@case()
def parts_of_the_model_at_different_passes(hvd: Hvd) -> None:
    """Half of the parameters get gradients in the first pass, all of them in the second."""
    for _, model, optimizer, data in side_by_side(hvd, backward_passes_per_step=2):
        optimizer.zero_grad()
        hidden = model[1](model[0](data[0])).detach()
        torch.nn.functional.mse_loss(model[2](hidden), data[1]).backward()  # type: ignore[no-untyped-call]
        loss(model, data).backward()
        optimizer.step()
