"""Training loops: equal to one process on the global batch, with the recipes that scripts have, and
with several backward passes in a step; see optimizer_table.py.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.hvd.behaviour import Hvd, has_adasum, last, raises
from tests.hvd.optimizer_table import (
    all_warnings,
    averages,
    backward,
    batch,
    by_hand,
    case,
    close,
    each_ranks,
    equal_everywhere,
    gradients,
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


@case(stronger="zero_grad takes set_to_none")
def zero_grad_takes_an_argument(hvd: Hvd) -> None:
    for set_to_none in (True, False):
        for step, model, optimizer, data in side_by_side(hvd):
            optimizer.zero_grad(set_to_none=set_to_none)
            for p in model.parameters():
                assert (p.grad is None) is (set_to_none or step == 0)
                assert p.grad is None or not p.grad.any()
            loss(model, data).backward()
            optimizer.step()


@case(stronger="a name is free again after a step that nobody was late for", sizes=(2, 3))
def a_loss_averaged_by_name_that_nobody_waits_for(hvd: Hvd) -> None:
    model, optimizer = wrapped(hvd)
    for step in range(30):
        optimizer.zero_grad()
        value = loss(model, shard(hvd, step))
        value.backward()
        hvd.allreduce_async_(value.detach().clone(), name="loss")
        optimizer.step()
    close(model, by_hand(30))
    hvd.allreduce(torch.zeros(1), name="loss")


@case(sizes=(2, 3))
def a_batch_is_given_up_after_synchronisation(hvd: Hvd) -> None:
    model, optimizer = wrapped(hvd)
    backward(hvd, model, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(hvd, model, 1)
    optimizer.synchronize()
    optimizer.zero_grad()
    train(hvd, model, optimizer, range(1, 3))
    close(model, by_hand(3))


@case()
def gradients_that_a_script_changes(hvd: Hvd) -> None:
    """Given other memory after the step, as `model.to(...)` does; replaced before it; assigned,
    where no hook of autograd runs; or accumulated from two places of a graph.
    """
    for how in ("other memory", "other memory, kept", "replaced", "assigned", "from two places"):
        for _, model, optimizer, (x, y) in side_by_side(hvd):
            optimizer.zero_grad() if "memory" not in how else model.zero_grad("kept" not in how)
            if how == "assigned":
                for p, grad in zip(model.parameters(), gradients(model, (x, y)), strict=True):
                    p.grad = grad
            else:
                twice = loss(model, (2 * x, y)) if how == "from two places" else 0
                (loss(model, (x, y)) + twice).backward()
            with synchronized(optimizer):
                for p in model.parameters() if how == "replaced" else ():
                    p.grad = p.grad.clone()
            for grad in grads(model) if "memory" in how else ():
                grad.data = grad.data.clone()


@case()
def mixed_precision(hvd: Hvd) -> None:
    """The recipe with a scaler, with an overflow on one rank that all ranks must see."""
    scalers: dict[Any, torch.amp.GradScaler] = {}
    for step, model, optimizer, data in side_by_side(hvd):
        scaler = scalers.setdefault(model, torch.amp.GradScaler("cpu", init_scale=1024.0))
        optimizer.zero_grad()
        value = loss(model, data)
        if step == 1 and (last(hvd) or not hasattr(optimizer, "synchronize")):
            value = value * float("inf")
        scaler.scale(value).backward()
        with synchronized(optimizer, partial(scaler.step, optimizer)):
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.update()
        assert scaler.get_scale() == (1024.0 if step < 1 else 512.0)


@case()
def synchronising_twice(hvd: Hvd) -> None:
    """It warns, and reduces again what the gradients are then."""
    model, optimizer = wrapped(hvd, plain)
    for warns in (True, False):
        backward(hvd, model, 0)
        optimizer.synchronize()
        for grad in grads(model):
            grad.fill_(hvd.rank() + 1.0)
        before = [p.detach().clone() for p in model.parameters()]
        with all_warnings() as warned:
            if warns:
                optimizer.step()
            else:
                with synchronized(optimizer):
                    pass
        assert len(warned) == warns
        assert all("without optimizer.skip_synchronize() context" in text for text in warned)
        mean = (hvd.size() + 1) / 2
        close(model, [p - 0.5 * mean for p in before])
        optimizer.zero_grad()


@case(sizes=(2, 3))
def skipping_without_synchronising(hvd: Hvd) -> None:
    """Inside skip_synchronize, step applies what is there; the next steps are right again."""
    model, optimizer = wrapped(hvd)
    train(hvd, model, optimizer, [0])
    optimizer.zero_grad()
    with optimizer.skip_synchronize():
        assert optimizer.step() is None
    with raises(KeyError), optimizer.skip_synchronize():  # which ends with its block
        raise KeyError
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(hvd, model, optimizer, [1])
    equal_everywhere(hvd, model)


@case()
def step_returns_the_closures_loss(hvd: Hvd) -> None:
    for step, model, optimizer, data in side_by_side(hvd):
        calls: list[Any] = []

        def closure(model: Any = model, data: Any = data, calls: Any = calls) -> Any:
            with torch.no_grad():
                calls.append(loss(model, data))
            return calls[-1]

        optimizer.zero_grad()
        loss(model, data).backward()
        result = optimizer.step() if step else optimizer.step(closure)
        assert [result] == (calls if step == 0 else [None])


@case()
def a_closure_that_synchronises(hvd: Hvd) -> None:
    """The recipe for gradients that a closure computes."""
    model, optimizer = wrapped(hvd)
    for step in range(3):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            value = loss(model, shard(hvd, step))
            value.backward()
            optimizer.synchronize()
            return value

        with optimizer.skip_synchronize():
            optimizer.step(closure)
    close(model, by_hand(3))


@case(different="gradients of a closure that nobody averages are an error", sizes=(2, 3))
def a_closure_that_does_not_synchronise(hvd: Hvd) -> None:
    model, optimizer = wrapped(hvd)
    with raises(RuntimeError, "call optimizer.synchronize() in the closure"):
        optimizer.step(lambda: backward(hvd, model, 0))
    close(model, net())
    optimizer.step()
    close(model, by_hand(1))


@case(arms=["exact"], exact=True)
def a_closure_that_does_not_synchronise_is_warned_about(hvd: Hvd) -> None:
    model, optimizer = wrapped(hvd)
    with all_warnings() as warned:
        optimizer.step(lambda: backward(hvd, model, 0))
    assert [text for text in warned if "call optimizer.synchronize() in the closure" in text]
    optimizer.synchronize()


def images(*dtypes: torch.dtype, form: torch.memory_format) -> list[torch.Tensor]:
    return [torch.zeros(2, 3, 2, 2, dtype=dtype).to(memory_format=form) for dtype in dtypes]


@case()
def several_dtypes_a_scalar_and_an_empty_one(hvd: Hvd) -> None:
    dtypes = (torch.float32, torch.float64, torch.float16)
    odd = [torch.zeros(()), torch.zeros(0, 3)]
    _whole_gradients(hvd, [*odd, *images(*dtypes, form=torch.contiguous_format)])


@case(stronger="bfloat16, complex and channels_last parameters")
def more_dtypes(hvd: Hvd) -> None:
    dtypes = (torch.bfloat16, torch.float32, torch.complex64, torch.bfloat16)
    for form in (torch.contiguous_format, torch.channels_last):
        _whole_gradients(hvd, images(*dtypes, form=form))


def _whole_gradients(hvd: Hvd, values: list[torch.Tensor]) -> None:
    """Whole-number gradients that differ between elements, steps and ranks, in several dtypes; one
    rank computes them in another order.
    """
    parameters = [nn.Parameter(value) for value in values]
    # It subtracts the sums of the ranks' gradients: whole numbers stay exact.
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
    patterns = [torch.arange(p.numel()).reshape(p.shape) % 5 + i for i, p in enumerate(parameters)]
    for step in range(3):
        optimizer.zero_grad()
        both = [*zip(parameters, patterns, strict=True)]
        for p, pattern in both[:: -1 if hvd.rank() == step % hvd.size() else 1]:
            total = (p * (pattern + step + hvd.rank()).to(p.dtype)).sum()
            (total.real if p.is_complex() else total).backward()
        optimizer.step()
    n, steps = hvd.size(), 3
    for p, pattern in zip(parameters, patterns, strict=True):
        expected = steps * n * pattern + n * 3 + steps * n * (n - 1) // 2
        assert torch.equal(p.detach(), -expected.to(p.dtype)), p


@case(different="says what to do", sizes=(2,))
def gradients_of_a_gan_that_nobody_averages(hvd: Hvd) -> None:
    model, optimizer = wrapped(hvd)
    backward(hvd, model, 0)
    text = "call discriminator.requires_grad_(False) before that backward"
    with raises(AssertionError, text):
        optimizer.zero_grad()
    with raises(AssertionError, text):
        backward(hvd, model, 0)
    optimizer.synchronize()


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
        optimizer.zero_grad()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        expected = averages(hvd, twin(model), 9)
        for _ in range(passes):
            backward(hvd, model, 9)
        with synchronized(optimizer):
            close(grads(model), [grad * passes for grad in expected])
