"""Process sets; see behaviour.py."""

from __future__ import annotations

import gc

import torch

from tests.hvd.behaviour import (
    Hvd,
    added,
    averaged,
    case,
    fails,
    mine,
    open_resources,
    raises,
    same,
)
from tests.launching import wait_until


@case()
def the_global_one(hvd: Hvd) -> None:
    everyone = hvd.global_process_set
    assert everyone.process_set_id == 0
    assert everyone.ranks == list(range(hvd.size()))
    assert everyone.size() == hvd.size()
    assert everyone.rank() == hvd.rank()
    assert everyone.included() is True
    assert hvd.remove_process_set(everyone) is False


@case(arms=["hvd-"])
def removed_sets_leave_nothing(hvd: Hvd) -> None:
    """The real one leaves nothing either, but hangs in such a loop."""

    for _ in range(2):  # by a transport; the second looks at the threads of the first
        hvd.allreduce(torch.ones(100_000), name="warm")
    gc.collect()
    before = open_resources()
    for _ in range(4):
        with added(hvd, *range(hvd.size() - 1)) as process_set:
            if process_set.included():
                hvd.allreduce(torch.ones(100_000), name="big", process_set=process_set)
    gc.collect()
    # The engine closes connections in its own time.
    wait_until(
        lambda: all(n <= before[kind] for kind, n in open_resources().items()),
        f"no more than {before}",
    )


@case()
def added_and_removed(hvd: Hvd) -> None:
    new = hvd.ProcessSet([1, 0])
    assert (new.process_set_id, new.ranks, new.size(), new.rank()) == (None, [0, 1], None, None)
    assert new.included() is (hvd.rank() < 2)
    assert hvd.remove_process_set(new) is False
    assert hvd.ProcessSet([0]) != hvd.ProcessSet([0])
    for given in (hvd.ProcessSet([0]), [1], range(1)):
        process_set = hvd.add_process_set(given)
        number, (member,) = process_set.process_set_id, process_set.ranks
        assert type(number) is int
        assert number >= 1
        assert given is process_set or [member] == list(given)
        text = f"ProcessSet(process_set_id={number}, ranks=[{member}], mpi_comm=None)"
        assert str(process_set) == text
        included = hvd.rank() == member
        assert (process_set.size(), process_set.included()) == (1, included)
        if included:
            assert process_set.rank() == 0
        else:
            with raises(ValueError, "Process is not part of provided process set."):
                process_set.rank()
        assert hvd.remove_process_set(process_set) is True
        assert (process_set.process_set_id, process_set.size()) == (None, None)
        assert hvd.remove_process_set(process_set) is False


@case()
def duplicates_are_refused(hvd: Hvd) -> None:
    with raises(ValueError, "Attempted to add a duplicate process set: "):
        hvd.add_process_set(list(range(hvd.size())))
    with added(hvd, 0):
        with raises(ValueError, "Attempted to add a duplicate process set: "):
            hvd.add_process_set([0])


@case(sizes=(3,))
def errors_stay_in_the_set(hvd: Hvd) -> None:
    with added(hvd, 1, 2) as some:
        handle = hvd.allreduce_async(mine(hvd, 2), name="x")
        if some.included():
            with fails(hvd, "Mismatched ALLREDUCE tensor shapes"):
                hvd.allreduce(mine(hvd, hvd.rank() + 1), name="x", process_set=some)
        same(hvd.synchronize(handle), averaged(hvd, 2))
