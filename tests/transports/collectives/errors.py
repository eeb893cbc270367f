"""What is refused, and what ranks that call different collectives are told."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch

from hvdtrain.errors import PeerLost
from tests.transports.collectives.operations import (
    Call,
    all_gather,
    broadcast,
    complete,
    gather,
    reduce,
    reduce_scatter_tensor,
    scatter,
)
from tests.transports.collectives.table import Dist, case, rank_and_size, refused, same, usable

WRONG_SUMS = "it gives wrong sums, or SIGABRT"


@case(unlike_gloo=WRONG_SUMS, everywhere=True)
def different_collectives(dist: Dist) -> None:
    """Or tensors: transports handle small and large ones in different ways."""
    first, n, op = dist.get_rank() == 0, dist.get_world_size(), dist.ReduceOp
    for count in (4, 40_000, 500_000):
        t, every = torch.ones(count), torch.ones(n * count)
        others: list[tuple[Any, ...]] = [
            (", max)", dist.all_reduce, t, op.MAX),
            (", sum/n)", dist.all_reduce, t, op.AVG),
            ("broadcast(", dist.broadcast, t, 0),
            ("barrier(", dist.barrier),
            ("all_gather(", dist.all_gather_into_tensor, every, t),
            ("reduce_scatter(", dist.reduce_scatter_tensor, t, every),
            ("all_to_all(", dist.all_to_all_single, every, every.clone()),
            ("reduce(", dist.reduce, t, 0),
            ("gather(", dist.gather, t, None, 0),
            ("scatter(", dist.scatter, t, None, 0),
            ("all_reduce(int32[", dist.all_reduce, t.int()),
            ("all_reduce(float32[2, ", dist.all_reduce, t.view(2, -1)),
            *(
                (f"all_reduce(float32[{size}]", dist.all_reduce, torch.ones(size))
                for size in (5, 30_000, 700_000)
            ),
        ]
        for text, other, *arguments in others:
            for turn in range(2):
                if turn % 2 == first:
                    time.sleep(0.002)  # each side arrives last at times
                call = f"rank 0: all_reduce(float32[{count}], sum)"
                with refused(RuntimeError, call, text, "rank 1"):
                    dist.all_reduce(t) if first else other(*arguments)
            usable(dist)
        with refused(RuntimeError, "from 0", "from 1", "rank 0"):
            dist.broadcast(t, 0 if first else 1)
        same(t, torch.ones(count))
    for operation in (all_gather, broadcast, reduce_scatter_tensor, reduce, gather, scatter):
        name = operation.__name__.removesuffix("_tensor")
        with refused(RuntimeError, f"{name}(float32[4]", f"{name}(float32[5]"):
            complete(operation(Call(dist, 4 if first else 5)))
    usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def differences_deep_in_lists(dist: Dist) -> None:
    """The second one is in the last bytes alone, for which a call's slot has no room."""
    place = min(dist.get_rank(), 1)
    for shapes in (
        [4, 4, 4, *([6, 2], [2, 6])[place]],
        [[1] * 63 + [k] for k in (2, 2, 2 + place)],
    ):
        tensors = [torch.ones(shape, dtype=torch.bfloat16) for shape in shapes]
        with refused(RuntimeError, "different collectives", "all_reduce(bfloat16[", "rank 1"):
            dist.distributed_c10d.all_reduce_coalesced(tensors)
        usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def a_difference_among_many_in_flight(dist: Dist) -> None:
    """If callbacks may have called them, as a hook of DDP does, the error says what to do."""
    first, n = dist.get_rank() == 0, dist.get_world_size()
    dist.all_reduce(torch.ones(8), async_op=True).get_future().wait()
    tensors = [torch.ones(7 if k == 5 and first else 8) for k in range(10)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for k, (work, t) in enumerate(zip(works, tensors, strict=True)):
        if k == 5:
            for wait in (work.wait, work.get_future().wait):
                with refused(RuntimeError, "[7]", "[8]", "use one bucket"):
                    wait()
            assert work.is_completed()
            assert not work.is_success()
        else:
            work.wait()
            same(t, torch.full((8,), float(n)))
    usable(dist)


@case(unlike_gloo=WRONG_SUMS)
def splits_that_do_not_agree(dist: Dist) -> None:
    rank, n = rank_and_size(dist)
    sent, received = [2] * n, [2] * n
    if rank == 0:
        sent[1] = 3
    with refused(RuntimeError, "rank 0", "12 bytes", "rank 1", "8"):
        dist.all_to_all_single(torch.ones(2 * n), torch.ones(sum(sent)), received, sent)
    usable(dist)


@case(unlike_gloo="the root raises, and the others wait")
def a_list_of_the_root_that_does_not_fit(dist: Dist) -> None:
    """Only the root can tell; all ranks raise at once, and name it."""
    rank, n = rank_and_size(dist)
    for root in range(n):
        wrong = {
            "[3]": [torch.ones(3) for _ in range(n)],
            "[2, 2]": [torch.ones(2, 2) for _ in range(n + 1)],
            "[1]": [torch.ones(1)],
        }
        for what, tensors in wrong.items():
            parts = tensors if rank == root else None
            for name in ("scatter", "gather"):
                texts = (f"rank {root}: refused {name}(float32[4], ", f"float32{what}", "; rank")
                with refused(RuntimeError, *(texts if root == 0 else texts[:2])):
                    getattr(dist, name)(torch.ones(4), parts, root)
                usable(dist)


@case(unlike_gloo="a rank that comes late waits for the others, too")
def a_rank_that_is_late(dist: Dist) -> None:
    """It comes when the others have given up. Other groups go on."""
    is_late, group = dist.get_rank() == 1, dist.new_group()
    usable(dist, group)
    group.set_timeout(timedelta(seconds=1))
    says = "has given up; rank 1" if is_late else "did not arrive within 1 s; rank"
    if is_late:
        dist.barrier()
    for turn in range(2):
        with refused(PeerLost, "all_reduce(float32[2000000], sum): rank", f") {says}"):
            dist.all_reduce(torch.ones(2_000_000), group=group)
        if turn == 0 and not is_late:
            dist.barrier()
    usable(dist)


@case(unlike_gloo="it raises RuntimeErrors, or hangs")
def what_a_call_refuses(dist: Dist) -> None:
    n, op = dist.get_world_size(), dist.ReduceOp
    five, whole, row = torch.ones(5), torch.ones(5 * n), torch.ones(n)
    wrong: list[tuple[Any, ...]] = [
        ("5", dist.reduce_scatter_tensor, five, torch.ones(5 * n + 1)),
        ("5", dist.reduce_scatter, five, [whole] + [torch.ones(0)] * (n - 1)),
        ("", dist.reduce_scatter, five, [five] * (n + 1)),
        ("[5]", dist.all_gather_into_tensor, whole[1:], five),
        ("float64", dist.all_gather_into_tensor, whole.double(), five),
        ("[5]", dist.all_gather, [five] * (n - 1), five),
        (str(n), dist.all_to_all, [five] * (n - 1), [five] * n),
        ("contiguous", dist.irecv, torch.ones(2, 3).t(), 0),
        ("no rows", dist.all_to_all_single, torch.tensor(1.0), torch.tensor(1.0)),
        (f"{n + 1} rows", dist.all_to_all_single, torch.ones(n + 1), torch.ones(n + 1)),
        ("splits", dist.all_to_all_single, row, row, [1] * n, [2] * n),
        ("splits", dist.all_to_all_single, row, row, [1] * n, [1] * (n - 1) + [0, 1]),
        ("float64", dist.all_to_all_single, row, row.double()),
        ("AVG", dist.all_reduce, five.int(), op.AVG),
        ("BAND", dist.all_reduce, five, op.BAND),
        ("float8", dist.all_reduce, five.to(torch.float8_e5m2)),
        ("meta; for another device use", dist.all_reduce, five.to("meta")),
    ]
    for root in (-1, n):  # torch passes it on, also to the default group
        text = f"invalid root rank: {root} of"
        wrong += [(text, call, five, root) for call in (dist.broadcast, dist.reduce)]
        wrong += [(text, move, five, None, root) for move in (dist.gather, dist.scatter)]
    for text, call, *arguments in wrong:
        with refused(ValueError, text):
            call(*arguments)
    usable(dist)
