"""The validation of requests: what all ranks must submit alike under one name, and the error texts.

The coordinator uses it. The texts are Horovod's, because scripts and their tests match them.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.hvd.engine.request import ADASUM, Meta

# Kinds of operations whose first dimension may differ between ranks.
_RAGGED = ("allgather", "alltoall")
_NO_SCALARS = ("allgather", "alltoall", "reducescatter")
_NO_JOIN = {
    "allgather": "Allgather is not supported with Join at this time. Specify "
    "sparse_to_dense=True if using DistributedOptimizer",
    "broadcast": "Broadcast is not supported with Join at this time.",
    "alltoall": "Alltoall is not supported with Join at this time.",
    "reducescatter": "Reducescatter is not supported with Join at this time.",
}


def mismatch(asked: Mapping[int, Meta], joined: bool) -> str | None:
    """Return why these requests, by rank, cannot run as one operation; None if they can.

    `joined`: some ranks have called `hvd.join`, and take part without data.
    """
    ranks = sorted(asked)
    first = asked[ranks[0]]
    if joined and first.kind in _NO_JOIN:
        return _NO_JOIN[first.kind]
    for rank in ranks:
        problem = _differ(first, asked[rank]) if asked[rank] != first else None
        if problem is not None:
            return f"{problem} (ranks {ranks[0]} and {rank})"
    if first.kind in _NO_SCALARS and () in first.shapes:
        return f"Process-set rank zero tried to {first.kind.upper()} a rank-zero tensor."
    return None


def _differ(one: Meta, other: Meta) -> str | None:
    kind = one.kind.upper()
    if one.kind != other.kind:
        return (
            f"Mismatched operations: One rank did an {kind}, but another rank did an "
            f"{other.kind.upper()}."
        )
    if one.data != other.data:  # e.g. the members of a new process set
        return f"Mismatched requests: One rank sent {one.data}, but another rank sent {other.data}."
    if len(one.shapes) != len(other.shapes):
        return (
            f"Mismatched groups: One rank sent {len(one.shapes)} tensors, but another rank sent "
            f"{len(other.shapes)}."
        )
    # Horovod treats Adasum as another operation than allreduce, and compares it before the dtypes.
    if (one.op == ADASUM) != (other.op == ADASUM):
        names = ("ADASUM", "ALLREDUCE") if one.op == ADASUM else ("ALLREDUCE", "ADASUM")
        return (
            f"Mismatched operations: One rank did an {names[0]}, but another rank did an "
            f"{names[1]}."
        )
    for a, b in zip(one.dtypes, other.dtypes, strict=True):
        if a != b:
            return f"Mismatched data types: One rank had type {a}, but another rank had type {b}."
    for mine, theirs in zip(one.shapes, other.shapes, strict=True):
        if (problem := _shapes_differ(one.kind, mine, theirs)) is not None:
            return problem
    if one.op != other.op:
        return (
            f"Mismatched reduction operation: One rank sent reduction op {one.op}, but another "
            f"rank sent reduction op {other.op}."
        )
    if (one.prescale, one.postscale) != (other.prescale, other.postscale):
        return (
            f"Mismatched prescale and/or postscale factors: One rank sent factors "
            f"({one.prescale}, {one.postscale}), but another rank sent factors "
            f"({other.prescale}, {other.postscale})."
        )
    if one.root != other.root:
        return (
            f"Mismatched {kind} root ranks: One rank specified root rank {one.root}, but another "
            f"rank specified root rank {other.root}."
        )
    if one.device != other.device:
        return (
            f"Mismatched {kind} CPU/GPU device selection: One rank specified device {one.device}, "
            f"but another rank specified device {other.device}."
        )
    return None


def _shapes_differ(kind: str, one: tuple[int, ...], other: tuple[int, ...]) -> str | None:
    if kind not in _RAGGED:
        if one == other:
            return None
        return (
            f"Mismatched {kind.upper()} tensor shapes: One rank sent a tensor of shape "
            f"{list(one)}, but another rank sent a tensor of shape {list(other)}."
        )
    # Ragged kinds: only the number of dimensions, and all dimensions but the first, must be equal.
    if len(one) != len(other):
        return (
            f"Mismatched {kind.upper()} tensor shapes: One rank sent a tensor of rank {len(one)}, "
            f"but another rank sent a tensor of rank {len(other)}."
        )
    for dim, (a, b) in enumerate(zip(one, other, strict=True)):
        if dim > 0 and a != b:
            return (
                f"Mismatched {kind.upper()} tensor shapes: One rank sent a tensor with dimension "
                f"{dim} equal to {a}, but another rank sent a tensor with dimension {dim} equal "
                f"to {b}."
            )
    return None
