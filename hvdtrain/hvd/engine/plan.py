"""The plan of an optimizer, agreed on once, so that gradients are averaged without negotiation.

`lanes` uses it. Every rank describes its parameters by name, and rank 0 merges the descriptions.
The order of the buckets is the order in which rank 0's gradients became ready in its first
backward pass.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DENSE, SPARSE, FROZEN = "dense", "sparse", "frozen"


@dataclass
class Plan:
    """The parameters of an optimizer by name, in the order in which they are sent."""

    names: list[str]
    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    kinds: dict[str, str]
    """dense: in a bucket; sparse: by allgather; frozen: no rank has a gradient for it."""
    strides: dict[str, list[int]] = field(default_factory=dict)
    """Only for parameters in another dense memory format, e.g. channels_last, on all ranks."""
    options: list[Any] = field(default_factory=list)
    """What must be equal on all ranks: reduction, compression, bucket size, device, groups, ..."""

    def to_wire(self) -> bytes:
        """Return the plan as JSON."""
        return json.dumps(
            [self.names, self.shapes, self.dtypes, self.kinds, self.strides, self.options]
        ).encode()

    @classmethod
    def from_wire(cls, fields: list[Any]) -> Plan:
        """Return the plan with these fields, which were parsed from JSON."""
        return cls(*fields)


def merge_plans(sent: list[bytes]) -> tuple[list[Any] | None, str | None]:
    """Return the merged plan's fields, or None and the mismatch."""
    plans = [Plan.from_wire(json.loads(text)) for text in sent]
    first = plans[0]
    for plan in plans[1:]:
        problem = _differ(first, plan)
        if problem is not None:
            return None, problem
        for name, kind in plan.kinds.items():
            # A sparse gradient on one rank needs all ranks' rows, a dense one a bucket on all.
            if kind == SPARSE or first.kinds[name] == FROZEN:
                first.kinds[name] = kind
        # A memory format is used only if all ranks have the same.
        kept = {n: s for n, s in first.strides.items() if plan.strides.get(n) == s}
        first.strides = kept
    return json.loads(first.to_wire()), None


def _differ(one: Plan, other: Plan) -> str | None:
    if one.options != other.options:
        return (
            f"Mismatched optimizers: One rank has {one.options}, but another rank has "
            f"{other.options}."
        )
    for here, there in ((one, other), (other, one)):
        lacking = [name for name in here.names if name not in there.shapes]
        if lacking:
            return (
                f"Mismatched parameters: One rank has {', '.join(lacking[:6])}, but another rank "
                f"does not."
            )
    for name in one.names:
        if one.dtypes[name] != other.dtypes[name]:
            return (
                f"Mismatched data types: One rank had type {one.dtypes[name]}, but another rank "
                f"had type {other.dtypes[name]}. ({name})"
            )
        if one.shapes[name] != other.shapes[name]:
            return (
                f"Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape "
                f"{one.shapes[name]}, but another rank sent a tensor of shape "
                f"{other.shapes[name]}. ({name})"
            )
    return None
