"""Accumulation over several backward passes; see optimizer_table.py."""

from __future__ import annotations

from tests.hvd.behaviour import Hvd, raises
from tests.hvd.optimizer_table import (
    averages,
    batch,
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


@case()
def the_number_can_be_changed(hvd: Hvd) -> None:
    model, expected = net(), net()
    optimizer, by_itself = wrap(hvd, model), sgd(expected.parameters())
    for passes in (1, 3, 3, 2, 1):
        optimizer.set_backward_passes_per_step(passes)
        assert optimizer.backward_passes_per_step == passes
        update(model, optimizer, *(shard(hvd, step) for step in range(passes)))
        update(expected, by_itself, *map(batch, range(passes)))
        close(model, expected)


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
        with raises(AssertionError, GUARD):
            optimizer.zero_grad()
        optimizer.step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer.zero_grad()
        expected = averages(hvd, twin(model), 9)
        for _ in range(passes):
            loss(model, shard(hvd, 9)).backward()
        with synchronized(optimizer):
            close(grads(model), [grad * passes for grad in expected])
