"""Training loops: equal to one process on the global batch, with the recipes that scripts have;
see optimizer_table.py.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from tests.hvd.behaviour import Hvd, last, raises
from tests.hvd.optimizer_table import (
    Make,
    Warned,
    adamw,
    averages,
    batch,
    by_hand,
    case,
    close,
    equal_everywhere,
    gradients,
    grads,
    loss,
    net,
    plain,
    sgd,
    shard,
    synchronized,
    train,
    twin,
    wrap,
)

GUARD = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)
TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code."
)


@case()
def equals_one_process(hvd: Hvd) -> None:
    makes: tuple[Make, ...] = (sgd, adamw, lambda p: torch.optim.RMSprop(p, centered=True))
    for make in makes:
        model = net()
        train(hvd, model, wrap(hvd, model, make), range(6))
        close(model, by_hand(6, make))
        equal_everywhere(hvd, model)


@case()
def gradients_are_averages(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model)
    loss(model, shard(hvd, 0)).backward()
    optimizer.synchronize()
    close(grads(model), averages(hvd, model, 0))
    equal_everywhere(hvd, grads(model))


@case()
def keeping_the_zeroed_gradients(hvd: Hvd) -> None:
    """The model's own zero_grad, with and without keeping the tensors."""
    for set_to_none in (True, False):
        model = net()
        optimizer = wrap(hvd, model)
        for step in range(4):
            model.zero_grad(set_to_none=set_to_none)
            loss(model, shard(hvd, step)).backward()
            optimizer.step()
        close(model, by_hand(4))


@case(real="zero_grad takes no argument")
def zero_grad_refuses_an_argument(hvd: Hvd) -> None:
    with raises(TypeError):
        wrap(hvd, net()).zero_grad(set_to_none=True)


@case(stronger="zero_grad takes set_to_none")
def zero_grad_takes_an_argument(hvd: Hvd) -> None:
    for set_to_none in (True, False):
        model = net()
        optimizer = wrap(hvd, model)
        for step in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            if step:
                for p in model.parameters():
                    assert (p.grad is None) if set_to_none else (p.grad is not None)
                    assert p.grad is None or not p.grad.any()
            loss(model, shard(hvd, step)).backward()
            optimizer.step()
        close(model, by_hand(4))


@case(sizes=(2, 3))
def zero_grad_is_guarded(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model)
    loss(model, shard(hvd, 0)).backward()
    with raises(AssertionError, GUARD):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    loss(model, shard(hvd, 1)).backward()
    optimizer.synchronize()
    optimizer.zero_grad()  # the batch is given up
    train(hvd, model, optimizer, range(1, 3))
    close(model, by_hand(3))


@case(stronger="zero_grad takes set_to_none", sizes=(2, 3))
def zero_grad_with_an_argument_is_guarded(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model)
    loss(model, shard(hvd, 0)).backward()
    for set_to_none in (True, False):
        with raises(AssertionError, GUARD):
            optimizer.zero_grad(set_to_none=set_to_none)
    optimizer.step()
    train(hvd, model, optimizer, range(1, 3))
    close(model, by_hand(3))


@case()
def gradients_keep_their_identity(hvd: Hvd) -> None:
    """Code that holds on to `p.grad` over the synchronisation sees and changes the real one."""
    model = net()
    optimizer = wrap(hvd, model, plain)
    for step in range(3):
        expected = averages(hvd, twin(model), step)
        optimizer.zero_grad()
        loss(model, shard(hvd, step)).backward()
        held = grads(model)
        with synchronized(optimizer):
            assert all(a is b for a, b in zip(held, grads(model), strict=True))
            close(held, expected)
            before = [p.detach().clone() for p in model.parameters()]
            for grad in held:
                grad.mul_(2)
        moved = [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
        close(moved, expected)  # the learning rate is one half


@case()
def gradients_held_from_before_stay_good(hvd: Hvd) -> None:
    """Gradients that are kept over steps, as with set_to_none=False, stay the parameters'."""
    model = net()
    optimizer = wrap(hvd, model)
    loss(model, shard(hvd, 0)).backward()
    held = grads(model)
    optimizer.step()
    for step in range(1, 4):
        model.zero_grad(set_to_none=False)
        assert not any(grad.any() for grad in held)
        loss(model, shard(hvd, step)).backward()
        optimizer.step()
        assert all(a is b for a, b in zip(held, grads(model), strict=True))
    close(model, by_hand(4))


@case()
def gradients_given_other_memory(hvd: Hvd) -> None:
    """What `model.to(...)` does to gradients: the same tensors, with other data under them."""
    for set_to_none in (True, False):
        model = net()
        optimizer = wrap(hvd, model)
        for step in range(4):
            model.zero_grad(set_to_none=set_to_none)
            loss(model, shard(hvd, step)).backward()
            optimizer.step()
            for grad in grads(model):
                grad.data = grad.data.clone()
        close(model, by_hand(4))


@case()
def clipping(hvd: Hvd) -> None:
    model, expected = net(), net()
    optimizer, by_itself = wrap(hvd, model), sgd(expected.parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss(model, shard(hvd, step)).backward()
        with synchronized(optimizer):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        by_itself.zero_grad()
        loss(expected, batch(step)).backward()
        close([norm], [nn.utils.clip_grad_norm_(expected.parameters(), 0.1)])
        by_itself.step()
    assert norm > 0.1
    close(model, expected)


@case()
def mixed_precision(hvd: Hvd) -> None:
    """The recipe with a scaler, with an overflow on one rank that all ranks must see."""
    model, expected = net(), net()
    optimizer, by_itself = wrap(hvd, model), sgd(expected.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        value = loss(model, shard(hvd, step))
        if step == 1 and last(hvd):
            value = value * float("inf")
        scaler.scale(value).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (1024.0 if step < 1 else 512.0)
        if step != 1:
            by_itself.zero_grad()
            loss(expected, batch(step)).backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
            by_itself.step()
    close(model, expected)


@case()
def mixed_precision_without_unscaling(hvd: Hvd) -> None:
    """The shorter recipe: the scaler unscales in its step what has been synchronised."""
    model = net()
    optimizer = wrap(hvd, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss(model, shard(hvd, step))).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    close(model, by_hand(3))


@case()
def synchronising_twice_warns_once(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model)
    with Warned() as warned:
        loss(model, shard(hvd, 0)).backward()
        optimizer.synchronize()
        optimizer.step()
    assert warned == [TWICE]
    close(model, by_hand(1))  # averages of averages are the same
    with Warned() as warned:
        train(hvd, model, optimizer, range(1, 3))
    assert warned == []
    close(model, by_hand(3))


@case(sizes=(2, 3))
def synchronising_twice_reduces_twice(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model, plain, op=hvd.Sum)
    expected = averages(hvd, twin(model), 0)
    loss(model, shard(hvd, 0)).backward()
    optimizer.synchronize()
    close(grads(model), [grad * hvd.size() for grad in expected])
    with synchronized(optimizer):
        close(grads(model), [grad * hvd.size() ** 2 for grad in expected])


@case()
def changed_between_synchronisation_and_a_second(hvd: Hvd) -> None:
    """What a script writes into gradients after synchronising is what is reduced again."""
    model = net()
    optimizer = wrap(hvd, model, plain)
    loss(model, shard(hvd, 0)).backward()
    optimizer.synchronize()
    for grad in grads(model):
        grad.fill_(hvd.rank() + 1.0)
    with synchronized(optimizer):
        mean = (hvd.size() + 1) / 2
        close(grads(model), [torch.full_like(grad, mean) for grad in grads(model)])


@case(sizes=(2, 3))
def skipping_without_synchronising(hvd: Hvd) -> None:
    """Inside skip_synchronize, step applies what is there; the next steps are right again."""
    model = net()
    optimizer = wrap(hvd, model)
    train(hvd, model, optimizer, [0])
    optimizer.zero_grad()
    with optimizer.skip_synchronize():
        assert optimizer.step() is None
    kept = grads(model) if model[0].weight.grad is not None else None
    assert kept is None or not any(grad.any() for grad in kept)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    equal_everywhere(hvd, model)
    train(hvd, model, optimizer, [1])
    equal_everywhere(hvd, model)


@case()
def skipping_ends_with_its_block(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model)
    with raises(KeyError), optimizer.skip_synchronize():
        raise KeyError
    train(hvd, model, optimizer, range(3))
    close(model, by_hand(3))


@case()
def step_returns_the_closures_loss(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model)
    calls = []

    def closure() -> Any:
        calls.append(1)
        with torch.no_grad():
            return loss(model, shard(hvd, 0))

    for step in range(2):
        optimizer.zero_grad()
        loss(model, shard(hvd, step)).backward()
        result = optimizer.step() if step else optimizer.step(closure)
        assert (result is None) == bool(step)
        if result is not None:
            close([result], [loss(net(), shard(hvd, 0))])
    assert calls == [1]
    close(model, by_hand(2))


@case()
def a_closure_that_synchronises(hvd: Hvd) -> None:
    """The recipe for gradients that a closure computes."""
    model = net()
    optimizer = wrap(hvd, model)
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
    model = net()
    optimizer = wrap(hvd, model)
    with raises(RuntimeError, "call optimizer.synchronize() in the closure"):
        optimizer.step(lambda: loss(model, shard(hvd, 0)).backward())
    close(model, net())
    optimizer.step()
    close(model, by_hand(1))


@case()
def a_forward_pass_alone_changes_nothing(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, shard(hvd, 7))
        with torch.no_grad():
            loss(model, shard(hvd, 8))
        gradients(model, shard(hvd, 9))  # torch.autograd.grad: nothing is accumulated
        loss(model, shard(hvd, step)).backward()
        optimizer.step()
    close(model, by_hand(3))


@case()
def backward_in_a_no_hook_way(hvd: Hvd) -> None:
    """Gradients that a script assigns, instead of having them accumulated, are reduced too."""
    model = net()
    optimizer = wrap(hvd, model)
    for step in range(3):
        optimizer.zero_grad()
        for p, grad in zip(model.parameters(), gradients(model, shard(hvd, step)), strict=True):
            p.grad = grad
        optimizer.step()
    close(model, by_hand(3))


@case()
def gradients_replaced_before_the_step(hvd: Hvd) -> None:
    """A gradient that was swapped between backward and synchronisation, at a middling time."""
    model = net()
    optimizer = wrap(hvd, model)
    for step in range(3):
        optimizer.zero_grad()
        loss(model, shard(hvd, step)).backward()
        with synchronized(optimizer):
            for p in model.parameters():
                assert p.grad is not None
                p.grad = p.grad.clone()
    close(model, by_hand(3))


class Tied(nn.Module):
    """One weight in two places of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = net()[0]
        self.out = net()[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = nn.functional.pad(self.layer(x).tanh(), (0, -1))
        return nn.functional.linear(x, self.out.weight[:, :4], self.out.bias)


@case()
def weights_used_twice(hvd: Hvd) -> None:
    model = Tied()
    train(hvd, model, wrap(hvd, model), range(3))
    close(model, by_hand(3, model=Tied()))


@case()
def scalars_and_empty_parameters(hvd: Hvd) -> None:
    model = net()
    model.register_parameter("scale", nn.Parameter(torch.tensor(2.0, dtype=torch.double)))
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3, dtype=torch.double)))
    expected = twin(model)

    def scaled(net: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return loss(net, data) * net.get_parameter("scale") + net.get_parameter("empty").sum()

    optimizer, by_itself = wrap(hvd, model), sgd(expected.parameters())
    for step in range(3):
        optimizer.zero_grad()
        scaled(model, shard(hvd, step)).backward()
        optimizer.step()
        by_itself.zero_grad()
        scaled(expected, batch(step)).backward()
        by_itself.step()
    close(model, expected)


@case()
def several_dtypes(hvd: Hvd) -> None:
    _whole_gradients(hvd, [torch.float32, torch.float64, torch.float16], torch.contiguous_format)


@case(stronger="bfloat16 and complex parameters")
def more_dtypes(hvd: Hvd) -> None:
    dtypes = [torch.bfloat16, torch.float32, torch.complex64, torch.bfloat16]
    _whole_gradients(hvd, dtypes, torch.contiguous_format)


@case(stronger="channels_last parameters")
def channels_last(hvd: Hvd) -> None:
    _whole_gradients(hvd, [torch.float32, torch.float64], torch.channels_last)


def summing(hvd: Hvd, parameters: list[nn.Parameter]) -> Any:
    """An optimizer that subtracts the sums of the ranks' gradients: whole numbers stay exact."""
    named = [(f"p{i}", p) for i, p in enumerate(parameters)]
    return hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named, op=hvd.Sum)


def _whole_gradients(hvd: Hvd, dtypes: list[torch.dtype], form: torch.memory_format) -> None:
    """Whole-number gradients that differ between elements, steps and ranks, in several dtypes."""
    parameters = [
        nn.Parameter(torch.zeros(2, 3, 2, 2, dtype=dtype).to(memory_format=form))
        for dtype in dtypes
    ]
    optimizer = summing(hvd, parameters)
    pattern = torch.arange(24).reshape(2, 3, 2, 2) % 5
    for step in range(3):
        optimizer.zero_grad()
        for i, p in enumerate(parameters):
            factor = (pattern + i + step + hvd.rank()).to(p.dtype)
            total = (p * factor).sum()
            (total.real if p.is_complex() else total).backward()
        optimizer.step()
    n, steps = hvd.size(), 3
    for i, p in enumerate(parameters):
        expected = steps * n * (pattern + i) + n * 3 + steps * n * (n - 1) // 2
        assert torch.equal(p.detach(), -expected.to(p.dtype)), (i, p, expected)


@case()
def forty_megabytes(hvd: Hvd) -> None:
    """More than a bucket holds, with one rank late, and exact."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in (3_000_000, 10, 4_000_000, 3_000_000)]
    optimizer = summing(hvd, parameters)
    for step in range(3):
        if hvd.rank() == step % hvd.size():
            time.sleep(0.05)
        optimizer.zero_grad()
        sum((p * (i + step + hvd.rank())).sum() for i, p in enumerate(parameters)).backward()
        optimizer.step()
    n = hvd.size()
    for i, p in enumerate(parameters):
        value = 3 * n * i + 3 * n + 3 * n * (n - 1) // 2
        assert torch.equal(p.detach(), torch.full_like(p, -float(value)))


@case()
def a_hundred_small_parameters(hvd: Hvd) -> None:
    parameters = [nn.Parameter(torch.zeros(i % 7 + 1)) for i in range(100)]
    optimizer = summing(hvd, parameters)
    for step in range(3):
        optimizer.zero_grad()
        order = list(enumerate(parameters))
        if hvd.rank() == step % hvd.size():
            order.reverse()
        sum((p * (i + hvd.rank())).sum() for i, p in order).backward()
        optimizer.step()
    n = hvd.size()
    for i, p in enumerate(parameters):
        assert torch.equal(p.detach(), torch.full_like(p, -3.0 * (n * i + n * (n - 1) // 2)))
