"""One rank of a job of its own, on a transport: see jobs.py.

`python -m tests.transports.lifecycle TRANSPORT SCENARIO FOLDER ARGUMENTS` leaves an answer, JSON,
in the folder.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.transports import rendezvous_by_launcher
from tests.launching import wait_until
from tests.transports.collectives import TABLE, operations
from tests.transports.collectives.operations import Call
from tests.transports.collectives.table import add_up, rank_and_size
from tests.transports.jobs import Answer, write_answer

TIMEOUT_S = float(os.environ.get("TEST_TIMEOUT_S", "300"))  # longer than a test may take
MIB = 1 << 18  # floats


def held() -> dict[str, int]:
    """What this process holds of the system."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),
        "mib": int(Path("/proc/self/statm").read_text().split()[1]) >> 8,  # resident pages
    }


def groups_and_temporaries(folder: Path) -> Answer:
    """What this process holds before and after many groups, and tensors that are reduced once,
    twice or three times; but for the first ones.
    """
    before = {}
    for number in range(55):
        if number == 5:
            before = held()
        group = dist.new_group()
        for turns, where in ((1, None), (2, None), (3, None), (3, group)):
            t = torch.empty(2 * MIB + number)
            for _ in range(turns):
                add_up(dist, t, where)
        dist.destroy_process_group(group)
    return {"before": before, "after": held()}


def groups_again(folder: Path, late: int) -> Answer:
    """Groups that are destroyed and made again, with the same names; one rank is late."""
    rank, name = dist.get_rank(), dist.get_backend()
    for number in range(9):
        group: Any = None
        if number % 3 < 2:
            group = dist.new_group([0, 1], use_local_synchronization=True)  # named by its ranks
        add_up(dist, torch.empty(4), group)
        dist.destroy_process_group(group)
        mark = folder / f"destroyed-{number}"
        if rank == late:  # it goes on as the other one makes the next group
            wait_until(mark.exists, mark.name)
            time.sleep(0.3)
        else:
            mark.touch()
        if group is None:
            dist.init_process_group(name, timeout=timedelta(seconds=20))
    add_up(dist, torch.empty(4))
    return {}


def small_memory(folder: Path) -> Answer:
    """/dev/shm is too small for what would be moved there."""
    for _ in range(3):
        tensors = [torch.empty(2 * MIB) for _ in range(3)]
        for _ in range(3):
            for t in tensors:
                add_up(dist, t)
    return {"moved": any(t.untyped_storage().is_shared() for t in tensors)}


def no_access(folder: Path) -> Answer:
    """The kernel lets no rank see the descriptors of the others, as of another user's."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, rights) == 0
    rights[0] &= ~(1 << 19)  # CAP_SYS_PTRACE, of root
    assert libc.capset(header, rights) == 0
    assert libc.prctl(4, 0) == 0  # PR_SET_DUMPABLE
    dist.barrier()
    add_up(dist, torch.empty(4), dist.new_group())
    return {}


def mixed(folder: Path) -> Answer:
    """Whether this rank meets the others in C, where not all can."""
    t = torch.ones(5)
    dist.all_reduce(t)
    assert t.eq(dist.get_world_size()).all()
    world: Any = dist.group.WORLD
    return {"in C": world.transport._barrier.page is not None}


def table(folder: Path) -> Answer:
    """All of collectives/, but what is of one host's memory."""
    # What holds at three ranks holds at more.
    rows = [row for row in TABLE if row.holds_on("shm", min(dist.get_world_size(), 3))]
    assert rows
    for row in rows:
        if row.shm_only:
            continue
        row.function(dist)
        # A rank ahead sends what a row before, which receives from anybody, would take for its own.
        dist.barrier()
    world: Any = dist.group.WORLD
    return {"hosts": world.transport.hosts.ranks}


def leaves_mpi_after_each(folder: Path) -> Answer:
    """Every operation, after which no rank calls MPI until all have told the store that they are
    done. Rank 0 is late, or rank 1, or neither. The last operation is the last before `close`.
    """
    me, n = rank_and_size(dist)
    store: Any = dist.distributed_c10d._get_default_store()
    numbers = itertools.count()

    def meet() -> None:
        name = f"done {next(numbers)}"
        store.set(f"{name}/{me}", "")
        store.wait([f"{name}/{r}" for r in range(n)])

    def barrier(call: Call) -> Iterator[Any]:
        yield dist.barrier()

    every: list[operations.Operation] = [*operations.ROOTED, operations.all_reduce]
    every += [operations.all_gather_into_tensor, operations.reduce_scatter_tensor]
    every += [operations.all_to_all_single, barrier]
    # In the header; up to Open MPI's eager limit between hosts, 64 KB, and above; in many pieces.
    counts = [kb << 8 for kb in (1, 60, 64, 65, 72, 96, 192, 1_000, 10_000)]
    for operation, count, root, late in itertools.product(every, counts, range(2), range(3)):
        if me == late:
            time.sleep(0.002)
        operations.complete(operation(Call(dist, count, root=root)))
        meet()
    operations.complete(operations.all_reduce(Call(dist, 18_432, is_async=True)))
    dist.destroy_process_group()
    meet()
    return {}


def open_group(transport: str) -> None:
    """Open the default group; once all ranks are here, its operations may take TIMEOUT_S."""
    rendezvous_by_launcher()
    dist.init_process_group(transport, timeout=timedelta(seconds=60))  # imports take their time
    dist.barrier()
    world: Any = dist.group.WORLD
    world.set_timeout(timedelta(seconds=TIMEOUT_S))


def main() -> None:
    transport, scenario, folder, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    open_group(transport)
    rank = dist.get_rank()
    answer = globals()[scenario](Path(folder), *map(int, arguments))
    write_answer(Path(folder), rank, answer)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
