"""Adasum: a sum that adapts to how much the vectors agree (Maleki et al., MLSys 2021).

Of two: `(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b`, per tensor: orthogonal vectors add up,
parallel ones average. Of more: pairwise, by recursive doubling, so the world is a power of two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hvdtrain.hvd.engine.collectives import Batch

_TINY = 1.5e-154  # the root of the smallest normal double: below it a square is nothing


def reduce_(flat: Tensor, sizes: list[int], batch: Batch) -> None:
    """Combine, in place, each piece of `flat` over all members. Collective."""
    if not flat.numel():
        return
    me = batch.members.index(batch.rank)
    carried = flat.cpu()  # one host round trip: the exchanges are between two ranks at a time
    distance = 1
    while distance < batch.size:
        partner = me ^ distance
        theirs = torch.empty_like(carried)
        # Not send and recv: of those Gloo gives up all, where a wait is over before they are.
        num_bytes = carried.numel() * carried.element_size()
        split = [num_bytes if rank == partner else 0 for rank in range(batch.size)]
        received, sent = theirs.view(torch.uint8), carried.view(torch.uint8)
        batch.wait(batch.group.alltoall_base(received, sent, split, split))
        # Both partners compute with the same two in the same order, so they get the same bits.
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
    """Return the adaptive sum of two vectors. Products are taken in double precision."""
    x, y = a.double(), b.double()
    dot = torch.dot(x, y)
    factors = []
    for v in (x, y):
        square = torch.dot(v, v)
        factors.append(1.0 - dot / (2 * square) if square > _TINY else torch.ones_like(dot))
    return (factors[0] * x + factors[1] * y).to(a.dtype)
