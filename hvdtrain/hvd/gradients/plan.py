"""Bucket plans: which gradients of an optimizer are sent together, and in which order.

`channel` and `reducer` use them. Every rank proposes a plan that describes its parameters by
name. All ranks exchange these, merge them alike (`merge_plans`), and divide the merged plan into
the same buckets (`lay_out`), in the order in which the first rank's gradients became ready in its
first backward pass.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from hvdtrain.hvd.engine.operation import AVERAGE, SUM, dtype_of
from hvdtrain.hvd.engine.validation import mismatched

DENSE, NAMED, SPARSE, FROZEN = "dense", "named", "sparse", "frozen"

UNLIKE_ORDER = (
    "Mismatched optimizers: the ranks built or first used two optimizers in different orders, and "
    "their parameters have equal names and shapes, so their gradients could be swapped: give them "
    "different names in named_parameters."
)

FIRST_BYTES = 1 << 20  # a small first bucket starts the communication early, as DDP's does
BUCKET_BYTES = 25 << 20
# Larger gradients are reduced in place: copying them would cost a fifth of reducing them.
IN_PLACE_BYTES = 1 << 20
# Smaller tensors are copied by one call for all of them.
SMALL_NUMEL = 16 * 1024


class PlannedGradient(NamedTuple):
    """What ranks must know of one parameter's gradient.

    `kind`: dense: in a bucket; named: alone; sparse: by allgather; frozen: no rank has one.
    `stride`: of dense memory in which all ranks have it, as channels_last; None if they differ.
    `gpu`: 0 on the first GPU that the rank's parameters are on, 1 on the next; None on the CPU.
    """

    shape: list[int]
    dtype: str
    gpu: int | None = None
    kind: str = DENSE
    stride: list[int] | None = None


class BucketPlan(NamedTuple):
    """The parameters of an optimizer by name, in the order in which they are sent.

    `options` must be equal on all ranks: reduction, compression, bucket size, groups, whether large
    gradients are reduced in place on the CPU. `follows`: channels of optimizers with equal
    parameters, and whether that optimizer was built earlier; it must be equal where two ranks know
    both, else they have taken different optimizers.
    """

    gradients: dict[str, PlannedGradient]
    options: list[Any]
    follows: dict[str, bool]


def merge_plans(proposals: list[str]) -> BucketPlan | str:
    """Return the merged plan of the ranks' proposals, each a plan as JSON; or the mismatch."""
    first, *others = (BucketPlan(*json.loads(text)) for text in proposals)
    merged = {name: PlannedGradient(*fields) for name, fields in first.gradients.items()}
    for plan in others:
        if (problem := _mismatch(first, plan)) is not None:
            return problem
        for name, mine in merged.items():
            theirs = PlannedGradient(*plan.gradients[name])
            # A sparse gradient on one rank needs all ranks' rows, a dense one a bucket on all.
            kind = theirs.kind if theirs.kind == SPARSE or mine.kind == FROZEN else mine.kind
            stride = mine.stride if mine.stride == theirs.stride else None
            merged[name] = mine._replace(kind=kind, stride=stride)
    return first._replace(gradients=merged)


def orders_differ(one: dict[str, bool], other: dict[str, bool]) -> bool:
    """Return whether two ranks' `BucketPlan.follows` contradict each other."""
    return any(other.get(name, earlier) != earlier for name, earlier in one.items())


def _mismatch(one: BucketPlan, other: BucketPlan) -> str | None:
    """Return why two proposals, whose gradients are still lists of JSON, cannot be merged."""
    if orders_differ(one.follows, other.follows):
        return UNLIKE_ORDER
    facts: list[tuple[str, Any, Any]] = [("optimizers", one.options, other.options)]
    for name in {**one.gradients, **other.gradients}:
        # Shape, dtype and GPU; nothing if it is missing.
        mine, theirs = (plan.gradients.get(name, ())[:3] for plan in (one, other))
        facts.append((f"gradients of {name}", mine, theirs))
    return next((mismatched(what, "has", a, b) for what, a, b in facts if a != b), None)


@dataclass
class BucketLayout:
    """One bucket: its parameters by name, small ones first, and its size in elements.

    `in_place`: it has one parameter, whose gradient is the buffer. `flag`: its last element reports
    that a rank's set of parameters has changed. `gpu`: see `PlannedGradient`.
    """

    names: list[str]
    dtype: torch.dtype
    numel: int
    in_place: bool = False
    flag: bool = False
    op: int = SUM
    gpu: int | None = None

    @property
    def device(self) -> str:
        """The kind of device that the bucket is on, as in a `Request`."""
        return "CPU" if self.gpu is None else "GPU"


def lay_out(plan: BucketPlan) -> list[BucketLayout]:
    """Divide a plan's dense parameters into buckets.

    A pure function of the plan, so all ranks get the same buckets in the same order.
    """
    op, wire, bucket_bytes, groups, in_place = plan.options
    dense = {name: g for name, g in plan.gradients.items() if g.kind == DENSE}
    group_of = {name: at for at, group in enumerate(_groups([*dense], groups)) for name in group}
    # Where a group's buckets are in the order of sending: at its last parameter.
    ends = {group_of[name]: at for at, name in enumerate(dense) if name in group_of}
    layouts: list[tuple[int, BucketLayout]] = []
    open_buckets: dict[Any, BucketLayout] = {}  # that further parameters may join
    for at, (name, gradient) in enumerate(dense.items()):
        group, own = group_of.get(name), dtype_of(gradient.dtype)
        dtype = dtype_of(wire) if wire is not None and own.is_floating_point else own
        numel = prod(gradient.shape)
        num_bytes = numel * dtype.itemsize
        can_be_in_place = (in_place or gradient.gpu is not None) and dtype == own
        is_alone = (
            group is None and can_be_in_place and num_bytes >= min(IN_PLACE_BYTES, bucket_bytes)
        )
        # What the parameters of one bucket share.
        key = group, dtype, gradient.gpu, is_alone
        new = BucketLayout([], dtype, 0, in_place=is_alone, op=op, gpu=gradient.gpu)
        bucket = open_buckets.setdefault(key, new)
        bucket.names.append(name)
        bucket.numel += numel
        # Closed by the parameter that makes it large enough.
        limit = bucket_bytes if layouts else min(FIRST_BYTES, bucket_bytes)
        if is_alone or (group is None and bucket.numel * dtype.itemsize >= limit):
            layouts.append((at, open_buckets.pop(key)))
    layouts += [(ends.get(key[0], len(dense)), bucket) for key, bucket in open_buckets.items()]
    ordered = [layout for _, layout in sorted(layouts, key=lambda item: item[0])]
    for layout in ordered:
        layout.names.sort(key=lambda name: prod(dense[name].shape) >= SMALL_NUMEL)
    return _with_flag(ordered, op)


def _groups(dense: list[str], groups: int | list[list[str]]) -> list[list[str]]:
    """Return lists of names that are sent together; a number means that many near-equal lists."""
    if not isinstance(groups, int):
        return groups
    ends = [len(dense) * i // groups for i in range(groups + 1)] if groups else []
    return [dense[a:b] for a, b in zip(ends, ends[1:], strict=False) if b > a]


def _with_flag(layouts: list[BucketLayout], op: int) -> list[BucketLayout]:
    """Add the flag to a bucket that is copied anyway, which costs nothing, else as its own bucket.

    It must be summed; on CUDA, reading it would need a copy from the device.
    """
    for layout in layouts:
        floating = layout.dtype.is_floating_point and not layout.in_place
        if layout.gpu is None and op in (AVERAGE, SUM) and floating:
            layout.flag = True
            layout.numel += 1
            return layouts
    return [BucketLayout([], torch.float32, 1, flag=True), *layouts]
