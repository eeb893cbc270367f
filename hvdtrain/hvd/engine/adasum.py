"""Adasum: a sum that adapts to how parallel the vectors are (Maleki et al., MLSys 2021).

`collectives` uses it. Two vectors, of one tensor each, are combined as
`(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b`: orthogonal vectors are added, parallel ones averaged.
More are combined pairwise, by recursive doubling, so the number of ranks must be a power of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hvdtrain.hvd.engine.batch import Batch

_TINY = 1.5e-154  # the square root of the smallest normal double; smaller |v|^2 count as zero


def reduce_(flat: Tensor, sizes: list[int], batch: Batch) -> None:
    """Combine each piece of `flat`, of these sizes, in place over all members. Collective."""
    if not flat.numel():
        return
    me = batch.members.index(batch.rank)
    carried = flat.cpu()  # one host round trip: the exchanges are between two ranks at a time
    distance = 1
    while distance < batch.size:
        partner = me ^ distance
        theirs = torch.empty_like(carried)
        # Not send and recv: Gloo aborts all pending ones when a timed wait for one expires.
        split = [carried.nbytes if rank == partner else 0 for rank in range(batch.size)]
        received, sent = theirs.view(torch.uint8), carried.view(torch.uint8)
        batch.wait(batch.group.alltoall_base(received, sent, split, split))
        # Both partners combine the same two vectors in the same order, so they get the same bits.
        low, high = (carried, theirs) if me < partner else (theirs, carried)
        carried = torch.cat(
            [
                combine(a, b)
                for a, b in zip(torch.split(low, sizes), torch.split(high, sizes), strict=True)
            ]
        )
        distance *= 2
    flat.copy_(carried)


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Return the adaptive sum of two vectors, computed in double precision."""
    x, y = a.double(), b.double()
    dot = torch.dot(x, y)
    factors = []
    for v in (x, y):
        square = torch.dot(v, v)
        factors.append(1.0 - dot / (2 * square) if square > _TINY else torch.ones_like(dot))
    return (factors[0] * x + factors[1] * y).to(a.dtype)
