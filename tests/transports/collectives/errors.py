"""What is refused, and what ranks that call different collectives are told."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch

from tests.transports.collectives.table import Dist, case, refused, same, usable

WRONG_SUMS = "it gives wrong sums, or SIGABRT"


@case(unlike_gloo=WRONG_SUMS, everywhere=True)
def different_collectives(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    others: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(torch.ones(4), 0),
        "barrier": lambda: dist.barrier(),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.ones(4 * n), torch.ones(4)),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.ones(4), torch.ones(4 * n)),
        "all_to_all": lambda: dist.all_to_all_single(torch.ones(n), torch.ones(n)),
        "reduce": lambda: dist.reduce(torch.ones(4), 0),
        "gather": lambda: dist.gather(torch.ones(4), None, 0),
        "scatter": lambda: dist.scatter(torch.ones(4), None, 0),
    }
    for name, other in others.items():
        with refused(RuntimeError, "all_reduce(float32[4]", f"{name}(", "rank 0: ", "rank 1"):
            if rank == 0:
                dist.all_reduce(torch.ones(4))
            else:
                other()
        usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def different_tensors(dist: Dist) -> None:
    first = dist.get_rank() == 0
    for scale in (1, 40_000, 500_000):
        for _ in range(3):
            with refused(RuntimeError, f"[{4 * scale}]", f"[{5 * scale}]", "all_reduce(float32"):
                dist.all_reduce(torch.ones((4 if first else 5) * scale))
            with refused(RuntimeError, f"float32[{4 * scale}]", f"int32[{4 * scale}]"):
                dist.all_reduce(
                    torch.ones(4 * scale, dtype=torch.float32 if first else torch.int32)
                )
            with refused(RuntimeError, f"float32[{4 * scale}]", f"[2, {2 * scale}]"):
                dist.all_reduce(torch.ones(4 * scale).view(-1 if first else (2, -1)))
            usable(dist)
    n = dist.get_world_size()
    count = 4 if first else 5
    with refused(RuntimeError, "all_gather(float32[4])", "all_gather(float32[5])"):
        dist.all_gather([torch.ones(count) for _ in range(n)], torch.ones(count))
    with refused(RuntimeError, "broadcast(float32[4]", "broadcast(float32[5]"):
        dist.broadcast(torch.ones(count), 0)
    with refused(RuntimeError, "reduce_scatter(float32[4]", "reduce_scatter(float32[5]"):
        dist.reduce_scatter_tensor(torch.ones(count), torch.ones(n * count))
    with refused(RuntimeError, "reduce(float32[4]", "reduce(float32[5]"):
        dist.reduce(torch.ones(count), 0)
    t, parts = torch.ones(count), [torch.ones(count)] * n
    for move in (dist.gather, dist.scatter):
        with refused(RuntimeError, f"{move.__name__}(float32[4]", f"{move.__name__}(float32[5]"):
            move(t, parts if dist.get_rank() == 1 else None, 1)
    usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def calls_with_long_texts(dist: Dist) -> None:
    """They differ in their last bytes alone, for which a call's slot has no room."""
    last = 2 if dist.get_rank() == 0 else 3
    tensors = [torch.ones([1] * 63 + [n], dtype=torch.bfloat16) for n in (2, 2, last)]
    with refused(RuntimeError, "all_reduce(bfloat16[1, 1", "rank 0: ", "rank 1"):
        dist.distributed_c10d.all_reduce_coalesced(tensors)
    usable(dist)


@case(unlike_gloo=WRONG_SUMS, everywhere=True)
def a_small_and_a_large_tensor(dist: Dist) -> None:
    """Transports handle them in different ways; the comparison must be the same."""
    rank = dist.get_rank()
    counts = (10, 30_000, 500_000)
    for turn in range(4):
        for a, b in ((0, 1), (1, 2), (2, 0)):
            if turn % 2 == rank % 2:
                time.sleep(0.002)  # each side arrives last at times
            with refused(RuntimeError, f"float32[{counts[a]}]", f"float32[{counts[b]}]"):
                dist.all_reduce(torch.ones(counts[a if rank == 0 else b]))
            with refused(RuntimeError, f"float32[{counts[a]}]", "barrier()"):
                dist.all_reduce(torch.ones(counts[a])) if rank == 0 else dist.barrier()
            usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def different_operations_and_roots(dist: Dist) -> None:
    first = dist.get_rank() == 0
    op = dist.ReduceOp
    for count in (4, 400_000):
        t = torch.ones(count)
        for _ in range(3):
            with refused(RuntimeError, ", sum)", ", max)", "rank 0"):
                dist.all_reduce(t, op.SUM if first else op.MAX)
            with refused(RuntimeError, ", sum)", ", sum/n)"):
                dist.all_reduce(t, op.SUM if first else op.AVG)
            with refused(RuntimeError, "from 0", "from 1"):
                dist.broadcast(t, 0 if first else 1)
            same(t, torch.ones(count))
            usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def a_difference_deep_in_a_list(dist: Dist) -> None:
    first = dist.get_rank() == 0
    shapes = [4, 4, 4, 6, 2] if first else [4, 4, 4, 2, 6]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with refused(RuntimeError, "different collectives"):
            dist.all_reduce_coalesced([torch.ones(shape) for shape in shapes])
    usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def a_difference_among_many_in_flight(dist: Dist) -> None:
    first, n = dist.get_rank() == 0, dist.get_world_size()
    tensors = [torch.ones(7 if k == 5 and first else 8) for k in range(10)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for k, (work, t) in enumerate(zip(works, tensors, strict=True)):
        if k == 5:
            with refused(RuntimeError, "[7]", "[8]"):
                work.wait()
            assert work.is_completed()
            assert not work.is_success()
            with refused(RuntimeError, "[7]", "[8]"):
                work.get_future().wait()
        else:
            work.wait()
            same(t, torch.full((8,), float(n)))
    usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def splits_that_do_not_agree(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    sent, received = [2] * n, [2] * n
    if rank == 0:
        sent[1] = 3
    with refused(RuntimeError, "rank 0", "12 bytes", "rank 1", "8"):
        dist.all_to_all_single(torch.ones(2 * n), torch.ones(sum(sent)), received, sent)
    usable(dist)


@case(unlike_gloo="the root raises, and the others wait")
def a_list_of_the_root_that_does_not_fit(dist: Dist) -> None:
    """Only the root can tell; all ranks raise at once, and name it."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for root in range(n):
        wrong = {
            "[3]": [torch.ones(3) for _ in range(n)],
            "[2, 2]": [torch.ones(2, 2) for _ in range(n + 1)],
        }
        for what, tensors in wrong.items():
            parts = tensors if rank == root else None
            for name in ("scatter", "gather"):
                texts = (f"rank {root}: refused {name}(float32[4], ", f"float32{what}", "; rank")
                with refused(RuntimeError, *(texts if root == 0 else texts[:2])):
                    getattr(dist, name)(torch.ones(4), parts, root)
                usable(dist)


@case(unlike_gloo="the root raises, and the others wait")
def a_list_of_the_root_of_another_type(dist: Dist) -> None:
    """torch.distributed checks it itself; who calls the group's methods gets this error."""
    root, options = dist.get_rank() == 1, dist.distributed_c10d.GatherOptions()
    options.rootRank = 1
    parts = [[torch.ones(2, dtype=torch.float64)] * dist.get_world_size()] if root else []
    with refused(RuntimeError, "refused gather(float32[4], to 1)", "of rank 1 is float64[2]"):
        dist.group.WORLD.gather(parts, [torch.ones(4)], options).wait()
    usable(dist)


@case(unlike_gloo="it raises RuntimeErrors, or hangs")
def what_a_call_refuses(dist: Dist) -> None:
    n = dist.get_world_size()
    op = dist.ReduceOp
    with refused(ValueError, "5"):
        dist.reduce_scatter_tensor(torch.ones(5), torch.ones(5 * n + 1))
    with refused(ValueError, "float64"):
        dist.reduce_scatter_tensor(torch.ones(5), torch.ones(5 * n, dtype=torch.float64))
    with refused(ValueError, "5"):
        dist.reduce_scatter(torch.ones(5), [torch.ones(5 * n)] + [torch.ones(0)] * (n - 1))
    with refused(ValueError):
        dist.reduce_scatter(torch.ones(5), [torch.ones(5)] * (n + 1))
    with refused(ValueError, "[5]"):
        dist.all_gather_into_tensor(torch.ones(5 * n - 1), torch.ones(5))
    with refused(ValueError, "float64"):
        dist.all_gather_into_tensor(torch.ones(5 * n, dtype=torch.float64), torch.ones(5))
    with refused(ValueError, "[5]"):
        dist.all_gather([torch.ones(5)] * (n - 1), torch.ones(5))
    with refused(ValueError, "[4]"):
        dist.all_gather([torch.ones(4)] * n, torch.ones(5))
    with refused(ValueError, str(n)):
        dist.all_to_all([torch.ones(1)] * (n - 1), [torch.ones(1)] * n)
    with refused(ValueError, f"{n + 1} rows"):
        dist.all_to_all_single(torch.ones(n + 1), torch.ones(n + 1))
    with refused(ValueError, "splits"):
        dist.all_to_all_single(torch.ones(n), torch.ones(n), [1] * n, [2] * n)
    with refused(ValueError, "splits"):
        dist.all_to_all_single(torch.ones(n), torch.ones(n), [1] * n, [1] * (n - 1) + [0, 1])
    with refused(ValueError, "float64"):
        dist.all_to_all_single(torch.ones(n), torch.ones(n, dtype=torch.float64))
    with refused(ValueError, "AVG"):
        dist.all_reduce(torch.ones(5, dtype=torch.int32), op.AVG)
    with refused(ValueError, "BAND"):
        dist.all_reduce(torch.ones(5), op.BAND)
    with refused(ValueError, "float8"):
        dist.all_reduce(torch.ones(5).to(torch.float8_e5m2))
    with refused(ValueError, "meta"):
        dist.all_reduce(torch.ones(5, device="meta"))
    usable(dist)
