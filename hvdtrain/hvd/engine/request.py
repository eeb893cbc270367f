"""Requests: what a rank submits under a name, in a form that ranks can compare.

All of the engine uses them. A `Key` names an operation, a `Request` is one rank's part in it.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)

GLOBAL_SET = 0
# Data up to this size travels with its request, and rank 0 reduces it: two small messages take a
# tenth of the time of a Gloo collective, which costs one to two milliseconds here.
EAGER_BYTES = 16 * 1024


class Request(NamedTuple):
    """One rank's request without its name. Comparable, and plain data for JSON.

    A group of tensors is one request. `data` is for requests without tensors; in an allreduce it is
    true if float16 results are rounded before they are scaled, as in Horovod. `gpu` is the index of
    the tensors' GPU on this rank, and may be another one on each rank.
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
    gpu: int = 0

    @classmethod
    def from_wire(cls, fields: list[Any]) -> Request:
        """Return the request with these fields, which JSON has turned from tuples into lists."""
        if isinstance(fields, Request):
            return fields  # of rank 0 itself
        r = cls(*fields)
        shapes = tuple(tuple(shape) for shape in r.shapes)
        return r._replace(dtypes=tuple(r.dtypes), shapes=shapes, splits=tuple(r.splits))

    @property
    def num_bytes(self) -> int:
        """The size of this rank's tensors in bytes."""
        return _num_bytes(self.dtypes, self.shapes)


@lru_cache(4096)
def _num_bytes(dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> int:
    return sum(prod(s) * dtype_of(d).itemsize for s, d in zip(shapes, dtypes, strict=True))


class Key(NamedTuple):
    """The name by which the operations of different ranks are matched, within a process set."""

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
