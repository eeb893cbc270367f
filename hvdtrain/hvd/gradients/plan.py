"""Bucket plans: which gradients of an optimizer are sent together, and in which order.

`channel` and `bucket_reducer` use them. Every rank proposes a plan that describes its parameters by
name. All ranks exchange these, merge them alike (`merge_plans`), and divide the merged plan into
the same buckets (`lay_out`), in the order in which the first rank's gradients became ready in its
first backward pass.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, field
from math import prod
from typing import Any

import torch

from hvdtrain.hvd.engine.operation import AVERAGE, SUM, Request, dtype_of
from hvdtrain.hvd.engine.validation import difference, mismatched

DENSE, SPARSE, FROZEN = "dense", "sparse", "frozen"

UNLIKE_ORDER = (
    "Mismatched optimizers: ranks have built, or used first, two optimizers of parameters with "
    "equal names and shapes in different orders, so their gradients could be swapped: give them "
    "different names in named_parameters."
)

FIRST_BYTES = 1 << 20  # a small first bucket starts the communication early, as DDP's does
BUCKET_BYTES = 25 << 20
# Larger gradients are reduced in place: copying them would cost a fifth of reducing them.
IN_PLACE_BYTES = 1 << 20
# Smaller tensors are copied by one call for all of them.
SMALL_NUMEL = 16 * 1024


@dataclass
class BucketPlan:
    """The parameters of an optimizer by name, in the order in which they are sent."""

    names: list[str]
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    kinds: dict[str, str]
    """dense: in a bucket; sparse: by allgather; frozen: no rank has a gradient for it."""
    strides: dict[str, list[int]] = field(default_factory=dict)
    """Only for parameters in another dense memory format, e.g. channels_last, on all ranks."""
    gpus: dict[str, int] = field(default_factory=dict)
    """For parameters on a GPU: 0 on the first GPU that the parameters are on, 1 on the next, ..."""
    options: list[Any] = field(default_factory=list)
    """What must be equal on all ranks: reduction, compression, bucket size, groups, in place."""
    follows: dict[str, bool] = field(default_factory=dict)
    """Channels of optimizers with equal parameters, and whether that optimizer was built earlier.
    It must be equal where two ranks know both, else they have taken different optimizers."""

    def to_wire(self) -> bytes:
        """Return the plan as JSON."""
        return json.dumps(astuple(self)).encode()


def merge_plans(proposals: list[str]) -> BucketPlan | str:
    """Return the merged plan of the ranks' proposals, or the mismatch."""
    first, *others = (BucketPlan(*json.loads(text)) for text in proposals)
    for plan in others:
        problem = _differ(first, plan)
        if problem is not None:
            return problem
        for name, kind in plan.kinds.items():
            # A sparse gradient on one rank needs all ranks' rows, a dense one a bucket on all.
            if kind == SPARSE or first.kinds[name] == FROZEN:
                first.kinds[name] = kind
        # A memory format is used only if all ranks have the same.
        first.strides = {n: s for n, s in first.strides.items() if plan.strides.get(n) == s}
    return first


def orders_differ(one: dict[str, bool], other: dict[str, bool]) -> bool:
    """Return whether two ranks' `BucketPlan.follows` contradict each other."""
    return any(other.get(name, earlier) != earlier for name, earlier in one.items())


def _differ(one: BucketPlan, other: BucketPlan) -> str | None:
    if orders_differ(one.follows, other.follows):
        return UNLIKE_ORDER
    if one.options != other.options:
        return mismatched("optimizers", "has", one.options, other.options)
    if one.gpus != other.gpus:
        return mismatched("devices of parameters", "has on GPUs", one.gpus, other.gpus)
    if (one.shapes, one.dtypes) == (other.shapes, other.dtypes):
        return None  # without a look at each of some thousand parameters
    for here, there in ((one, other), (other, one)):
        missing = [name for name in here.names if name not in there.shapes]
        if missing:
            return (
                f"Mismatched parameters: One rank has {', '.join(missing[:6])}, but another rank "
                f"does not."
            )
    for name in one.names:
        requests = (
            Request("allreduce", (plan.dtypes[name],), (tuple(plan.shapes[name]),))
            for plan in (one, other)
        )
        if (problem := difference(*requests)) is not None:
            return f"{problem} ({name})"
    return None


@dataclass
class BucketLayout:
    """One bucket: its parameters by name, small ones first, and its size in elements.

    `in_place`: it has one parameter, whose gradient is the buffer. `flag`: its last element reports
    that a rank's set of parameters has changed.
    """

    names: list[str]
    dtype: torch.dtype
    numel: int
    in_place: bool = False
    flag: bool = False
    op: int = SUM
    device: str = "CPU"
    gpu: int = 0
    """See `BucketPlan.gpus`."""


def lay_out(plan: BucketPlan) -> list[BucketLayout]:
    """Divide a plan's dense parameters into buckets.

    A pure function of the plan, so all ranks get the same buckets in the same order.
    """
    op, wire, bucket_bytes, groups, in_place = plan.options
    dense = [name for name in plan.names if plan.kinds[name] == DENSE]
    numel = {name: prod(plan.shapes[name]) for name in dense}
    # What the parameters of one bucket share: the dtype, the GPU, and the group.
    memory = {name: (_wire(plan, name, wire), plan.gpus.get(name)) for name in dense}
    group_of = {name: at for at, group in enumerate(_groups(dense, groups)) for name in group}
    layouts: list[tuple[int, BucketLayout]] = []
    open_buckets: dict[Any, OpenBucket] = {}

    def layout(names: list[str], in_place: bool = False) -> BucketLayout:
        dtype, gpu = memory[names[0]]
        device = "CPU" if gpu is None else "GPU"
        size = sum(numel[name] for name in names)
        return BucketLayout(names, dtype, size, in_place, op=op, device=device, gpu=gpu or 0)

    def close(at: int, names: list[str]) -> None:
        # `at`: the bucket's place in the order of sending, that of its last parameter.
        layouts.append((at, layout(sorted(names, key=lambda name: numel[name] >= SMALL_NUMEL))))

    last_of_group = {group_of[name]: at for at, name in enumerate(dense) if name in group_of}
    for at, name in enumerate(dense):
        group, (dtype, gpu) = group_of.get(name), memory[name]
        num_bytes = numel[name] * dtype.itemsize
        can_be_in_place = (in_place or gpu is not None) and dtype == dtype_of(plan.dtypes[name])
        if group is None and can_be_in_place and num_bytes >= min(IN_PLACE_BYTES, bucket_bytes):
            layouts.append((at, layout([name], in_place=True)))
            continue
        bucket = open_buckets.setdefault((group, dtype, gpu), OpenBucket())
        bucket.names.append(name)
        bucket.num_bytes += num_bytes
        if group is None:  # closed by the parameter that makes it large enough
            limit = bucket_bytes if layouts else min(FIRST_BYTES, bucket_bytes)
            if bucket.num_bytes >= limit:
                close(at, open_buckets.pop((group, dtype, gpu)).names)
        elif last_of_group[group] == at:  # a bucket for each memory, in the place of the last one
            for key in [key for key in open_buckets if key[0] == group]:
                close(at, open_buckets.pop(key).names)
    for bucket in open_buckets.values():
        close(len(dense), bucket.names)
    ordered = [layout for _, layout in sorted(layouts, key=lambda item: item[0])]
    return _with_flag(ordered, op)


@dataclass
class OpenBucket:
    """A bucket that further parameters may join."""

    names: list[str] = field(default_factory=list)
    num_bytes: int = 0


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
        if layout.device == "CPU" and op in (AVERAGE, SUM) and floating:
            layout.flag = True
            layout.numel += 1
            return layouts
    return [BucketLayout([], torch.float32, 1, flag=True), *layouts]


def _wire(plan: BucketPlan, name: str, wire: str | None) -> torch.dtype:
    dtype = dtype_of(plan.dtypes[name])
    return dtype_of(wire) if wire is not None and dtype.is_floating_point else dtype
