"""Whose memory gradients are in: a reduction writes into the tensor that `p.grad` is, and into
nothing else that a script can see; see optimizer_table.py.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.hvd.behaviour import Hvd
from tests.hvd.optimizer_table import (
    averages,
    backward,
    batch,
    case,
    close,
    grads,
    loss,
    side_by_side,
    synchronized,
    twin,
    wrap,
    wrapped,
)

STEPS = 4  # the first is sent by name; buckets are used from the second step on
HELD: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "view": lambda grad: grad.view(-1),
    "part": lambda grad: grad[:1],
    "numpy": lambda grad: grad.numpy(),
    "dlpack": torch.utils.dlpack.from_dlpack,
}


def wide() -> Any:
    """A model of one gradient of more than a megabyte, one of less, and two small ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 40_000), nn.Tanh(), nn.Linear(40_000, 3)).double()


def slow(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """So slow that this model does not diverge, which would round off what is compared."""
    return torch.optim.SGD(parameters, lr=1e-4)


def flat_gradients(model: Any) -> Tensor:
    """Make the gradients views of one buffer, and return it."""
    sizes = [p.numel() for p in model.parameters()]
    flat = torch.zeros(sum(sizes), dtype=torch.double)
    for p, part in zip(model.parameters(), torch.split(flat, sizes), strict=True):
        p.grad = part.view_as(p)
    return flat


def steps(hvd: Hvd, model: Any = None) -> Iterator[tuple[Any, Any, list[Tensor]]]:
    """Compute the gradients of each step; yield the model, its optimizer, and the averages to
    expect.
    """
    model = wide() if model is None else model
    optimizer = wrap(hvd, model, slow)
    for step in range(STEPS):
        expected = averages(hvd, twin(model), step)
        backward(hvd, model, step)
        yield model, optimizer, expected


@case()
def views_of_a_flat_buffer(hvd: Hvd) -> None:
    """Scripts clip or log all gradients at once so, and zero them by one call."""
    flats: dict[Any, Tensor] = {}
    for step, model, optimizer, data in side_by_side(hvd, slow, new=wide, steps=STEPS):
        if step == 0:
            flats[model] = flat_gradients(model)
        flat = flats[model].zero_()
        loss(model, data).backward()
        with synchronized(optimizer):
            seen = torch.cat([grad.reshape(-1) for grad in grads(model)])
            assert grads(model)[0].data_ptr() == flat.data_ptr()
            assert torch.equal(flat, seen)
            flat.mul_(0.01)


@case()
def held_before_the_reduction(hvd: Hvd) -> None:
    """Each sees the average, and what is written through it is what the optimizer steps on."""
    for name, hold in HELD.items():
        for model, optimizer, expected in steps(hvd):
            held = [hold(grad) for grad in grads(model)]
            before = twin(model)
            with synchronized(optimizer):
                for one, grad, average in zip(held, grads(model), expected, strict=True):
                    seen = torch.as_tensor(one)
                    assert seen.data_ptr() == grad.data_ptr(), name
                    close([seen.reshape(-1)], [average.reshape(-1)[: seen.numel()]])
                    seen.zero_()
            if name != "part":
                close(model, before, 0.0)
            optimizer.zero_grad()


@case(exact=True)
def held_over_steps(hvd: Hvd) -> None:
    """What a script keeps of a step's gradients stays as it was in the next steps."""
    for name, hold in HELD.items():
        kept: list[tuple[Any, Tensor]] = []
        for model, optimizer, expected in steps(hvd):
            with synchronized(optimizer):
                close(grads(model), expected)
                kept += [(hold(grad), torch.as_tensor(hold(grad)).clone()) for grad in grads(model)]
            for held, value in kept:
                assert torch.equal(torch.as_tensor(held), value), name
            optimizer.zero_grad()  # torch's default: to None


@case()
def used_in_another_graph(hvd: Hvd) -> None:
    """A gradient that autograd has saved, for a penalty on the next step's, stays as it was."""
    for model, optimizer, expected in steps(hvd):
        weight = torch.ones((), dtype=torch.double, requires_grad=True)
        with synchronized(optimizer):
            penalty = sum((grad * weight).sum() for grad in grads(model))
        optimizer.zero_grad()
        loss(model, batch(9)).backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        assert isinstance(penalty, Tensor)
        penalty.backward()  # type: ignore[no-untyped-call]
        close([weight.grad], [sum(grad.sum() for grad in expected)])  # type: ignore[list-item]


@case()
def saving_one_gradient(hvd: Hvd) -> None:
    """A file has the bytes of that gradient, and not those of others."""
    for model, optimizer, _ in steps(hvd):
        with synchronized(optimizer):
            for grad in grads(model):
                file = io.BytesIO()
                torch.save(grad, file)
                assert len(file.getvalue()) < grad.nbytes + 4096
                assert grad.untyped_storage().nbytes() == grad.nbytes
        optimizer.zero_grad()


@case(stronger="gradients need not be contiguous")
def gradients_that_are_not_contiguous(hvd: Hvd) -> None:
    """A transposed gradient stays a view of the script's own memory."""
    model = wide()
    turned = [torch.zeros_like(p.t().contiguous()) for p in (model[0].weight, model[2].weight)]
    model[0].weight.grad, model[2].weight.grad = (t.t() for t in turned)
    for _, optimizer, expected in steps(hvd, model):
        with synchronized(optimizer):
            close([t.t() for t in turned], expected[::2])
        model.zero_grad(set_to_none=False)


@case(stronger="gradients need not be contiguous")
def gradients_that_overlap_themselves(hvd: Hvd) -> None:
    """A gradient set by hand to one value for all elements is replaced by the average."""
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        model, optimizer = wrapped(hvd, slow, compression=compression, new=wide)
        for step in range(STEPS):
            value = torch.tensor(hvd.rank() + 1.0, dtype=torch.double)
            for p in model.parameters():
                p.grad = value.expand_as(p)
            held = grads(model) if step % 2 else []
            with synchronized(optimizer):
                average = torch.tensor((hvd.size() + 1) / 2, dtype=torch.double)
                close(grads(model), [average.expand_as(p) for p in model.parameters()])
            assert value == hvd.rank() + 1
            del held
            optimizer.zero_grad()
