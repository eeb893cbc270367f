"""The validation of requests: what all ranks must submit alike under one name, and the error texts.

The coordinator uses it. The texts are Horovod's, because scripts and their tests match them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdtrain.hvd.engine.operation import ADASUM, Request

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


def mismatch(requests: Mapping[int, Request], joined: bool) -> str | None:
    """Return why these requests, by rank, cannot run as one operation; None if they can.

    `joined`: some ranks have called `hvd.join`, and take part without data.
    """
    ranks = sorted(requests)
    first = requests[ranks[0]]
    if joined and first.kind in _NO_JOIN:
        return _NO_JOIN[first.kind]
    for rank in ranks:
        problem = difference(first, requests[rank]) if requests[rank] != first else None
        if problem is not None:
            return f"{problem} (ranks {ranks[0]} and {rank})"
    if first.kind in _NO_SCALARS and () in first.shapes:
        return f"Process-set rank zero tried to {first.kind.upper()} a rank-zero tensor."
    return None


def difference(one: Request, other: Request) -> str | None:
    """Return the first difference that does not let two requests run as one operation, or None."""
    kind = one.kind.upper()
    if one.kind != other.kind:
        return mismatched("operations", "did an", kind, other.kind.upper())
    if one.data != other.data:  # e.g. the members of a new process set
        return mismatched("requests", "sent", one.data, other.data)
    if len(one.shapes) != len(other.shapes):
        return mismatched("groups", "sent", *(f"{len(r.shapes)} tensors" for r in (one, other)))
    # Horovod treats Adasum as another operation than allreduce, and compares it before the dtypes.
    if (one.op == ADASUM) != (other.op == ADASUM):
        names = ("ADASUM" if r.op == ADASUM else "ALLREDUCE" for r in (one, other))
        return mismatched("operations", "did an", *names)
    for a, b in zip(one.dtypes, other.dtypes, strict=True):
        if a != b:
            return mismatched("data types", "had type", a, b)
    for mine, theirs in zip(one.shapes, other.shapes, strict=True):
        if (problem := _shapes_differ(one.kind, mine, theirs)) is not None:
            return problem
    factors, others = ((r.prescale, r.postscale) for r in (one, other))
    fields: tuple[tuple[str, str, object, object], ...] = (
        ("reduction operation", "sent reduction op", one.op, other.op),
        ("prescale and/or postscale factors", "sent factors", factors, others),
        (f"{kind} root ranks", "specified root rank", one.root, other.root),
        (f"{kind} CPU/GPU device selection", "specified device", one.device, other.device),
    )
    return next((mismatched(what, does, a, b) for what, does, a, b in fields if a != b), None)


def _shapes_differ(kind: str, one: Sequence[int], other: Sequence[int]) -> str | None:
    what = f"{kind.upper()} tensor shapes"
    if kind not in _RAGGED:
        if list(one) == list(other):
            return None
        return mismatched(what, "sent a tensor of shape", list(one), list(other))
    # Ragged kinds: only the number of dimensions, and all dimensions but the first, must be equal.
    if len(one) != len(other):
        return mismatched(what, "sent a tensor of rank", len(one), len(other))
    for dim, (a, b) in enumerate(zip(one, other, strict=True)):
        if dim > 0 and a != b:
            return mismatched(what, f"sent a tensor with dimension {dim} equal to", a, b)
    return None


def mismatched(what: str, does: str, one: object, other: object) -> str:
    """Return the text of a mismatch. `does`: the verb before both values, such as "sent"."""
    return f"Mismatched {what}: One rank {does} {one}, but another rank {does} {other}."
