"""The table of cases, and what they have in common.

A case is a function of torch.distributed that every rank calls, with its expectations as asserts;
test_collectives.py runs them. It holds on Gloo, too, unless it says how hvdtrain's own transports
are `unlike_gloo`, or that it is about `shm` alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

Dist = Any
F = TypeVar("F", bound=Callable[[Dist], object])


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    function: Callable[[Dist], object]
    unlike_gloo: str = ""  # why Gloo does it otherwise, or not at all
    shm_only: bool = False
    sizes: Sequence[int] = (2, 3)
    everywhere: bool = False  # `make test` runs it on two ranks of shm and three of MPI, too

    @property
    def name(self) -> str:
        return self.function.__name__

    def holds_on(self, transport: str, n: int) -> bool:
        if self.unlike_gloo and transport == "gloo":
            return False
        return n in self.sizes and (not self.shm_only or transport.startswith("shm"))

    def is_repeat_on(self, transport: str, n: int) -> bool:
        """Return whether other arms show nearly the same: only `make test-all` runs the row there.

        Another MPI carries the same messages; its types and sums are its own.
        """
        is_of_any_mpi = not (self.everywhere or self.function.__module__.endswith("numerics"))
        return (transport, n) == ("gloo", 3) or transport.startswith("mpi4py-") and is_of_any_mpi

    def is_first_on(self, transport: str, n: int) -> bool:
        """Return whether `make test` runs the row there. Gloo is the check of the table itself."""
        if self.everywhere:
            return (transport, n) in (("shm", 2), ("shm", 3), ("mpi4py", 3))
        return (transport, n) in (("shm", max(self.sizes)), ("mpi4py", 2))


TABLE: list[Case] = []


def case(**about: Any) -> Callable[[F], F]:
    """Make a function a row of the table; `about`: the fields of Case."""

    def add(function: F) -> F:
        TABLE.append(Case(function, **about))
        return function

    return add


FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.uint8, torch.int8, torch.int32, torch.int64)

# Elements of float32: for one cache line, for what all add up themselves, for one stage, and for
# what is moved into shared memory when it is seen again. LARGE has several stages.
SIZES = (1, 7, 1_000, 20_000, 300_000)
LARGE = 2_250_001


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank contributes: 1 to 4, so that every type holds the sum and the product exactly.

    They repeat after PERIOD elements, so that large tensors cost no arithmetic.
    """
    return _tiled(_period(rank), count, dtype)


def computed(
    n: int, count: int, dtype: torch.dtype = torch.float32, op: str = "SUM", first: int = 0
) -> Tensor:
    """What `op` makes of the values of n ranks, from the first on, by NumPy."""
    parts = [_period(first + r) for r in range(n)]
    of = {
        "SUM": np.add,
        "AVG": np.add,
        "PRODUCT": np.multiply,
        "MIN": np.minimum,
        "MAX": np.maximum,
        "BAND": np.bitwise_and,
        "BOR": np.bitwise_or,
        "BXOR": np.bitwise_xor,
    }[op]
    total = np.asarray(functools.reduce(of, parts))
    return _tiled(total / n if op == "AVG" else total, count, dtype)


def summed_by_hosts(
    hosts: Sequence[Sequence[int]], parts: Sequence[Tensor], divisor: int = 1
) -> Tensor:
    """The sum by rank of each host, divided, and then by host. Halves are added up in float32."""
    dtype = parts[0].dtype

    def add(tensors: Sequence[Tensor], by: int = 1) -> Tensor:
        wide = [t.float() if dtype.itemsize == 2 else t for t in tensors]
        return functools.reduce(torch.add, wide).div(by).to(dtype)

    return add([add([parts[r] for r in ranks], divisor) for ranks in hosts])


def rank_and_size(dist: Dist) -> tuple[int, int]:
    """Return this rank, and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()


PERIOD = 8


def _period(rank: int) -> Any:
    return (np.arange(PERIOD) * (rank + 3) // 2 + rank) % 4 + 1


def _tiled(period: Any, count: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor of so many elements, which repeat a period."""
    return torch.from_numpy(period).to(dtype).repeat(count // PERIOD + 1)[:count]


def same(a: Tensor, b: Tensor) -> None:
    if not torch.equal(a, b):  # in a fraction of the time
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        raise AssertionError(f"{a} and not {b}")


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2 * torch.finfo(a.dtype).eps, atol=0)


@contextlib.contextmanager
def refused(kind: type[Exception], *said: str) -> Iterator[None]:
    with pytest.raises(kind) as raised:
        yield
    missing = [text for text in said if text not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"


def usable(dist: Dist, group: Any = None) -> None:
    """Whether a group still does what it should, in all sizes."""
    for count in (3, 20_000, 300_000):
        add_up(dist, torch.empty(count), group)


def add_up(dist: Dist, t: Tensor, group: Any = None) -> None:
    """All-reduce a tensor of ones, whatever it holds before."""
    dist.all_reduce(t.fill_(1), group=group)
    same(t, torch.full_like(t, dist.get_world_size(group)))
