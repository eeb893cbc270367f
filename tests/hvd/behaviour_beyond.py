"""What only ours does: see behaviour.py. Each reason is a row of the compatibility table."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from tests.hvd.behaviour import Hvd, averaged, case, mine, raises, same


@case(stronger="uint64")
def unsigned_numbers_from_2_to_63(hvd: Hvd) -> None:
    """They are not negative: in a small tensor, which travels with its request, and in a large."""
    n = hvd.size()
    top = [2**63 + 4096 * r for r in range(n)]
    for repeats in (1, 20_000):

        def found(repeats: int = repeats, **options: Any) -> list[int]:
            values = [top[hvd.rank()], hvd.rank() + 1]
            tensor = torch.tensor(values, dtype=torch.uint64).repeat(repeats)
            result = hvd.allreduce(tensor, name=f"u{repeats}", **options)
            assert torch.equal(result, result[:2].repeat(repeats))
            return result[:2].tolist()  # type: ignore[no-any-return]

        assert found(op=hvd.Min) == [top[0], 1]
        assert found(op=hvd.Max) == [top[-1], n]
        assert found(op=hvd.Sum) == [sum(top) % 2**64, n * (n + 1) // 2]
        assert found() == [2**63 + 2048 * (n - 1), (n + 1) // 2]
        assert found(op=hvd.Max, postscale_factor=0.5) == [top[-1] // 2, n // 2]


@case(stronger="another default device is the caller's matter")
def another_default_device(hvd: Hvd) -> None:
    tensor, parameter = mine(hvd, 100_000), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1 + hvd.rank(), momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = torch.full((2,), 1.0 + hvd.rank())
    with torch.device("meta"):
        assert hvd.broadcast_object({"rank": hvd.rank()}, 1) == {"rank": 1}
        assert hvd.allgather_object("x" * hvd.rank()) == ["x" * r for r in range(hvd.size())]
        hvd.broadcast_optimizer_state(optimizer, 0)
        hvd.allreduce_(tensor, name="x")
    assert optimizer.param_groups[0]["lr"] == 0.1
    same(optimizer.state[parameter]["momentum_buffer"], torch.ones(2))
    same(tensor, averaged(hvd, 100_000))


def bfloat16_is_rounded_once(hvd: Hvd) -> None:
    """The coordinator reduces small tensors, a transport large ones: with the same bits.

    In float32 these sums are exact, in any order.
    """
    n, numel = hvd.size(), 60_000

    def of(rank: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(rank)
        whole = torch.randint(0, 256, (numel,), generator=dice)
        return (whole * 2.0 ** -torch.randint(0, 9, (numel,), generator=dice)).bfloat16()

    exact = sum((of(rank).float() for rank in range(n)), torch.zeros(numel))
    for op, factor, expected in (
        (hvd.Sum, 1.0, exact),
        (hvd.Average, 1.0, exact * torch.tensor(1 / n)),
        (hvd.Sum, 0.25, exact * 0.25),
        (hvd.Sum, 0.3, exact * torch.tensor(0.3)),
    ):
        large = hvd.allreduce(of(hvd.rank()), name="large", op=op, postscale_factor=factor)
        small = [
            hvd.allreduce(t, name=f"small.{i}", op=op, postscale_factor=factor)
            for i, t in enumerate(torch.split(of(hvd.rank()), 6_000))
        ]
        assert large.dtype == torch.bfloat16
        assert torch.equal(large, expected.bfloat16()), (op, factor)
        assert torch.equal(torch.cat(small), large), (op, factor)
    scattered = hvd.reducescatter(of(hvd.rank()), name="scattered", op=hvd.Sum)
    mine = exact.bfloat16()[hvd.rank() * (numel // n) :][: numel // n]
    assert torch.equal(scattered, mine)


# Over shm, and over Gloo. With two ranks no sum is rounded twice.
for _arm in ("hvd-torchrun", "hvd-mpirun"):
    case(stronger="Horovod has no bfloat16", sizes=(3,), arms=[_arm])(bfloat16_is_rounded_once)


@case(stronger="a call that fails on one rank only leaves unnamed operations in step")
def unnamed_after_a_failed_call(hvd: Hvd) -> None:
    if hvd.rank() == 0:
        for _ in range(2):
            with raises(ValueError):
                hvd.broadcast(torch.ones(2), -1)
        with raises(ValueError):
            hvd.alltoall(torch.ones(2), [7] * hvd.size())
    x = mine(hvd, 2).requires_grad_()
    hvd.allgather(x).sum().backward()
    same(x.grad, torch.ones(2))


@case(stronger="named operations do not count: ranks may make different numbers of them")
def unnamed_among_uneven_named_ones(hvd: Hvd) -> None:
    process_set = hvd.add_process_set([0])
    if process_set.included():
        for i in range(3):
            hvd.allreduce(torch.ones(2), name=f"own{i}", process_set=process_set)
            hvd.allreduce(torch.ones(2), process_set=process_set)
    hvd.remove_process_set(process_set)


@case(stronger="backward takes its name from forward, so its order may differ between ranks")
def backward_in_different_orders(hvd: Hvd) -> None:
    for names in (("a", "b", "c"), (None, None, None)):
        xs = [mine(hvd, i + 2).requires_grad_() for i in range(3)]
        ys = [hvd.allreduce(x, name=name, op=hvd.Sum) for x, name in zip(xs, names, strict=True)]
        backwards = [
            threading.Thread(target=y.backward, args=(torch.full_like(y, i + 1.0),))
            for i, y in enumerate(ys)
        ]
        for thread in backwards if hvd.rank() else reversed(backwards):
            thread.start()
            time.sleep(0.01)
        for i, thread in enumerate(backwards):
            thread.join(60)
            same(xs[i].grad, torch.full((i + 2,), (i + 1.0) * hvd.size()))


@case(stronger="half is summed in single precision, in which the average fits")
def half_does_not_overflow_in_an_average(hvd: Hvd) -> None:
    tensor = torch.full((2,), 60000.0, dtype=torch.float16)
    assert hvd.allreduce(tensor, name="x").tolist() == [60000.0, 60000.0]
