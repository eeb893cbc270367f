"""What all operations share: names, order, handles, errors; see behaviour.py."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections.abc import Callable

import torch

from tests.hvd.behaviour import (
    DUPLICATE_NAME,
    Hvd,
    case,
    data,
    everyones,
    fails,
    last,
    mean,
    mine,
    raises,
    same,
    total,
)


def wait_for(hvd: Hvd, handle: int, limit_s: float = 10.0) -> None:
    """Wait by poll alone."""
    deadline = time.monotonic() + limit_s
    while not hvd.poll(handle):
        assert time.monotonic() < deadline, "poll never returned True"
        time.sleep(0.001)


@case()
def ranks_may_submit_in_different_orders(hvd: Hvd) -> None:
    names = [f"t{i}" for i in range(40)]
    order = random.Random(hvd.rank()).sample(range(40), 40)
    handles = {}
    for i in order:
        handles[i] = hvd.allreduce_async(mine(hvd, i % 7) + i, name=names[i], op=hvd.Sum)
    for i in reversed(range(40)):
        same(hvd.synchronize(handles[i]), total(everyones(hvd, i % 7)) + i * hvd.size())


@case()
def different_orders_of_different_operations(hvd: Hvd) -> None:
    n, rank = hvd.size(), hvd.rank()
    submits = {
        "allreduce": lambda: hvd.allreduce_async(mine(hvd, 3), name="x"),
        "allgather": lambda: hvd.allgather_async(mine(hvd, rank + 1), name="x"),
        "broadcast": lambda: hvd.broadcast_async(mine(hvd, 3), root_rank=n - 1, name="x"),
        "alltoall": lambda: hvd.alltoall_async(mine(hvd, n), name="x"),
        "reducescatter": lambda: hvd.reducescatter_async(mine(hvd, n), name="x"),
        "grouped": lambda: hvd.grouped_allreduce_async([mine(hvd, 2), mine(hvd, 1)], name="x"),
    }
    order = random.Random(rank + 10).sample(sorted(submits), len(submits))
    handles = {kind: submits[kind]() for kind in order}
    got = {kind: hvd.synchronize(handles[kind]) for kind in sorted(submits)}
    same(got["allreduce"], mean(everyones(hvd, 3)))
    same(got["allgather"], torch.cat([data(r, r + 1) for r in range(n)]))
    same(got["broadcast"], data(n - 1, 3))
    same(got["alltoall"][0], torch.stack([data(r, n)[rank] for r in range(n)]))
    same(got["reducescatter"], mean(everyones(hvd, n))[rank : rank + 1])
    same(got["grouped"][1], mean(everyones(hvd, 1)))


@case()
def one_name_serves_each_operation_at_once(hvd: Hvd) -> None:
    handles = [
        hvd.allreduce_async(mine(hvd, 2), name="one"),
        hvd.allgather_async(mine(hvd, 2), name="one"),
        hvd.broadcast_async(mine(hvd, 2), 0, name="one"),
        hvd.grouped_allreduce_async([mine(hvd, 2)], name="one"),
    ]
    got = [hvd.synchronize(handle) for handle in handles]
    same(got[0], mean(everyones(hvd, 2)))
    same(got[1], torch.cat(everyones(hvd, 2)))
    same(got[2], data(0, 2))
    same(got[3][0], mean(everyones(hvd, 2)))


@case()
def poll_is_truthful(hvd: Hvd) -> None:
    for late in range(hvd.size()):
        if hvd.rank() == late:
            hvd.barrier()  # the others have submitted, and looked
        handle = hvd.allreduce_async(mine(hvd, 2), name=f"x{late}")
        if hvd.rank() != late:
            time.sleep(0.02)
            assert hvd.poll(handle) is False
            hvd.barrier()
        wait_for(hvd, handle)
        assert hvd.poll(handle) is True
        same(hvd.synchronize(handle), mean(everyones(hvd, 2)))


@case()
def synchronize_waits_for_the_late(hvd: Hvd) -> None:
    for late in range(hvd.size()):
        if hvd.rank() == late:
            time.sleep(0.1)
        came = time.monotonic()  # one clock for the host
        same(hvd.allreduce(mine(hvd, 2), name="x"), mean(everyones(hvd, 2)))
        left = time.monotonic()
        assert left >= max(hvd.allgather_object(came, name=f"came{late}"))


@case()
def stale_handles(hvd: Hvd) -> None:
    handle = hvd.allreduce_async(mine(hvd, 2), name="x")
    assert hvd.synchronize(handle) is not None
    assert hvd.synchronize(handle) is None
    with raises(ValueError, f"Handle {handle} was not created or has been cleared."):
        hvd.poll(handle)
    assert hvd.synchronize(10**6) is None
    with raises(ValueError, "Handle 1000000 was not created or has been cleared."):
        hvd.poll(10**6)


@case()
def a_failed_handle_is_dropped(hvd: Hvd) -> None:
    handle = hvd.allreduce_async(mine(hvd, 3 if last(hvd) else 2), name="x")
    assert type(handle) is int
    wait_for(hvd, handle)
    with fails(hvd, "Mismatched ALLREDUCE tensor shapes"):
        hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None
    with raises(ValueError, "was not created or has been cleared."):
        hvd.poll(handle)


@case()
def synchronized_in_any_order(hvd: Hvd) -> None:
    handles = [hvd.allreduce_async(mine(hvd, i + 1), name=f"x{i}") for i in range(10)]
    for i in random.Random(hvd.rank()).sample(range(10), 10):
        same(hvd.synchronize(handles[i]), mean(everyones(hvd, i + 1)))


@case()
def inputs_are_kept_alive(hvd: Hvd) -> None:
    handles = []
    for i in range(20):
        handles.append(hvd.allreduce_async(mine(hvd, 1000) + i, name=f"x{i}", op=hvd.Sum))
        gc.collect(0)
        torch.full((1000,), -1.0)  # takes the memory of what has been let go
    for i, handle in enumerate(handles):
        same(hvd.synchronize(handle), total(everyones(hvd, 1000)) + i * hvd.size())


@case()
def many_in_flight(hvd: Hvd) -> None:
    dtypes = (torch.float32, torch.int64, torch.float16)
    handles = [
        hvd.allreduce_async_(mine(hvd, i % 11, dtype=dtypes[i % 3]), name=f"x{i}", op=hvd.Sum)
        for i in range(300)
    ]
    for i, handle in enumerate(handles):
        same(hvd.synchronize(handle), total(everyones(hvd, i % 11, dtype=dtypes[i % 3])))


@case()
def unnamed_operations_match_by_sequence(hvd: Hvd) -> None:
    n = hvd.size()
    handles = [
        hvd.allreduce_async(mine(hvd, 3), op=hvd.Sum),
        hvd.allgather_async(mine(hvd, 2)),
        hvd.broadcast_async(mine(hvd, 2), root_rank=n - 1),
        hvd.allreduce_async(mine(hvd, 4), op=hvd.Max),
    ]
    got = [hvd.synchronize(handle) for handle in handles]
    same(got[0], total(everyones(hvd, 3)))
    same(got[1], torch.cat(everyones(hvd, 2)))
    same(got[2], data(n - 1, 2))
    same(got[3], data(n - 1, 4))


@case()
def odd_names(hvd: Hvd) -> None:
    for name in ("", " ", "x" * 2000, "gewürz/ü.β", "a.b/c:0", "%s{}\n"):
        same(hvd.allreduce(mine(hvd, 2), name=name), mean(everyones(hvd, 2)))


def submits(hvd: Hvd) -> tuple[Callable[[str], int], ...]:
    """Every operation that has a name and a handle."""
    n = hvd.size()
    return (
        lambda name: hvd.allreduce_async(mine(hvd, 2), name=name),
        lambda name: hvd.allreduce_async_(mine(hvd, 2), name=name),
        lambda name: hvd.grouped_allreduce_async([mine(hvd, 2)], name=name),
        lambda name: hvd.grouped_allreduce_async_([mine(hvd, 2)], name=name),
        lambda name: hvd.allgather_async(mine(hvd, 2), name=name),
        lambda name: hvd.grouped_allgather_async([mine(hvd, 2)], name=name),
        lambda name: hvd.broadcast_async(mine(hvd, 2), root_rank=0, name=name),
        lambda name: hvd.broadcast_async_(mine(hvd, 2), root_rank=0, name=name),
        lambda name: hvd.alltoall_async(mine(hvd, n), name=name),
        lambda name: hvd.reducescatter_async(mine(hvd, n), name=name),
        lambda name: hvd.grouped_reducescatter_async([mine(hvd, n)], name=name),
    )


@case()
def duplicate_names(hvd: Hvd) -> None:
    """Rank 0 and the others each hold one operation that the other has not submitted yet."""
    first, second = ("p", "q") if hvd.rank() == 0 else ("q", "p")
    for submit in submits(hvd):
        pending = submit(first)
        with raises(ValueError, DUPLICATE_NAME):
            submit(first)
        hvd.barrier()
        for handle in (pending, submit(second)):
            assert hvd.synchronize(handle) is not None
        assert hvd.synchronize(submit(first if hvd.rank() == 0 else second)) is not None


@case(stronger="a name twice in a row is refused every time, however fast the first is done")
def duplicate_names_of_operations_that_are_done(hvd: Hvd) -> None:
    for submit in submits(hvd):
        for _ in range(3):
            hvd.barrier()  # all are here, so that the first is done at once
            pending = submit("x")
            with raises(ValueError, DUPLICATE_NAME):
                submit("x")
            assert hvd.synchronize(pending) is not None


@case()
def a_name_is_free_again_once_polled_or_after_a_cycle(hvd: Hvd) -> None:
    for submit in submits(hvd):
        handles = [submit("x")]
        wait_for(hvd, handles[0])
        handles.append(submit("x"))  # allowed: poll returned True for the first
        hvd.barrier()
        while True:  # nobody asks for the second one
            time.sleep(0.002)
            try:
                handles.append(submit("x"))
                break
            except ValueError:
                continue
        assert all(hvd.synchronize(handle) is not None for handle in handles)


@case()
def a_name_is_free_again_after_an_error(hvd: Hvd) -> None:
    for _ in range(3):
        with fails(hvd, "Mismatched"):
            hvd.allreduce(mine(hvd, 3 if last(hvd) else 2), name="x")
        same(hvd.allreduce(mine(hvd, 2), name="x"), mean(everyones(hvd, 2)))


@case()
def a_name_repeated_and_then_changed(hvd: Hvd) -> None:
    """Remembered metadata must not outlive a change of it, on all ranks or on one."""
    for _ in range(20):
        same(hvd.allreduce(mine(hvd, 2), name="x"), mean(everyones(hvd, 2)))
    same(hvd.allreduce(mine(hvd, 3), name="x"), mean(everyones(hvd, 3)))
    same(hvd.allreduce(mine(hvd, 3), name="x", op=hvd.Sum), total(everyones(hvd, 3)))
    dtype = torch.float64
    same(hvd.allreduce(mine(hvd, 3, dtype=dtype), name="x"), mean(everyones(hvd, 3, dtype=dtype)))
    for _ in range(3):
        got = hvd.allreduce(mine(hvd, 3), name="x", op=hvd.Sum, prescale_factor=2.0)
        same(got, total(everyones(hvd, 3)) * 2)
    with fails(hvd, "Mismatched"):
        hvd.allreduce(mine(hvd, 4 if last(hvd) else 3), name="x", op=hvd.Sum, prescale_factor=2.0)
    with fails(hvd, "Mismatched"):
        hvd.allreduce(mine(hvd, 4 if hvd.rank() == 0 else 3), name="x", op=hvd.Sum)
    same(hvd.allreduce(mine(hvd, 3), name="x"), mean(everyones(hvd, 3)))


@case()
def remembered_names_in_changing_orders(hvd: Hvd) -> None:
    for step in range(5):
        order = random.Random(step * 7 + hvd.rank()).sample(range(10), 10)
        handles = {i: hvd.allreduce_async(mine(hvd, i) + step, name=f"x{i}") for i in order}
        for i in order:
            same(hvd.synchronize(handles[i]), mean(everyones(hvd, i)) + step)


@case()
def more_names_than_are_remembered(hvd: Hvd) -> None:
    """Both sides remember 1024, and what one still does the other may have forgotten."""
    for step in range(3):
        handles = [
            hvd.allreduce_async(mine(hvd, 1) + step, name=f"{i}", op=hvd.Sum) for i in range(1100)
        ]
        expected = total(everyones(hvd, 1)) + step * hvd.size()
        for handle in handles:
            same(hvd.synchronize(handle), expected)


@case()
def an_error_leaves_others_in_flight_alone(hvd: Hvd) -> None:
    before = hvd.allreduce_async(mine(hvd, 2), name="before")
    bad = hvd.allreduce_async(mine(hvd, 3 if last(hvd) else 2), name="bad")
    after = hvd.allreduce_async(mine(hvd, 2), name="after it")
    with fails(hvd, "Mismatched"):
        hvd.synchronize(bad)
    same(hvd.synchronize(before), mean(everyones(hvd, 2)))
    same(hvd.synchronize(after), mean(everyones(hvd, 2)))


@case()
def an_error_leaves_an_operation_in_place_unchanged(hvd: Hvd) -> None:
    tensor = mine(hvd, 3 if last(hvd) else 2)
    before = tensor.clone()
    with fails(hvd, "Mismatched"):
        hvd.allreduce_(tensor, name="x")
    same(tensor, before)


@case()
def two_threads_submit(hvd: Hvd) -> None:
    got: dict[int, torch.Tensor] = {}

    def work(thread: int) -> None:
        for step in range(10):
            got[thread * 10 + step] = hvd.allreduce(mine(hvd, step + 1), name=f"{thread}.{step}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for i in range(20):
        same(got[i], mean(everyones(hvd, i % 10 + 1)))


@case()
def the_error_is_a_runtime_error(hvd: Hvd) -> None:
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    with contextlib.suppress(RuntimeError):
        hvd.allreduce(mine(hvd, 3 if last(hvd) else 2), name="x")
        raise AssertionError("no error")


@case(real="bfloat16, bool, complex and small integers are refused")
def refused_dtypes(hvd: Hvd) -> None:
    for dtype, name in ((torch.bfloat16, "BFloat16"), (torch.bool, "Bool"), (torch.uint8, "Byte")):
        with raises(ValueError, f"Tensor type torch.{name}Tensor is not supported."):
            hvd.allreduce(torch.ones(2, dtype=dtype), name="x")


@case(real="a tensor that is not contiguous is refused")
def refused_layouts(hvd: Hvd) -> None:
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with raises(ValueError, "Tensor is required to be contiguous."):
            call(torch.ones(2, 3).t(), name="x")
    channels_last = torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last)
    with raises(ValueError, "Tensor is required to be contiguous."):
        hvd.broadcast_(channels_last, 0, name="x")
