"""The division of a number of items between ranks: `shard_bounds`. Imports no torch.

Used by `data.order`, and by programs that read a part of a file or table.
"""

from __future__ import annotations


def shard_bounds(num_items: int, rank: int, size: int) -> tuple[int, int]:
    """Return the first item of a rank's contiguous part, and the item after its last one.

    Every item is in exactly one part, for every `num_items` and `size`; the lengths differ by one
    at most, and lower ranks have the longer parts. Not collective. Raises ValueError if `rank` is
    not one of `size` ranks, or `num_items` is negative.
    """
    if num_items < 0 or not 0 <= rank < size:
        raise ValueError(f"no part of {num_items} items for rank {rank} of {size}")
    length, longer = divmod(num_items, size)
    start = rank * length + min(rank, longer)
    return start, start + length + (rank < longer)
