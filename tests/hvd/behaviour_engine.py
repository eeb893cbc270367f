"""What all operations share: names, order, handles, errors; see behaviour.py."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from tests.hvd.behaviour import (
    DUPLICATE_NAME,
    Hvd,
    added,
    averaged,
    case,
    fails,
    last,
    mine,
    raises,
    same,
    summed,
)
from tests.hvd.test_properties import GROUPED, IN_PLACE, KINDS, Call, Running
from tests.launching import wait_until


@case()
def poll_is_truthful(hvd: Hvd) -> None:
    for late in range(hvd.size()):
        if hvd.rank() == late:
            hvd.barrier()  # the others have submitted, and looked
        handle = hvd.allreduce_async(mine(hvd, 2), name=f"x{late}")
        if hvd.rank() != late:
            assert hvd.poll(handle) is False
            hvd.barrier()
        wait_until(partial(hvd.poll, handle), "poll")
        assert hvd.poll(handle) is True
        same(hvd.synchronize(handle), averaged(hvd, 2))


@case()
def handles_are_valid_once(hvd: Hvd) -> None:
    """Neither that of an operation that is done, nor that of a failed one, nor any number."""
    done = hvd.allreduce_async(mine(hvd, 2), name="x")
    failed = hvd.allreduce_async(mine(hvd, 3 if last(hvd) else 2), name="y")
    assert type(failed) is int
    wait_until(partial(hvd.poll, failed), "poll")
    with fails(hvd, "Mismatched ALLREDUCE tensor shapes"):
        hvd.synchronize(failed)
    assert hvd.synchronize(done) is not None
    for handle in (done, failed, 10**6):
        assert hvd.synchronize(handle) is None
        with raises(ValueError, f"Handle {handle} was not created or has been cleared."):
            hvd.poll(handle)


@case()
def inputs_are_kept_alive(hvd: Hvd) -> None:
    handles = []
    for i in range(20):
        handles.append(hvd.allreduce_async(mine(hvd, 1000) + i, name=f"x{i}", op=hvd.Sum))
        gc.collect(0)
        torch.full((1000,), -1.0)  # takes the memory of what has been let go
    for i, handle in enumerate(handles):
        same(hvd.synchronize(handle), summed(hvd, 1000) + i * hvd.size())


def submits(hvd: Hvd) -> list[Callable[[str], int]]:
    """Every operation that has a name and a handle."""
    forms = itertools.product(KINDS, (False, True), (False, True))
    everyone = tuple(range(hvd.size()))
    return [
        Running(hvd, Call(kind, torch.float32, "Sum", 1, everyone, in_place, grouped)).start
        for kind, in_place, grouped in forms
        if (not in_place or kind in IN_PLACE) and (not grouped or kind in GROUPED)
    ]


@case()
def duplicate_names(hvd: Hvd) -> None:
    """Rank 0 and the others each hold one operation that the other has not submitted yet."""
    first, second = ("p", "q") if hvd.rank() == 0 else ("q", "p")
    for submit in submits(hvd):
        pending = submit(first)
        with raises(ValueError, DUPLICATE_NAME):
            submit(first)
        hvd.barrier()
        for handle in (pending, submit(second)):
            assert hvd.synchronize(handle) is not None
        assert hvd.synchronize(submit(first if hvd.rank() == 0 else second)) is not None


@case(stronger="a name twice in a row is refused every time, however fast the first is done")
def duplicate_names_of_operations_that_are_done(hvd: Hvd) -> None:
    for submit in submits(hvd):
        for _ in range(3):
            hvd.barrier()  # all are here, so that the first is done at once
            pending = submit("x")
            with raises(ValueError, DUPLICATE_NAME):
                submit("x")
            assert hvd.synchronize(pending) is not None


@case()
def a_name_is_free_again_once_polled_or_after_a_cycle(hvd: Hvd) -> None:
    for submit in submits(hvd):
        handles = [submit("x")]
        wait_until(partial(hvd.poll, handles[0]), "poll")
        handles.append(submit("x"))  # allowed: poll returned True for the first
        hvd.barrier()
        while True:  # nobody asks for the second one
            time.sleep(0.002)
            try:
                handles.append(submit("x"))
                break
            except ValueError:
                continue
        assert all(hvd.synchronize(handle) is not None for handle in handles)


@case()
def a_name_repeated_and_then_changed(hvd: Hvd) -> None:
    """Remembered metadata must not outlive a change of it, on all ranks or on one. Results are the
    caller's own."""
    kept = [hvd.allreduce(mine(hvd, 2) + step, name="x") for step in range(20)]
    for step, result in enumerate(kept):
        same(result, averaged(hvd, 2) + step)
    single, double = torch.float32, torch.float64
    for dtype, factor in ((single, 1.0), (double, 1.0), *[(single, 2.0)] * 3):
        got = hvd.allreduce(mine(hvd, 3, dtype=dtype), name="x", op=hvd.Sum, prescale_factor=factor)
        same(got, summed(hvd, 3, dtype=dtype) * factor)
    for odd in (hvd.size() - 1, 0):
        with fails(hvd, "Mismatched"):
            x = mine(hvd, 4 if hvd.rank() == odd else 3)
            hvd.allreduce(x, name="x", op=hvd.Sum, prescale_factor=2.0)
    same(hvd.allreduce(mine(hvd, 3), name="x"), averaged(hvd, 3))


@case()
def no_gradient_where_none_is_asked(hvd: Hvd) -> None:
    assert not hvd.allreduce(mine(hvd, 2)).requires_grad
    with torch.no_grad():
        assert not hvd.allreduce(mine(hvd, 2).requires_grad_()).requires_grad
    handle = hvd.allreduce_async(mine(hvd, 2).requires_grad_(), name="x")
    assert not hvd.synchronize(handle).requires_grad


@case(stronger="a call that fails on one rank only leaves unnamed operations in step")
def unnamed_after_a_failed_call(hvd: Hvd) -> None:
    if hvd.rank() == 0:
        for _ in range(2):
            with raises(ValueError):
                hvd.broadcast(torch.ones(2), -1)
        with raises(ValueError):
            hvd.alltoall(torch.ones(2), [7] * hvd.size())
    x = mine(hvd, 2).requires_grad_()
    hvd.allgather(x).sum().backward()
    same(x.grad, torch.ones(2))


@case(stronger="named operations do not count: ranks may make different numbers of them")
def unnamed_among_uneven_named_ones(hvd: Hvd) -> None:
    with added(hvd, 0) as process_set:
        if process_set.included():
            for i in range(3):
                hvd.allreduce(torch.ones(2), name=f"own{i}", process_set=process_set)
                hvd.allreduce(torch.ones(2), process_set=process_set)


@case(stronger="backward takes its name from forward, so its order may differ between ranks")
def backward_in_different_orders(hvd: Hvd) -> None:
    for names in (("a", "b", "c"), (None, None, None)):
        xs = [mine(hvd, i + 2).requires_grad_() for i in range(3)]
        ys = [hvd.allreduce(x, name=name, op=hvd.Sum) for x, name in zip(xs, names, strict=True)]
        backwards = [
            threading.Thread(target=y.backward, args=(torch.full_like(y, i + 1.0),))
            for i, y in enumerate(ys)
        ]
        for thread in backwards if hvd.rank() else reversed(backwards):
            thread.start()
            time.sleep(0.01)
        for i, thread in enumerate(backwards):
            thread.join(60)
            same(xs[i].grad, torch.full((i + 2,), (i + 1.0) * hvd.size()))
