"""Process sets; see behaviour.py."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.hvd.behaviour import (
    Hvd,
    align_handles,
    case,
    data,
    everyones,
    fails,
    mean,
    mine,
    raises,
    same,
    total,
)
from tests.launching import wait_until

NOT_MEMBER = "Rank {} is not a member of the provided process set."


@contextlib.contextmanager
def added(hvd: Hvd, *members: int) -> Iterator[Hvd]:
    """A process set for a while."""
    process_set = hvd.add_process_set(list(members))
    yield process_set
    assert hvd.remove_process_set(process_set)


@case()
def the_global_one(hvd: Hvd) -> None:
    everyone = hvd.global_process_set
    assert everyone.process_set_id == 0
    assert everyone.ranks == list(range(hvd.size()))
    assert everyone.size() == hvd.size()
    assert everyone.rank() == hvd.rank()
    assert everyone.included() is True
    same(hvd.allreduce(mine(hvd, 2), process_set=everyone), mean(everyones(hvd, 2)))


@case(arms=["hvd-"])
def removed_sets_leave_nothing(hvd: Hvd) -> None:
    """The real one leaves nothing either, but hangs in such a loop."""

    def held() -> dict[str, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().splitlines()
        counts = {kind: len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")}
        return {**counts, "memfd": sum("/memfd:" in line for line in maps)}

    for _ in range(2):  # by a transport; the second looks at the threads of the first
        hvd.allreduce(torch.ones(100_000), name="warm")
    before = held()
    for _ in range(4):
        with added(hvd, *range(hvd.size() - 1)) as process_set:
            if process_set.included():
                hvd.allreduce(torch.ones(100_000), name="big", process_set=process_set)
    # The engine closes connections in its own time.
    wait_until(
        lambda: all(n <= before[kind] for kind, n in held().items()), f"no more than {before}"
    )


@case()
def added_and_removed(hvd: Hvd) -> None:
    new = hvd.ProcessSet([1, 0])
    assert (new.process_set_id, new.ranks, new.size(), new.rank()) == (None, [0, 1], None, None)
    assert new.included() is (hvd.rank() < 2)
    assert hvd.ProcessSet([0]) != hvd.ProcessSet([0])
    for given in (hvd.ProcessSet([0]), [1], range(1)):
        process_set = hvd.add_process_set(given)
        number = process_set.process_set_id
        assert type(number) is int
        assert number >= 1
        assert given is process_set or process_set.ranks == list(given)
        assert process_set.size() == 1
        included = hvd.rank() == process_set.ranks[0]
        assert process_set.included() is included
        if included:
            assert process_set.rank() == 0
        else:
            with raises(ValueError, "Process is not part of provided process set."):
                process_set.rank()
        ranks = process_set.ranks
        assert str(process_set) == (
            f"ProcessSet(process_set_id={number}, ranks={ranks}, mpi_comm=None)"
        )
        assert hvd.remove_process_set(process_set) is True
        assert process_set.process_set_id is None
        assert process_set.size() is None
        assert hvd.remove_process_set(process_set) is False


@case()
def duplicates_are_refused(hvd: Hvd) -> None:
    with raises(ValueError, "Attempted to add a duplicate process set: "):
        hvd.add_process_set(list(range(hvd.size())))
    with added(hvd, 0):
        with raises(ValueError, "Attempted to add a duplicate process set: "):
            hvd.add_process_set([0])


@case()
def what_cannot_be_removed(hvd: Hvd) -> None:
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.remove_process_set(hvd.ProcessSet([0])) is False
    assert hvd.global_process_set.process_set_id == 0


@case(uneven=True)
def every_operation_among_members(hvd: Hvd) -> None:
    n = hvd.size()
    for members in ([n - 1], [0, n - 1], [n - 2, n - 1]):
        if len(members) == n:
            continue
        align_handles(hvd)
        with added(hvd, *members) as some:
            if some.included():
                _operations(hvd, some, members)


def _operations(hvd: Hvd, some: Hvd, members: list[int]) -> None:
    m, me = len(members), members.index(hvd.rank())
    inputs = [data(r, 3) for r in members]
    same(hvd.allreduce(mine(hvd, 3), name="x", process_set=some), mean(inputs))
    same(hvd.allreduce_(mine(hvd, 3), process_set=some), mean(inputs))
    got = hvd.grouped_allreduce([mine(hvd, 3)], name="x", op=hvd.Sum, process_set=some)
    same(got[0], total(inputs))
    rows = [data(r, r + 1) for r in members]
    same(hvd.allgather(mine(hvd, hvd.rank() + 1), name="x", process_set=some), torch.cat(rows))
    same(hvd.grouped_allgather([mine(hvd, 3)], process_set=some)[0], torch.cat(inputs))
    for root in members:
        same(hvd.broadcast(mine(hvd, 3), root, name="x", process_set=some), data(root, 3))
    got = hvd.alltoall(mine(hvd, m), name="x", process_set=some)
    same(got, torch.stack([data(r, m)[me] for r in members]))
    got, received = hvd.alltoall(mine(hvd, 2 * m), [2] * m, process_set=some)
    same(got, torch.cat([data(r, 2 * m)[2 * me : 2 * me + 2] for r in members]))
    assert received.tolist() == [2] * m
    got = hvd.reducescatter(mine(hvd, m, 2), name="x", process_set=some)
    same(got, mean([data(r, m, 2) for r in members])[me : me + 1])
    assert hvd.barrier(process_set=some) is None
    assert hvd.broadcast_object(hvd.rank(), members[-1], process_set=some) == members[-1]
    sparse = torch.sparse_coo_tensor(torch.tensor([[hvd.rank()]]), torch.ones(1), (4,))
    dense = hvd.sparse_allreduce_async(sparse, "s", hvd.Average, process_set=some)().to_dense()
    assert dense.tolist() == [1 / m if r in members else 0.0 for r in range(4)]


@case(uneven=True)
def gradients_among_members(hvd: Hvd) -> None:
    members = [hvd.size() - 2, hvd.size() - 1] if hvd.size() > 2 else [1]
    m = len(members)
    with added(hvd, *members) as some:
        if some.included():
            x = mine(hvd, 2).requires_grad_()
            y = hvd.allreduce(x, name="x", process_set=some)
            y.backward(torch.full((2,), hvd.rank() + 1.0))
            same(x.grad, torch.full((2,), sum(r + 1.0 for r in members) / m))
            x = mine(hvd, 2).requires_grad_()
            y = hvd.allgather(x, name="x", process_set=some)
            y.backward(torch.full((2 * m,), hvd.rank() + 1.0))
            same(x.grad, torch.full((2,), sum(r + 1.0 for r in members) / m))
            x = mine(hvd, 2 * m).requires_grad_()
            y = hvd.reducescatter(x, name="x", op=hvd.Sum, process_set=some)
            y.backward(torch.full((2,), hvd.rank() + 1.0))
            owners = torch.cat([torch.full((2,), r + 1.0) for r in members])
            same(x.grad, owners * m)


@case()
def others_are_refused(hvd: Hvd) -> None:
    with added(hvd, 0) as some:
        hvd.barrier()
        if hvd.rank() == 0:
            for call in _calls(hvd, some):
                call()
        else:
            for kind, call in zip(KINDS, _calls(hvd, some), strict=True):
                text = "" if kind == "Reducescatter" else f"{kind}: {NOT_MEMBER}"
                with raises(ValueError, text.format(hvd.rank())):
                    call()


KINDS = ("Allreduce", "Allreduce", "Allgather", "Reducescatter", "Alltoall", "Barrier")


def _calls(hvd: Hvd, some: Hvd) -> list[Hvd]:
    tensor = torch.ones(2)
    return [
        lambda: hvd.allreduce(tensor, name="x", process_set=some),
        lambda: hvd.grouped_allreduce([tensor], name="x", process_set=some),
        lambda: hvd.allgather(tensor, name="x", process_set=some),
        lambda: hvd.reducescatter(tensor, name="x", process_set=some),
        lambda: hvd.alltoall(tensor, name="x", process_set=some),
        lambda: hvd.barrier(process_set=some),
    ]


@case()
def roots_outside(hvd: Hvd) -> None:
    with added(hvd, 0) as some:
        with raises(ValueError, "invalid root rank 1" if hvd.rank() == 0 else ""):
            hvd.broadcast_async(torch.ones(2), 1, name="x", process_set=some)


def _unknown(hvd: Hvd) -> list[Hvd]:
    gone = hvd.add_process_set([0])
    hvd.remove_process_set(gone)
    return [gone, hvd.ProcessSet([0])]


@case(different="a set that is not registered is reported as such")
def removed_or_never_added(hvd: Hvd) -> None:
    text = "Allreduce: Process set provided does not exist, or has not been registered."
    for process_set in _unknown(hvd):
        with raises(ValueError, text):
            hvd.allreduce_async(torch.ones(2), name="x", process_set=process_set)


@case(uneven=True)
def one_name_in_two_sets_at_once(hvd: Hvd) -> None:
    rank = hvd.rank()
    with added(hvd, 0) as low, added(hvd, 1) as high:
        handles = [hvd.allreduce_async(mine(hvd, 2), name="x")] if rank else []
        for some in (low, high):
            if some.included():
                got = hvd.allreduce(mine(hvd, 2), name="x", process_set=some)
                same(got, mine(hvd, 2))
        if not rank:
            handles = [hvd.allreduce_async(mine(hvd, 2), name="x")]
        same(hvd.synchronize(handles[0]), mean(everyones(hvd, 2)))


@case(sizes=(3,), uneven=True)
def overlapping_sets_in_any_order(hvd: Hvd) -> None:
    pairs = list(itertools.combinations(range(3), 2))
    sets = [hvd.add_process_set(list(pair)) for pair in pairs]
    handles = []
    turned = range(3) if hvd.rank() % 2 else reversed(range(3))
    for i in turned:
        if sets[i].included():
            for name in ("x", "y"):
                handle = hvd.allreduce_async(
                    mine(hvd, 2), name=name, op=hvd.Sum, process_set=sets[i]
                )
                handles.append((i, handle))
    for i, handle in reversed(handles):
        same(hvd.synchronize(handle), total([data(r, 2) for r in pairs[i]]))
    for process_set in sets:
        assert hvd.remove_process_set(process_set)


@case(sizes=(3,), uneven=True)
def errors_stay_in_the_set(hvd: Hvd) -> None:
    with added(hvd, 1, 2) as some:
        handle = hvd.allreduce_async(mine(hvd, 2), name="x")
        if some.included():
            with fails(hvd, "Mismatched ALLREDUCE tensor shapes"):
                hvd.allreduce(mine(hvd, hvd.rank() + 1), name="x", process_set=some)
        same(hvd.synchronize(handle), mean(everyones(hvd, 2)))


@case()
def adasum_is_global(hvd: Hvd) -> None:
    with added(hvd, 0) as some:
        text = "Adasum does not support non-global process sets yet."
        with raises(NotImplementedError, text):
            hvd.allreduce(mine(hvd, 2), op=hvd.Adasum, process_set=some)
