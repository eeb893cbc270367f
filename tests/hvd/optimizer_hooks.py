"""Gradient hooks of the user's own: what they make of this rank's gradient is what is averaged.

Torch runs, for each parameter: its tensor hooks, the prehooks of its AccumulateGrad node, the
accumulation into `p.grad`, its post-accumulate-grad hooks, the node's own hooks, and after those a
full backward hook of its module. See optimizer_table.py.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.hvd.behaviour import Hvd
from tests.hvd.optimizer_table import (
    case,
    close,
    equal_everywhere,
    plain,
    wrap,
)

LIMIT = 1.5
SIZES = (4, 40_000)  # small gradients share a bucket's copy, large ones are copied by themselves


class Shift(nn.Module):
    """Add a parameter to the input, so that its gradient is that of the output."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


def clip_(p: Tensor) -> None:
    """Limit a gradient in place."""
    assert p.grad is not None
    p.grad.clamp_(max=LIMIT)


def node_of(p: Tensor) -> Any:
    """The node that accumulates a parameter's gradient. Hooks last as long as somebody holds it."""
    return p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def add_hook(kind: str, module: Any) -> Any:
    """Clip the gradient of a module's parameter in a hook; return what must be held."""
    p = module.by
    if kind == "tensor":
        return p.register_hook(lambda grad: grad.clamp(max=LIMIT))
    if kind == "post-accumulate":
        return p.register_post_accumulate_grad_hook(clip_)
    if kind == "full backward":
        return module.register_full_backward_hook(lambda *_: clip_(p))
    node = node_of(p)
    if kind == "node pre":
        node.register_prehook(lambda grads: (grads[0].clamp(max=LIMIT),))
    else:
        assert kind == "node post"
        node.register_hook(lambda *_: clip_(p))
    return node


def hooked_training(
    kind: str,
    before: bool,
    passes: int,
    size: int,
    rank: int,
    make: Callable[[nn.Module], Any],
) -> Any:
    """Make three steps of a model whose gradients are clipped in hooks that are registered `before`
    wrapping, or after it; return its parameters. Every other step leaves a module out on rank 0.
    """
    model = nn.Sequential(*(Shift(size) for _ in range(3)))
    held = [add_hook(kind, module) for module in model if before]
    optimizer = make(model)
    held += [add_hook(kind, module) for module in model if not before]
    for step in range(3):
        optimizer.zero_grad()
        for i in range(passes):
            x = torch.zeros(size, requires_grad=True)  # else no full backward hook of the first one
            used = model[:2] if step % 2 and rank == 0 else model
            (used(x) * (12.0 if rank == 0 else 0.375) * (i + 1)).sum().backward()
        optimizer.step()
    del held
    return torch.stack([p.detach() for p in model.parameters()])


def check(hvd: Hvd, kind: str, *times: bool) -> None:
    """Compare bit by bit with the mean of the gradients that each rank's hooks make, by itself."""
    for before, passes, size in itertools.product(times, (1, 2), SIZES):
        case = kind, before, passes, size
        wrapped = partial(wrap, hvd, make=plain, backward_passes_per_step=passes)
        got = hooked_training(*case, hvd.rank(), wrapped)
        # Each step moves by a gradient of its own, so the mean of the moves is the mean's move.
        ranks = [
            hooked_training(*case, rank, lambda model: plain(model.parameters()))
            for rank in range(hvd.size())
        ]
        assert got.equal(torch.stack(ranks).sum(0) / hvd.size()), (case, got[:, 0], ranks)


@case()
def hooks_that_run_before_horovods(hvd: Hvd) -> None:
    for kind in ("tensor", "post-accumulate", "node pre"):
        check(hvd, kind, True, False)
    check(hvd, "node post", True)


LATE = "hooks that torch runs after Horovod's own race with the averaging"


@case(stronger=LATE)
def hooks_that_run_after_horovods(hvd: Hvd) -> None:
    check(hvd, "node post", False)
    check(hvd, "full backward", True, False)


def change_all_late(model: Any, by: str, replaces: bool) -> None:
    """Clip all layers' gradients, in place or into new tensors, when the backward pass of their
    container ends, or in a hook of the layer whose gradient is last.
    """

    def change(*_: Any) -> None:
        for p in model.parameters():
            clipped = None if p.grad is None else p.grad.clamp(max=LIMIT)
            if replaces:
                p.grad = clipped
            elif clipped is not None:
                p.grad.copy_(clipped)

    if by == "container":
        model.register_full_backward_hook(change)
    else:
        model[0].by.register_post_accumulate_grad_hook(change)


@case(stronger=LATE, sizes=(2, 3))
def late_changes_are_averaged_or_refused(hvd: Hvd) -> None:
    """What a hook changes of other parameters may have been sent: then every rank raises."""
    small, large = SIZES
    times = ((small, 0), (large, 2))  # sent by name in the first step, then in buckets
    ways = ("container", False), ("container", True), ("last layer", False), ("last layer", True)
    for way, (size, begin) in itertools.product(ways, times):
        model = nn.Sequential(*(Shift(size) for _ in range(3)))
        optimizer = wrap(hvd, model, plain)
        refused, steps = False, 0
        for step in range(4):
            if step == begin:
                change_all_late(model, *way)
            optimizer.zero_grad()
            x = torch.zeros(size, requires_grad=True)
            (model(x) * (12.0 if hvd.rank() == 0 else 0.375)).sum().backward()
            try:
                optimizer.step()
            except RuntimeError as error:
                refused = "was changed after it was sent" in str(error)
                if not refused:
                    raise
                break
            steps += 1
        everywhere = hvd.allgather_object((refused, steps))
        assert len(set(everywhere)) == 1, (way, size, begin, everywhere)
        equal_everywhere(hvd, model)
        if not refused:
            others = hvd.size() - 1
            first, then = ((high + 0.375 * others) / hvd.size() for high in (12.0, LIMIT))
            moved = 0.5 * (first * begin + then * (4 - begin))
            close(model, [torch.full((size,), -moved)] * 3, 1e-6)


@case(sizes=(2, 3))
def backward_in_two_threads(hvd: Hvd) -> None:
    """Autograd has a thread for each device. A script can have two on the CPU: they share buckets,
    and all ranks send these in one order, whichever thread comes first.
    """
    torch.set_num_threads(1)
    model = nn.Sequential(*(Shift(15_000) for _ in range(40)))
    optimizer = wrap(hvd, model, plain, groups=[[p] for p in model.parameters()])

    start = threading.Barrier(2)

    def backward(mine: nn.Sequential) -> None:
        start.wait(60)
        (mine(torch.zeros(15_000)) * float(hvd.rank() + 1)).sum().backward()

    with ThreadPoolExecutor(2) as threads:
        for _ in range(30):
            optimizer.zero_grad()
            list(threads.map(backward, (model[::2], model[1::2])))
            optimizer.step()
    moved = 30 * 0.5 * (hvd.size() + 1) / 2
    close(model, [torch.full((15_000,), -moved)] * 40, 1e-5)
