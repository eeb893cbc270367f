"""What moves data: broadcast, gathering, scattering, and all to all."""

from __future__ import annotations

import time
import warnings

import torch

from tests.transports.collectives.table import ALL, SIZES, Dist, case, close, computed, same, values


@case(everywhere=True)
def broadcast(dist: Dist) -> None:
    for root in range(dist.get_world_size()):
        for count in SIZES:
            t = values(dist.get_rank(), count)
            dist.broadcast(t, root)
            same(t, values(root, count))
        for dtype in (*ALL, torch.bool, torch.int16, torch.complex64, torch.float8_e5m2):
            if dtype in (torch.int16, torch.float8_e5m2) and dist.get_backend() == "gloo":
                continue
            t = values(dist.get_rank(), 9, torch.int64).to(dtype)
            dist.broadcast(t, root)
            assert t.dtype == dtype
            same(t.to(torch.complex64), values(root, 9).to(dtype).to(torch.complex64))


@case()
def all_gather(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for dtype in ALL:
        for count in (1, 1_001, 20_001):
            parts = [torch.zeros(count, dtype=dtype) for _ in range(n)]
            dist.all_gather(parts, values(rank, count, dtype))
            for r, part in enumerate(parts):
                same(part, values(r, count, dtype))
    parts = [torch.zeros(1_100_001) for _ in range(n)]
    dist.all_gather(parts, values(rank, 1_100_001))
    for r, part in enumerate(parts):
        same(part, values(r, 1_100_001))


@case()
def all_gather_into_tensor(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for count in SIZES:
        out, t = torch.zeros(n * count), values(rank, count)
        for _ in range(3):
            dist.all_gather_into_tensor(out, t)
            for r in range(n):
                same(out[r * count : (r + 1) * count], values(r, count))
    rows = torch.zeros(n * 4, 3)
    dist.all_gather_into_tensor(rows, values(rank, (4, 3)))
    same(rows[4:8], values(1, (4, 3)))
    out = torch.zeros(n * 3, dtype=torch.complex64)
    dist.all_gather_into_tensor(out, values(rank, 3, torch.complex64))
    same(out[3:6], values(1, 3, torch.complex64))


@case()
def all_gather_into_a_tensor_that_the_input_is_part_of(dist: Dist) -> None:
    """As FSDP does it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for count in (7, 20_000, 1_500_000):
        out = torch.zeros(n * count)
        mine = out[rank * count : (rank + 1) * count]
        mine.copy_(values(rank, count))
        dist.all_gather_into_tensor(out, mine)
        for r in range(n):
            same(out[r * count : (r + 1) * count], values(r, count))


@case(unlike_gloo="it has none")
def all_gather_coalesced(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    lists = [[torch.zeros(4), torch.zeros(2, 3)] for _ in range(n)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_gather_coalesced(lists, [values(rank, 4), values(rank, (2, 3))])
    for r, (a, b) in enumerate(lists):
        same(a, values(r, 4))
        same(b, values(r, (2, 3)))


@case()
def reduce_scatter_tensor(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for op in ("SUM", "PRODUCT", "MIN", "MAX", "AVG"):
        for count in SIZES if op == "SUM" else (5, 300_000):
            t, out = torch.empty(n * count), torch.zeros(count)
            for _ in range(3 if op == "SUM" else 1):
                t.copy_(values(rank, n * count))
                dist.reduce_scatter_tensor(out, t, getattr(dist.ReduceOp, op))
                expected = computed(dist, op, n * count, torch.float32)
                close(out, expected[rank * count : (rank + 1) * count])
                same(t, values(rank, n * count))
    for dtype in ALL:
        out = torch.zeros(5, dtype=dtype)
        dist.reduce_scatter_tensor(out, values(rank, n * 5, dtype))
        same(out, computed(dist, "SUM", n * 5, dtype)[rank * 5 : rank * 5 + 5])


@case()
def reduce_scatter_of_a_tensor_seen_before(dist: Dist) -> None:
    """So that it lies in shared memory where there is any; its input stays as it was."""
    rank, n = dist.get_rank(), dist.get_world_size()
    count = 400_000
    t = torch.empty(n * count)
    for _ in range(3):
        t.copy_(values(rank, n * count))
        dist.all_reduce(t)
        t.copy_(values(rank, n * count))
        out = torch.zeros(count)
        dist.reduce_scatter_tensor(out, t)
        same(out, computed(dist, "SUM", n * count, torch.float32)[rank * count :][:count])
        same(t, values(rank, n * count))


@case()
def reduce_scatter(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for count in (1, 1_000, 20_000, 300_000):
        out = torch.zeros(count)
        parts = list(torch.split(values(rank, n * count), count))
        dist.reduce_scatter(out, parts)
        same(out, computed(dist, "SUM", n * count, torch.float32)[rank * count :][:count])


@case()
def all_to_all_single(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for count in SIZES:
        out = torch.zeros(n * count)
        dist.all_to_all_single(out, values(rank, n * count))
        for r in range(n):
            same(out[r * count :][:count], values(r, n * count)[rank * count :][:count])
    rows = torch.zeros(2 * n, 3, dtype=torch.int64)
    dist.all_to_all_single(rows, values(rank, (2 * n, 3), torch.int64))
    same(rows[2:4], values(1, (2 * n, 3), torch.int64)[2 * rank :][:2])


@case()
def all_to_all_single_uneven(dist: Dist) -> None:
    """Rank r sends (r + 1) * (k + 1) - 1 rows to rank k: none from 0 to 0."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for width in (1, 3, 400, 400_000):
        sent = [(rank + 1) * (k + 1) - 1 for k in range(n)]
        received = [(r + 1) * (rank + 1) - 1 for r in range(n)]
        data = torch.cat([torch.full((m, width), 10.0 * rank + k) for k, m in enumerate(sent)])
        out = torch.zeros(sum(received), width)
        dist.all_to_all_single(out, data, received, sent)
        theirs = [torch.full((m, width), 10.0 * r + rank) for r, m in enumerate(received)]
        same(out, torch.cat(theirs))


@case()
def all_to_all_single_of_nothing_for_some(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    sent = [0] * n
    received = [0] * n
    if rank == 0:
        sent[1] = 5
    if rank == 1:
        received[0] = 5
    out = torch.zeros(sum(received))
    dist.all_to_all_single(out, values(rank, sum(sent)), received, sent)
    if rank == 1:
        same(out, values(0, 5))


@case(unlike_gloo="it has none")
def all_to_all(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for scale in (1, 30_000, 500_000):
        for dtype in (torch.float32, torch.uint8):
            sent = [torch.full((scale * (rank + k),), rank + 5 * k, dtype=dtype) for k in range(n)]
            got = [torch.zeros(scale * (rank + r), dtype=dtype) for r in range(n)]
            dist.all_to_all(got, sent)
            for r, t in enumerate(got):
                same(t, torch.full((scale * (rank + r),), r + 5 * rank, dtype=dtype))


@case()
def gather(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for root in range(n):
        for count in (1, 20_000, 300_000):
            parts = [torch.zeros(count) for _ in range(n)] if rank == root else None
            dist.gather(values(rank, count), parts, root)
            for r, part in enumerate(parts or []):
                same(part, values(r, count))


@case()
def scatter(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for root in range(n):
        for count in (1, 20_000, 300_000):
            t = torch.zeros(count)
            parts = [values(r + 1, count) for r in range(n)] if rank == root else None
            dist.scatter(t, parts, root)
            same(t, values(rank + 1, count))


@case()
def reduce(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    for root in range(n):
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            for count in (1, 300_000):
                t = values(rank, count)
                dist.reduce(t, root, getattr(dist.ReduceOp, op))
                if rank == root:
                    same(t, computed(dist, op, count, torch.float32))


@case(everywhere=True)
def moves_around_the_borders_of_paths(dist: Dist) -> None:
    """Those of mpi4py: what a message's slot holds, and what is sent whole to all."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for count in (1, 508, 509, 16_384, 16_385):
        for root in range(n):
            t = values(rank, count, torch.int32)
            dist.broadcast(t, root)
            same(t, values(root, count, torch.int32))
        parts = [torch.zeros(count, dtype=torch.int32) for _ in range(n)]
        dist.all_gather(parts, values(rank, count, torch.int32))
        for r, part in enumerate(parts):
            same(part, values(r, count, torch.int32))
        whole, out = values(rank, n * count), torch.zeros(n * count)
        dist.all_to_all_single(out, whole)
        for r in range(n):
            same(out[r * count :][:count], values(r, n * count)[rank * count :][:count])
        for dtype in (torch.float16, torch.int32):
            share = torch.zeros(count, dtype=dtype)
            dist.reduce_scatter(share, [*torch.split(whole.to(dtype), count)])
            same(share, computed(dist, "SUM", n * count, dtype)[rank * count :][:count])


@case()
def barrier(dist: Dist) -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(0.3)
    came = torch.tensor([time.monotonic()], dtype=torch.float64)  # one clock for the host
    dist.barrier()
    left = time.monotonic()
    everyone = torch.empty(dist.get_world_size(), dtype=torch.float64)
    dist.all_gather_into_tensor(everyone, came)
    assert left >= everyone.max().item()
    work = dist.barrier(async_op=True)
    work.wait()
