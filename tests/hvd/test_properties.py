"""Properties of ours over shapes, dtypes, splits, orders of submission and which rank is late.

Every rank derives all ranks' inputs from the drawn plan, so it can compute what should come out.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hvd.behaviour import MOVED, REDUCED, fails, is_real
from tests.hvd.conftest import OUR_TORCHRUN
from tests.hvd.pool import HvdRanks

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
)
KINDS = "allreduce inplace grouped allgather broadcast alltoall reducescatter".split()
ONE_OP = ("allgather", "broadcast", "alltoall")
REAL = pytest.param(("horovod-mpi", 2), marks=pytest.mark.exhaustive)


@dataclass(frozen=True)
class Job:
    """One operation; what differs between ranks comes from the seed and the rank."""

    kind: str
    dtype: torch.dtype
    op: str
    shape: tuple[int, ...]
    turned: bool  # whether the ranks' tensors are not contiguous
    seed: int


@dataclass(frozen=True)
class Plan:
    """What all ranks do: the jobs, each rank in an order of its own, and who is late, and when."""

    jobs: tuple[Job, ...]
    orders: tuple[int, ...]
    late: int
    after: int
    remembered: int  # how often all is done again, under the same names


JOBS = st.builds(
    Job,
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(("Sum", "Average", "Min", "Max", "Product")),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    turned=st.booleans(),
    seed=st.integers(0, 2**16),
)
PLANS = st.builds(
    Plan,
    jobs=st.lists(JOBS, min_size=1, max_size=8).map(tuple),
    orders=st.tuples(*[st.integers(0, 2**16)] * 3),
    late=st.integers(0, 2),
    after=st.integers(0, 7),
    remembered=st.integers(1, 3),
)


def rows_of(job: Job, rank: int, size: int) -> list[int]:
    """How many rows this rank gathers, or sends to each rank."""
    dice = random.Random(job.seed * 31 + rank)
    return [dice.randint(0, 3) for _ in range(size)]


def tensor_of(job: Job, rank: int, size: int) -> torch.Tensor:
    """What this rank puts in: small whole numbers, exact in every dtype."""
    tail = job.shape[1:]
    shape: tuple[int, ...] = job.shape
    if job.kind == "allgather":
        shape = (rows_of(job, rank, size)[0], *tail)
    elif job.kind == "alltoall":
        shape = (sum(rows_of(job, rank, size)), *tail)
    elif job.kind == "reducescatter":
        shape = (job.seed % 7, *tail)
    generator = torch.Generator().manual_seed(job.seed * 31 + rank)
    low = 0 if job.dtype == torch.uint8 or job.op == "Product" else -3
    made = torch.randint(low, 4, shape, generator=generator).to(job.dtype)
    if job.turned and made.dim() > 1:
        made = made.transpose(0, -1).contiguous().transpose(0, -1)
    return made


def reduced(job: Job, tensors: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(tensors).double()
    if job.op == "Min":
        result = stacked.amin(0)
    elif job.op == "Max":
        result = stacked.amax(0)
    elif job.op == "Product":
        result = stacked.prod(0)
    else:
        result = stacked.sum(0)
        if job.op == "Average":
            result = result / len(tensors)
    return result.to(job.dtype)


def expected_of(job: Job, rank: int, size: int) -> list[torch.Tensor]:
    """What comes out on this rank."""
    tensors = [tensor_of(job, r, size) for r in range(size)]
    if job.kind == "allgather":
        return [torch.cat(tensors)]
    if job.kind == "broadcast":
        return [tensors[job.seed % size]]
    if job.kind == "alltoall":
        parts = [torch.split(t, rows_of(job, r, size))[rank] for r, t in enumerate(tensors)]
        return [torch.cat(parts)]
    whole = reduced(job, tensors)
    if job.kind == "reducescatter":
        return [torch.tensor_split(whole, size)[rank]]
    return [whole, reduced(job, [t + 1 for t in tensors])] if job.kind == "grouped" else [whole]


def submit(hvd: Any, job: Job, name: str) -> int:
    rank, size = hvd.rank(), hvd.size()
    tensor, op = tensor_of(job, rank, size), getattr(hvd, job.op)
    if job.kind == "allgather":
        handle = hvd.allgather_async(tensor, name)
    elif job.kind == "broadcast":
        handle = hvd.broadcast_async(tensor, job.seed % size, name)
    elif job.kind == "alltoall":
        handle = hvd.alltoall_async(tensor, rows_of(job, rank, size), name)
    elif job.kind == "reducescatter":
        handle = hvd.reducescatter_async(tensor, name, op)
    elif job.kind == "grouped":
        handle = hvd.grouped_allreduce_async([tensor, tensor + 1], name=name, op=op)
    elif job.kind == "inplace":
        handle = hvd.allreduce_async_(tensor, name=name, op=op)
    else:
        handle = hvd.allreduce_async(tensor, name=name, op=op)
    assert type(handle) is int
    return handle


def runnable(plan: Plan) -> Plan:
    """The plan with what is not an operation made one."""
    jobs = []
    for job in plan.jobs:
        op = job.op
        if job.kind == "reducescatter" and op not in ("Sum", "Average"):
            op = "Sum"
        shape = job.shape
        if job.kind in ("allgather", "alltoall", "reducescatter") and not shape:
            shape = (1,)
        jobs.append(Job(job.kind, job.dtype, op, shape, job.turned, job.seed))
    return Plan(tuple(jobs), plan.orders, plan.late, plan.after, plan.remembered)


def run_plan(hvd: Any, plan: Plan) -> None:
    rank, size = hvd.rank(), hvd.size()
    for again in range(plan.remembered):
        order = list(range(len(plan.jobs)))
        random.Random(plan.orders[rank] + again).shuffle(order)
        handles = {}
        for place, i in enumerate(order):
            if rank == plan.late % size and place == plan.after:
                time.sleep(0.005)
            handles[i] = submit(hvd, plan.jobs[i], f"job{i}")
        for i in reversed(order):
            got = hvd.synchronize(handles[i])
            if plan.jobs[i].kind == "alltoall":
                sent = [rows_of(plan.jobs[i], r, size)[rank] for r in range(size)]
                assert got[1].tolist() == sent
                got = got[:1]
            outputs = got if isinstance(got, tuple) else (got,)
            expected = expected_of(plan.jobs[i], rank, size)
            assert len(outputs) == len(expected)
            for output, value in zip(outputs, expected, strict=True):
                torch.testing.assert_close(output, value)


def every_dtype(hvd: Any, kind: str) -> None:
    """In a small tensor, which travels with its request, and in a large one."""
    real = is_real(hvd)
    dtypes: tuple[torch.dtype, ...] = DTYPES
    if real:
        dtypes = MOVED if kind in ("allgather", "broadcast", "alltoall") else REDUCED
    ops = ("Sum", "Average", "Min", "Max", "Product") if kind not in ONE_OP else ("Sum",)
    jobs = [
        Job(kind, dtype, op, shape, turned=not real, seed=seed)
        for dtype in dtypes
        for op in ops
        for seed, shape in ((1, (3,)), (2, (3, 2, 5_000)))
    ]
    run_plan(hvd, runnable(Plan(tuple(jobs), (0, 0, 0), late=0, after=0, remembered=1)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hvd_ranks", [*OUR_TORCHRUN, REAL], indirect=True)
def test_every_dtype(hvd_ranks: HvdRanks, kind: str) -> None:
    hvd_ranks.run(every_dtype, kind)


ONCE = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("hvd_ranks", OUR_TORCHRUN, indirect=True)
def test_any_operations_in_any_order(hvd_ranks: HvdRanks) -> None:
    @ONCE
    @given(PLANS)
    def holds(plan: Plan) -> None:
        hvd_ranks.run(run_plan, runnable(plan))

    holds()


def mismatched(
    hvd: Any, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.ones(shapes[rank], dtype=dtypes[rank])
    agree = len(set(shapes[:size])) == 1 and len(set(dtypes[:size])) == 1
    good = hvd.allreduce_async(torch.ones(2), name="good", op=hvd.Sum)
    for _ in range(2):
        handle = hvd.allreduce_async(mine, name="x", op=hvd.Sum)
        if agree:
            assert hvd.synchronize(handle).tolist() == torch.full_like(mine, size).tolist()
        else:
            with fails(hvd, "Mismatched"):
                hvd.synchronize(handle)
    assert hvd.synchronize(good).tolist() == [size, size]


SHAPES = st.sampled_from([(), (1,), (2, 3), (3, 2), (6,), (0,)])
KIND = st.sampled_from([torch.float32, torch.int32, torch.bfloat16])


@pytest.mark.parametrize("hvd_ranks", OUR_TORCHRUN, indirect=True)
def test_any_mismatch_reaches_all(hvd_ranks: HvdRanks) -> None:
    @ONCE
    @given(st.tuples(SHAPES, SHAPES, SHAPES), st.tuples(KIND, KIND, KIND))
    def holds(shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...]) -> None:
        hvd_ranks.run(mismatched, shapes, dtypes)

    holds()
