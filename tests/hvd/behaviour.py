"""The table of cases: what every operation does, the same on the real Horovod and on ours.

A case is a function of the module that every rank calls, with its expectations as asserts. It
holds on both libraries, unless it says that ours is `stronger` (it refuses less) or `different`,
or that only the `real` one is so; each such reason is a row of the compatibility table in the docs.
The cases are in the behaviour_*.py files, and in optimizer_*.py those of DistributedOptimizer;
test_behaviour.py runs them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch

Hvd = Any
Run = Callable[[Hvd], object]
F = TypeVar("F", bound=Run)

# What the real Horovod reduces, and what it moves.
REDUCED = (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
MOVED = (*REDUCED, torch.uint8, torch.int8, torch.int16)

TYPES = "Mismatched data types: One rank had type {}, but another rank had type {}."
SHUT_DOWN = "Horovod has been shut down. This was caused by an exception on one of the ranks"
NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
DUPLICATE_NAME = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor "
    "that is currently being processed.  If you want to request another tensor, use a different "
    "tensor name."
)


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    function: Run
    number: int  # its place in the table
    stronger: str = ""  # why only ours does it: the real one refuses, or does wrong
    different: str = ""  # why ours does it otherwise than the real one
    real: str = ""  # why only the real one does it
    sizes: Sequence[int] = (2, 3)
    arms: Sequence[str] = ("",)  # as in the tests' ids, or how these begin
    exact: bool = False  # also with HVDTRAIN_EXACT_HOROVOD=1, as all that only the real one does
    ends: bool = False  # it shuts down, and these ranks are of no further use

    @property
    def name(self) -> str:
        group = self.function.__module__.rpartition(".")[2].removeprefix("behaviour_")
        return f"{group}-{self.function.__name__}"

    def holds_on(self, arm: str, n: int) -> bool:
        if arm == "exact":
            return self.exact or bool(self.real)
        only_elsewhere = self.real
        if arm.startswith("horovod-"):
            only_elsewhere = self.stronger or self.different
        in_arms = f"{arm}-x{n}".startswith(tuple(self.arms))
        return not only_elsewhere and n in self.sizes and in_arms


TABLE: list[Case] = []


def case(**how: Any) -> Callable[[F], F]:
    """Make a function a row of the table, with these fields of Case."""

    def add(function: F) -> F:
        TABLE.append(Case(function, len(TABLE), **how))
        return function

    return add


def run_case(hvd: Hvd, function: Run, ends: bool = False) -> None:
    """Run a case, and see that the engine is as usable as before, named and unnamed."""
    function(hvd)
    if ends:
        return
    align_handles(hvd)
    n = hvd.size()
    named = hvd.allreduce(torch.tensor([1.0, hvd.rank()]), name="after", op=hvd.Sum)
    unnamed = hvd.allreduce(torch.tensor(hvd.rank() + 1), op=hvd.Sum)
    assert named.tolist() == [n, n * (n - 1) / 2]
    assert unnamed.item() == n * (n + 1) / 2


def is_real(hvd: Hvd) -> bool:
    """Whether this is the real Horovod."""
    return str(hvd.__name__).startswith("horovod")


def align_handles(hvd: Hvd) -> None:
    """Bring the handle numbers of the ranks in step again. Collective.

    The real Horovod matches unnamed operations by them; ours counts otherwise.
    """
    if not is_real(hvd):
        return
    handle = hvd.allreduce_async(torch.zeros(1), name="level")
    hvd.synchronize(handle)
    top = hvd.allreduce(torch.tensor(handle), name="top", op=hvd.Max).item()
    for _ in range(top - handle):
        with raises(ValueError):
            hvd.broadcast_async(torch.zeros(1), root_rank=-1, name="burn")


def has_adasum(hvd: Hvd) -> bool:
    """Whether these ranks can combine by Adasum: the real Horovod does so with MPI only."""
    return hvd.size() in (2, 4) and (not is_real(hvd) or bool(hvd.mpi_enabled()))


@contextlib.contextmanager
def raises(kind: type[BaseException], *texts: str) -> Iterator[None]:
    """Expect exactly this class, with one of the texts in its message."""
    caught: BaseException | None = None
    try:
        yield
    except Exception as error:
        caught = error
    assert type(caught) is kind, f"{caught!r}, not {kind!r} ({texts})"
    assert any(text in str(caught) for text in texts or [""]), f"{texts!r} not in {caught!r}"


def fails(hvd: Hvd, text: str, *values: object) -> contextlib.AbstractContextManager[None]:
    """Expect the engine's error, with the two values, in either order, in its text.

    Horovod names the values in the order in which it received them.
    """
    texts = text.format(*values), text.format(*reversed(values))
    return raises(hvd.HorovodInternalError, *texts)


@contextlib.contextmanager
def reinitialized(hvd: Hvd, **env: str) -> Iterator[None]:
    """Initialise anew with these variables, and after the block without them."""
    hvd.shutdown()
    with patch.dict(os.environ, env):
        hvd.init()
        yield
        hvd.shutdown()
    hvd.init()


@contextlib.contextmanager
def added(hvd: Hvd, *members: int) -> Iterator[Hvd]:
    """A process set for a while."""
    process_set = hvd.add_process_set(list(members))
    yield process_set
    assert hvd.remove_process_set(process_set)


def open_resources() -> dict[str, int]:
    """How many open files, threads and anonymous files in memory this process has."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    counts = {kind: len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")}
    return {**counts, "memfd": sum("/memfd:" in line for line in maps)}


def one_parameter(hvd: Hvd, **options: Any) -> tuple[torch.nn.Parameter, Any]:
    """A parameter of zeros, and an optimizer that subtracts the average of its gradients."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    sgd = torch.optim.SGD([parameter], lr=1.0)
    return parameter, hvd.DistributedOptimizer(sgd, [("p", parameter)], **options)


def step_with(gradient: Any, parameter: torch.nn.Parameter, optimizer: Any) -> None:
    """Make a step with this gradient of this rank."""
    optimizer.zero_grad()
    (parameter * gradient).sum().backward()
    optimizer.step()


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a rank puts in: small whole numbers, so that sums are exact in every dtype."""
    numel = int(torch.Size(shape).numel())
    return (torch.arange(numel) % 4 + 1 + rank).reshape(shape).to(dtype)


def mine(hvd: Hvd, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What this rank puts in."""
    return data(hvd.rank(), *shape, dtype=dtype)


def everyones(hvd: Hvd, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """What each rank puts in, in rank order."""
    return [data(rank, *shape, dtype=dtype) for rank in range(hvd.size())]


def total(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum, in their dtype."""
    return torch.stack(list(tensors)).sum(0, dtype=tensors[0].dtype)


def mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their average, in their dtype: whole numbers are cut toward zero."""
    exact = torch.stack(list(tensors)).double().sum(0) / len(tensors)
    return exact.to(tensors[0].dtype)


def summed(hvd: Hvd, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The sum of what the ranks put in."""
    return total(everyones(hvd, *shape, dtype=dtype))


def averaged(hvd: Hvd, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The average of what the ranks put in."""
    return mean(everyones(hvd, *shape, dtype=dtype))


def same(got: object, expected: torch.Tensor) -> None:
    """Equal dtype, shape and values; floats up to rounding, as 1/3 may be applied as a factor."""
    assert isinstance(got, torch.Tensor), type(got)
    torch.testing.assert_close(got.detach(), expected)


def last(hvd: Hvd) -> bool:
    """Whether this is the last rank: the one that differs from the others in most cases."""
    return bool(hvd.rank() == hvd.size() - 1)
