"""Adasum: a sum that adapts to how parallel the vectors are (Maleki et al., MLSys 2021).

`batch` uses it. Two vectors, of one tensor each, are combined as
`(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b`: orthogonal vectors are added, parallel ones averaged.
More are combined pairwise, by recursive doubling, so the number of ranks must be a power of two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_TINY = 1.5e-154  # the square root of the smallest normal double; smaller |v|^2 count as zero


def reduce_(
    flat: Tensor,
    sizes: list[int],
    me: int,
    num_ranks: int,
    exchange: Callable[[int, Tensor, Tensor], None],
) -> None:
    """Combine each piece of `flat`, of these sizes, in place over all ranks. Collective.

    `exchange(partner, sent, received)` swaps bytes with another rank.
    """
    if not flat.numel():
        return
    carried = flat.cpu()  # one host round trip: the exchanges are between two ranks at a time
    distance = 1
    while distance < num_ranks:
        partner = me ^ distance
        theirs = torch.empty_like(carried)
        exchange(partner, carried.view(torch.uint8), theirs.view(torch.uint8))
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
