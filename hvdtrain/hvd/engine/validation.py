"""The validation of requests: what all ranks must submit alike under one name, and the error texts.

The coordinator uses it. The texts are Horovod's, because scripts and their tests match them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvdtrain.hvd.engine.operation import ADASUM, Request

# Kinds of operations whose first dimension may differ between ranks.
_RAGGED = ("allgather", "alltoall")
_NO_SCALARS = ("allgather", "alltoall", "reducescatter")
_NO_JOIN = ("allgather", "broadcast", "alltoall", "reducescatter")
_TO_DENSE = " Specify sparse_to_dense=True if using DistributedOptimizer"


def mismatch(requests: Mapping[int, Request], joined: bool) -> str | None:
    """Return why these requests, by rank, cannot run as one operation; None if they can.

    `joined`: some ranks have called `hvd.join`, and take part without data.
    """
    ranks = sorted(requests)
    first = requests[ranks[0]]
    if joined and first.kind in _NO_JOIN:
        hint = _TO_DENSE if first.kind == "allgather" else ""
        return f"{first.kind.capitalize()} is not supported with Join at this time.{hint}"
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
    # Horovod treats Adasum as another operation than allreduce, and compares it before the dtypes.
    adasum = ["ADASUM" if r.op == ADASUM else "ALLREDUCE" for r in (one, other)]
    factors, others = ((r.prescale, r.postscale) for r in (one, other))
    groups = [f"{len(r.shapes)} tensors" for r in (one, other)]
    dtypes = zip(one.dtypes, other.dtypes, strict=False)
    shapes = zip(one.shapes, other.shapes, strict=False)
    fields: list[Any] = [
        ("operations", "did an", kind, other.kind.upper()),
        ("requests", "sent", one.data, other.data),  # e.g. the members of a new process set
        ("groups", "sent", *groups),
        ("operations", "did an", *adasum),
        *(("data types", "had type", a, b) for a, b in dtypes),
        *(
            (f"{kind} tensor shapes", f"sent a tensor {how}", a, b)
            for mine, theirs in shapes
            for how, a, b in _of_shapes(one.kind, mine, theirs)
        ),
        ("reduction operation", "sent reduction op", one.op, other.op),
        ("prescale and/or postscale factors", "sent factors", factors, others),
        (f"{kind} root ranks", "specified root rank", one.root, other.root),
        (f"{kind} CPU/GPU device selection", "specified device", one.device, other.device),
    ]
    return next((mismatched(*row) for row in fields if row[2] != row[3]), None)


def _of_shapes(
    kind: str, one: Sequence[int], other: Sequence[int]
) -> Iterator[tuple[str, object, object]]:
    """Yield what must be equal of two shapes."""
    if kind not in _RAGGED:
        yield "of shape", list(one), list(other)
        return
    yield "of rank", len(one), len(other)
    for dim, (a, b) in enumerate(zip(one[1:], other[1:], strict=False), 1):
        yield f"with dimension {dim} equal to", a, b


def mismatched(what: str, does: str, one: object, other: object) -> str:
    """Return the text of a mismatch. `does`: the verb before both values, such as "sent"."""
    return f"Mismatched {what}: One rank {does} {one}, but another rank {does} {other}."
