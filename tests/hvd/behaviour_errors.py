"""Calls that do not fit each other, or the library: see behaviour.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.hvd.behaviour import (
    TYPES,
    Hvd,
    added,
    averaged,
    case,
    data,
    fails,
    has_adasum,
    last,
    mine,
    raises,
    same,
)
from tests.hvd.optimizer_table import net, wrap

# What most ranks send and what one does, with its words.
SHAPES: list[tuple[str, tuple[int, ...], str, tuple[int, ...], str]] = [
    ("allreduce", (2,), "of shape [2]", (3,), "of shape [3]"),
    ("allreduce", (2, 6), "of shape [2, 6]", (2, 3, 2), "of shape [2, 3, 2]"),
    ("allreduce", (2, 3), "of shape [2, 3]", (3, 2), "of shape [3, 2]"),
    ("broadcast", (2,), "of shape [2]", (3,), "of shape [3]"),
    ("reducescatter", (2,), "of shape [2]", (3,), "of shape [3]"),
    ("allgather", (2,), "of rank 1", (2, 3), "of rank 2"),
    ("allgather", (2, 3), "with dimension 1 equal to 3", (2, 4), "with dimension 1 equal to 4"),
    ("alltoall", (12, 3), "with dimension 1 equal to 3", (12, 4), "with dimension 1 equal to 4"),
]


@case()
def shapes_and_types(hvd: Hvd) -> None:
    """Whichever rank differs, all of them fail; what is under way beside it does not."""
    for odd in range(hvd.size()):
        good = hvd.allreduce_async(mine(hvd, 2), name="good")
        for kind, most, words, other, others_words in SHAPES:
            root = {"root_rank": 0} if kind == "broadcast" else {}
            call = partial(getattr(hvd, kind), name="x", **root)
            is_odd = hvd.rank() == odd
            text = "One rank sent a tensor {}, but another rank sent a tensor {}."
            text = f"Mismatched {kind.upper()} tensor shapes: {text}"
            with fails(hvd, text, words, others_words):
                call(mine(hvd, *(other if is_odd else most)))
            with fails(hvd, TYPES, "float32", "int32"):
                call(mine(hvd, 12, dtype=torch.int32 if is_odd else torch.float32))
        size = 4 if hvd.rank() == odd else 3
        with fails(hvd, "Mismatched ALLREDUCE tensor shapes"):
            hvd.grouped_allreduce([mine(hvd, 2), mine(hvd, size)], name="x")
        given = mine(hvd, size)
        with fails(hvd, "Mismatched ALLREDUCE tensor shapes"):
            hvd.allreduce_(given, name="x")
        same(given, mine(hvd, size))
        same(hvd.synchronize(good), averaged(hvd, 2))


@case()
def reductions_factors_and_roots(hvd: Hvd) -> None:
    one, other = ("Average", 4.0) if last(hvd) else ("Sum", 2.0)
    text = (
        "reduction operation: One rank sent reduction op {}, but another rank sent reduction op {}."
    )
    with fails(hvd, f"Mismatched {text}", 1, 0):
        hvd.allreduce(mine(hvd, 2), name="x", op=getattr(hvd, one))
    text = "Mismatched prescale and/or postscale factors: One rank sent factors ({}"
    for call in (hvd.allreduce, hvd.reducescatter):
        for factor, values in (("prescale_factor", (2, 4)), ("postscale_factor", (1, 1))):
            with fails(hvd, text, *values):
                call(mine(hvd, 2), name="x", op=hvd.Sum, **{factor: other})
    text = "root ranks: One rank specified root rank {}, but another rank specified root rank {}."
    with fails(hvd, f"Mismatched BROADCAST {text}", 0, 1):
        hvd.broadcast(mine(hvd, 2), 1 if last(hvd) else 0, name="x")
    if has_adasum(hvd):
        text = "Mismatched operations: One rank did an {}, but another rank did an {}."
        with fails(hvd, text, "ALLREDUCE", "ADASUM"):
            hvd.allreduce(mine(hvd, 3), name="x", op=hvd.Adasum if last(hvd) else hvd.Sum)


@case()
def adasum_of_some_or_of_three(hvd: Hvd) -> None:
    own = mine(hvd, 3)
    with added(hvd, 0) as some:
        calls: list[tuple[str, dict[str, Any]]] = [
            ("Adasum does not support non-global process sets yet.", {"process_set": some})
        ]
        if hvd.size() == 3:
            calls += [("Running Adasum with non-power of 2 ranks is not supported yet.", {})]
        for text, options in calls:
            for call, what in ((hvd.allreduce, own), (hvd.grouped_allreduce, [own])):
                with raises(NotImplementedError, text):
                    call(what, name="x", op=hvd.Adasum, **options)
        with raises(NotImplementedError, calls[0][0]):
            wrap(hvd, net(), op=hvd.Adasum, process_set=some)


@case()
def reductions_that_reducescatter_has_not(hvd: Hvd) -> None:
    own = mine(hvd, 4)
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
        for call, what in ((hvd.reducescatter, own), (hvd.grouped_reducescatter, [own])):
            with fails(hvd, "Reducescatter currently only supports AVERAGE and SUM."):
                call(what, name="x", op=op)


@case()
def scalars(hvd: Hvd) -> None:
    with raises(ValueError, "Reducescatter does not support scalar inputs"):
        hvd.reducescatter(torch.tensor(1.0), name="x")
    handle = hvd.allgather_async(torch.tensor(1.0), name="x")
    with fails(hvd, "Process-set rank zero tried to ALLGATHER a rank-zero tensor."):
        hvd.synchronize(handle)


@case(different="the real one crashes")
def a_scalar_to_all(hvd: Hvd) -> None:
    handle = hvd.alltoall_async(torch.tensor(1.0), [0] * hvd.size(), name="x")
    with fails(hvd, "Process-set rank zero tried to ALLTOALL a rank-zero tensor."):
        hvd.synchronize(handle)


@case()
def roots_out_of_range(hvd: Hvd) -> None:
    for root in (-1, hvd.size()):
        for call in (hvd.broadcast, hvd.broadcast_async_):
            with raises(ValueError, f"invalid root rank {root} for provided process set"):
                call(mine(hvd, 2), root, name="x")


@case()
def splits_that_do_not_fit(hvd: Hvd) -> None:
    n = hvd.size()
    with raises(ValueError, "first dimension of tensor is not an even multiple of the number"):
        hvd.alltoall(torch.ones(2 * n + 1), name="x")
    for splits, text in (
        (torch.ones(n, 1, dtype=torch.int32), "alltoall expects a 1D splits tensor"),
        (torch.ones(n), "alltoall expects splits to contain 32-bit integer elements."),
        (torch.ones(n, dtype=torch.int64), "alltoall expects splits to contain 32-bit integer"),
        ([1] * (n + 1), "Number of entries in splits does not equal number of workers."),
        ([3] * n, "Sum of splits entries is greater than the first dimension of tensor."),
    ):
        with raises(ValueError, text):
            hvd.alltoall(torch.ones(2 * n), splits, name="x")
    output, received = hvd.alltoall(mine(hvd, n + 2), [1] * n, name="x")  # the rest is not sent
    same(output, torch.stack([data(r, n + 2)[hvd.rank()] for r in range(n)]))
    assert received.tolist() == [1] * n


@case()
def process_sets_of_others(hvd: Hvd) -> None:
    tensor, member = torch.ones(2), hvd.rank() == 0
    with added(hvd, 0) as some:
        arguments: dict[str, Any] = {"grouped_allreduce": [[tensor]], "barrier": []}
        for kind in "allreduce grouped_allreduce allgather reducescatter alltoall barrier".split():
            call = partial(getattr(hvd, kind), *arguments.get(kind, [tensor]), process_set=some)
            what = kind.removeprefix("grouped_").capitalize()
            text = f"{what}: Rank {hvd.rank()} is not a member of the provided process set."
            if member:
                call()
            else:
                with raises(ValueError, "" if kind == "reducescatter" else text):
                    call()
        with raises(ValueError, "invalid root rank 1" if member else ""):
            hvd.broadcast_async(tensor, 1, name="x", process_set=some)


@case(different="a set that is not registered is reported as such")
def process_sets_that_are_removed_or_never_added(hvd: Hvd) -> None:
    text = "Allreduce: Process set provided does not exist, or has not been registered."
    gone = hvd.add_process_set([0])
    hvd.remove_process_set(gone)
    for process_set in (gone, hvd.ProcessSet([0])):
        with raises(ValueError, text):
            hvd.allreduce_async(torch.ones(2), name="x", process_set=process_set)


@case(stronger="what is no reduction is refused by its name, not by an error of the engine")
def a_reduction_that_is_none(hvd: Hvd) -> None:
    text = "op='mean' is not a reduction; use hvd.Average, Sum"
    with raises(ValueError, text):
        hvd.allreduce(mine(hvd, 2), op="mean")
    with raises(ValueError, text):
        wrap(hvd, net(), op="mean")
