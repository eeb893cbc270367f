"""Accumulation over several backward passes; see optimizer_table.py."""

from __future__ import annotations

import itertools

from tests.hvd.behaviour import Hvd, has_adasum, raises
from tests.hvd.optimizer_table import (
    averages,
    backward,
    batch,
    case,
    close,
    each_ranks,
    equal_everywhere,
    grads,
    loss,
    net,
    plain,
    sgd,
    shard,
    side_by_side,
    synchronized,
    train,
    twin,
    update,
    wrap,
    wrapped,
)

GUARD = "optimizer.zero_grad() was called after loss.backward() but before optimizer.step()"
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
    model, optimizer = wrapped(hvd, plain, backward_passes_per_step=2)
    for window in (0, 2):
        optimizer.zero_grad()
        first = each_ranks(hvd, twin(model), window)[hvd.rank()]
        backward(hvd, model, window)
        close(grads(model), first)
        both = (averages(hvd, twin(model), window + k) for k in (0, 1))
        expected = [sum(pair) for pair in zip(*both, strict=True)]
        backward(hvd, model, window + 1)
        with synchronized(optimizer):
            close(grads(model), expected)


@case(sizes=(2, 3))
def a_step_is_due_before_more_gradients(hvd: Hvd) -> None:
    """Neither more passes nor zero_grad; and of Adasum nothing is applied without its reduction."""
    ops = (hvd.Average, hvd.Adasum)[: 1 + has_adasum(hvd)]
    for op, passes in itertools.product(ops, (1, 2)):
        model, optimizer = wrapped(hvd, op=op, backward_passes_per_step=passes)
        for step in range(passes):
            backward(hvd, model, step)
        with raises(AssertionError, TOO_MANY):
            backward(hvd, model, passes)
        with raises(AssertionError, GUARD):
            optimizer.zero_grad()
        if op == hvd.Adasum:
            text = "Skipping synchronization is not supported when using Adasum optimizer."
            with raises(AssertionError, text), optimizer.skip_synchronize():
                pass
        optimizer.step()
        if op == hvd.Adasum:
            train(hvd, model, optimizer, range(1))
            equal_everywhere(hvd, model)
            continue
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer.zero_grad()
        expected = averages(hvd, twin(model), 9)
        for _ in range(passes):
            backward(hvd, model, 9)
        with synchronized(optimizer):
            close(grads(model), [grad * passes for grad in expected])
