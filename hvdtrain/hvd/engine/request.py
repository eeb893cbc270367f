"""What a rank asks for under a name, and what the ranks must agree on."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
OP_NAMES = ("average", "sum", "adasum", "min", "max", "product")

GLOBAL_SET = 0
# Data up to this size travels with its request, reduced or gathered by rank 0: two small messages
# take a tenth of the time of a Gloo collective, which costs one to two milliseconds here.
INLINE_BYTES = 16 * 1024


class Meta(NamedTuple):
    """One rank's request: all of it but the name. Comparable, and plain data for the wire.

    A group of tensors is one request. `data` is for requests without tensors; in an allreduce it is
    true where float16 is rounded before it is scaled, as Horovod does.
    """

    kind: str
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    device: str = "CPU"
    op: int = SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    data: Any = None

    @classmethod
    def from_wire(cls, fields: list[Any]) -> Meta:
        """Make one from what JSON makes of a tuple."""
        meta = cls(*fields)
        shapes = tuple(tuple(shape) for shape in meta.shapes)
        return meta._replace(dtypes=tuple(meta.dtypes), shapes=shapes, splits=tuple(meta.splits))

    @property
    def num_bytes(self) -> int:
        """The size of this rank's tensors."""
        sizes = (
            prod(s) * dtype_of(d).itemsize for s, d in zip(self.shapes, self.dtypes, strict=True)
        )
        return sum(sizes)


class Key(NamedTuple):
    """The name under which operations of different ranks meet."""

    set_id: int
    name: str


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return torch.float32 for "float32"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
