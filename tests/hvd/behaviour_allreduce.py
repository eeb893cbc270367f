"""Allreduce in all its forms; see behaviour.py."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import torch

from tests.hvd.behaviour import (
    TYPES,
    Hvd,
    case,
    everyones,
    fails,
    last,
    mean,
    mine,
    raises,
    same,
    total,
)


@case()
def out_of_place_leaves_the_input(hvd: Hvd) -> None:
    tensor = mine(hvd, 4)
    result = hvd.allreduce(tensor, name="x", op=hvd.Sum)
    assert result.data_ptr() != tensor.data_ptr()
    same(tensor, mine(hvd, 4))
    handle = hvd.allreduce_async(tensor, name="y", op=hvd.Sum)
    assert type(handle) is int
    assert hvd.synchronize(handle).data_ptr() != tensor.data_ptr()
    same(tensor, mine(hvd, 4))


@case()
def in_place_returns_the_very_object(hvd: Hvd) -> None:
    tensor = mine(hvd, 4)
    assert hvd.allreduce_(tensor, name="x", op=hvd.Sum) is tensor
    same(tensor, total(everyones(hvd, 4)))
    parameter = torch.nn.Parameter(mine(hvd, 4))
    assert hvd.synchronize(hvd.allreduce_async_(parameter, name="y", op=hvd.Sum)) is parameter
    same(parameter, total(everyones(hvd, 4)))
    assert parameter.is_leaf
    assert parameter.requires_grad


@case()
def positions_of_the_arguments(hvd: Hvd) -> None:
    expected = total(everyones(hvd, 2))
    none = hvd.Compression.none
    scaled = expected * 6
    same(hvd.allreduce(mine(hvd, 2), None, "a", none, hvd.Sum, 2.0, 3.0), scaled)
    same(hvd.allreduce_(mine(hvd, 2), None, "b", hvd.Sum, 2.0, 3.0), scaled)
    for submit in (hvd.allreduce_async, hvd.allreduce_async_):
        handle = submit(mine(hvd, 2), None, "c", hvd.Sum, 2.0, 3.0, hvd.global_process_set)
        same(hvd.synchronize(handle), scaled)
    group = [mine(hvd, 2)]
    same(hvd.grouped_allreduce(group, None, "d", none, hvd.Sum, 2.0, 3.0)[0], scaled)
    same(hvd.grouped_allreduce_([mine(hvd, 2)], None, "e", hvd.Sum, 2.0, 3.0)[0], scaled)


def _forms(hvd: Hvd) -> list[Callable[..., object]]:
    def waited(submit: Callable[..., object]) -> Callable[..., object]:
        return lambda *args, **kwargs: hvd.synchronize(submit(*args, **kwargs))

    def grouped(call: Callable[..., list[object]]) -> Callable[..., object]:
        return lambda tensor, *args, **kwargs: call([tensor], *args, **kwargs)[0]

    return [
        hvd.allreduce,
        hvd.allreduce_,
        waited(hvd.allreduce_async),
        waited(hvd.allreduce_async_),
        grouped(hvd.grouped_allreduce),
        grouped(hvd.grouped_allreduce_),
        lambda t, *args, **kw: hvd.synchronize(hvd.grouped_allreduce_async([t], *args, **kw))[0],
        lambda t, *args, **kw: hvd.synchronize(hvd.grouped_allreduce_async_([t], *args, **kw))[0],
    ]


@case()
def average_argument_is_deprecated(hvd: Hvd) -> None:
    tensors = everyones(hvd, 3)
    for form in _forms(hvd):
        for average, expected in ((True, mean(tensors)), (False, total(tensors))):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                same(form(mine(hvd, 3), average), expected)
            (warning,) = [w for w in caught if "average" in str(w.message)]
            assert warning.category is DeprecationWarning
            assert "has been replaced with `op`" in str(warning.message)


@case()
def average_and_op_together_are_refused(hvd: Hvd) -> None:
    text = "The op parameter supersedes average. Please provide only one of them."
    for form in _forms(hvd):
        with raises(ValueError, text):
            form(mine(hvd, 3), average=False, op=hvd.Sum)


@case()
def whole_numbers_are_cut_toward_zero(hvd: Hvd) -> None:
    for dtype in (torch.int32, torch.int64):
        n = hvd.size()
        tensor = torch.tensor([-3, 3, -7, 7, 0, 2**20 + 1], dtype=dtype)
        tensor = tensor if hvd.rank() == 0 else torch.zeros_like(tensor)
        expected = [math.trunc(v / n) for v in (-3, 3, -7, 7, 0, 2**20 + 1)]
        same(hvd.allreduce(tensor, name=f"x.{dtype}"), torch.tensor(expected, dtype=dtype))


@case()
def factors_cut_whole_numbers_before_and_after(hvd: Hvd) -> None:
    n = hvd.size()
    for dtype in (torch.int32, torch.int64):
        tensor = torch.tensor([-3, 3, 5], dtype=dtype)
        before = hvd.allreduce(tensor, name="b", op=hvd.Sum, prescale_factor=0.5)
        same(before, torch.tensor([-1 * n, 1 * n, 2 * n], dtype=dtype))
        after = hvd.allreduce(tensor, name="a", op=hvd.Sum, postscale_factor=0.5)
        expected = [math.trunc(v * n * 0.5) for v in (-3, 3, 5)]
        same(after, torch.tensor(expected, dtype=dtype))


@case()
def factors_of_floats(hvd: Hvd) -> None:
    for dtype in (torch.float16, torch.float32, torch.float64):
        tensors = everyones(hvd, 5, dtype=dtype)
        for before, after in ((0.5, 1.0), (1.0, 0.25), (2, 3), (-1, 0.5), (0.0, 1)):
            got = hvd.allreduce(
                mine(hvd, 5, dtype=dtype),
                name=f"{dtype}.{before}.{after}",
                op=hvd.Sum,
                prescale_factor=before,
                postscale_factor=after,
            )
            same(got, total(tensors) * before * after)
        got = hvd.allreduce_(mine(hvd, 5, dtype=dtype), prescale_factor=2.0, postscale_factor=3.0)
        same(got, (total(tensors).double() * 6 / hvd.size()).to(dtype))


@case()
def half_is_scaled_in_single_precision(hvd: Hvd) -> None:
    """The prescaled value fits in half; the plain sum would not."""
    tensor = torch.full((3,), 40000.0, dtype=torch.float16)
    got = hvd.allreduce(tensor, name="x", op=hvd.Sum, prescale_factor=1 / 16, postscale_factor=4)
    same(got, torch.full((3,), 40000.0 / 16 * hvd.size() * 4, dtype=torch.float16))


@case()
def mismatches(hvd: Hvd) -> None:
    def call(name: str, numbers: torch.Tensor | None = None, **options: object) -> None:
        hvd.allreduce(mine(hvd, 2) if numbers is None else numbers, name=name, **options)

    with fails(hvd, TYPES, "float32", "int32"):
        call("dtype", mine(hvd, 3, dtype=torch.int32 if last(hvd) else torch.float32))
    text = (
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape {}, "
        "but another rank sent a tensor of shape {}."
    )
    for first, other in (([2], [3]), ([2, 6], [2, 3, 2]), ([2, 3], [3, 2])):
        with fails(hvd, text, first, other):
            call("shape", mine(hvd, *(other if last(hvd) else first)))
    text = (
        "Mismatched reduction operation: One rank sent reduction op {}, "
        "but another rank sent reduction op {}."
    )
    with fails(hvd, text, 1, 0):
        call("op", op=hvd.Average if last(hvd) else hvd.Sum)
    text = "Mismatched prescale and/or postscale factors: One rank sent factors ({}"
    factor = 4.0 if last(hvd) else 2.0
    with fails(hvd, text, 2, 4):
        call("factors", op=hvd.Sum, prescale_factor=factor)
    with fails(hvd, text, 1, 1):
        call("factors", op=hvd.Sum, postscale_factor=factor)


@case(different="an AttributeError of numpy or of float in the real one", sizes=(2,))
def no_tensor(hvd: Hvd) -> None:
    for value in (1.0, np.ones(3), [torch.ones(1)]):
        for call in (hvd.allreduce, hvd.allreduce_async, hvd.allgather, hvd.alltoall):
            with raises(TypeError, f"needs a torch tensor, not {type(value).__name__}"):
                call(value)
        for call in (hvd.broadcast, hvd.broadcast_async_):
            with raises(TypeError, f"needs a torch tensor, not {type(value).__name__}"):
                call(value, root_rank=0)
