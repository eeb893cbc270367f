"""One rank of a job of its own, on a transport: see jobs.py.

`python -m tests.transports.lifecycle TRANSPORT SCENARIO FOLDER ARGUMENTS` leaves an answer, JSON,
in the folder.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hvdtrain.transports import rendezvous_by_launcher

Answer = dict[str, Any]
TIMEOUT_S = float(os.environ.get("TEST_TIMEOUT_S", "300"))  # longer than a test may take
MIB = 1 << 18  # floats


def held() -> dict[str, int]:
    """What this process holds of the system."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),
        "mib": int(resident.split()[1]) >> 10,
    }


def many_groups(folder: Path) -> Answer:
    def one() -> None:
        group = dist.new_group()
        t = torch.ones(2 * MIB)
        for _ in range(3):
            dist.all_reduce(t, group=group, async_op=True).wait()
        dist.destroy_process_group(group)

    for _ in range(5):
        one()
    dist.barrier()
    before = held()
    for _ in range(50):
        one()
    dist.barrier()
    return {"before": before, "after": held()}


def groups_again(folder: Path, late: int) -> Answer:
    """Groups that are destroyed and made again, with the same names; one rank is late."""
    name, me = dist.get_backend(), dist.get_rank()

    def destroy(number: int, *group: Any) -> None:
        """Destroy a group; return as the other rank, which is not late, makes the next one."""
        dist.destroy_process_group(*group)
        mark = folder / f"destroyed-{number}"
        if me != late:
            mark.touch()
            return
        deadline = time.monotonic() + 60
        while not mark.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.3)

    def add(*group: Any) -> None:
        t = torch.ones(4)
        dist.all_reduce(t, *([dist.ReduceOp.SUM, *group] if group else []))
        assert t.eq(2).all()

    for number in range(0, 9, 3):
        for again in range(2):
            group = dist.new_group([0, 1], use_local_synchronization=True)  # named by its ranks
            add(group)
            destroy(number + again, group)
        destroy(number + 2)
        dist.init_process_group(name, timeout=timedelta(seconds=20))
        add()
    return {"ended": True}


def many_temporaries(folder: Path, count: int) -> Answer:
    """Of 2 MiB; some are reduced once, some twice or three times."""
    before: dict[str, int] = {}
    n = dist.get_world_size()
    for k in range(count):
        if k == min(200, count // 4):
            before = held()
        t = torch.ones(512 * 1024 + k % 97)
        for again in range(1 + k % 3):
            dist.all_reduce(t)
            assert t[-1] == n ** (again + 1)
    return {"before": before, "after": held()}


def small_memory(folder: Path) -> Answer:
    """/dev/shm is too small for what would be moved there."""
    n = dist.get_world_size()
    for _ in range(3):
        tensors = [torch.empty(2 * MIB) for _ in range(3)]
        for _ in range(3):
            for t in tensors:
                dist.all_reduce(t.fill_(1))
                assert t.eq(n).all()
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
    group = dist.new_group()
    t = torch.ones(4)
    dist.all_reduce(t, group=group)
    return {"sum": t.tolist()}


def table(folder: Path) -> Answer:
    """All of collectives/, but what is of one host's memory."""
    from tests.transports.collectives import TABLE

    failed = {}
    # What holds at three ranks holds at more.
    rows = [row for row in TABLE if row.holds_on("shm", min(dist.get_world_size(), 3))]
    assert rows
    for row in rows:
        if row.shm_only:
            continue
        try:
            row.function(dist)
        except Exception:
            failed[row.name] = traceback.format_exc()
        # A rank ahead sends what a row before, which receives from anybody, would take for its own.
        dist.barrier()
    world: Any = dist.group.WORLD
    return {"failed": failed, "hosts": world.transport.hosts}


def leaves_mpi_after_each(folder: Path) -> Answer:
    """Every operation, after which no rank calls MPI until all have told the store that they are
    done. Rank 0 is late, or rank 1, or neither. The last operation is the last before `close`.
    """
    me, n = dist.get_rank(), dist.get_world_size()
    store: Any = dist.distributed_c10d._get_default_store()
    numbers = itertools.count()

    def filled(shape: Any, value: float) -> torch.Tensor:
        return torch.empty(shape).fill_(value)

    def meet() -> None:
        name = f"done {next(numbers)}"
        store.set(f"{name}/{me}", "")
        store.wait([f"{name}/{r}" for r in range(n)])

    def send(count: int, root: int) -> None:
        t = filled(count, me)
        if me == root:
            dist.send(t, 1 - root)
        else:
            dist.recv(t, root)
        assert t.eq(root).all()

    def broadcast(count: int, root: int) -> None:
        t = filled(count, me)
        dist.broadcast(t, root)
        assert t.eq(root).all()

    def scatter(count: int, root: int) -> None:
        t = torch.empty(count)
        parts = [filled(count, r) for r in range(n)]
        dist.scatter(t, parts if me == root else None, root)
        assert t.eq(me).all()

    def gather(count: int, root: int) -> None:
        parts = [torch.empty(count) for _ in range(n)] if me == root else None
        dist.gather(filled(count, me), parts, root)
        assert all(part.eq(r).all() for r, part in enumerate(parts or []))

    def all_reduce(count: int, root: int) -> None:
        t = filled(count, me)
        dist.all_reduce(t)
        assert t.eq(n * (n - 1) / 2).all()

    def reduce(count: int, root: int) -> None:
        t = filled(count, me)
        dist.reduce(t, root)
        assert me != root or t.eq(n * (n - 1) / 2).all()

    def all_gather(count: int, root: int) -> None:
        out = torch.empty(n, count)
        dist.all_gather_into_tensor(out, filled(count, me))
        assert all(out[r].eq(r).all() for r in range(n))

    def reduce_scatter(count: int, root: int) -> None:
        t = torch.empty(count)
        dist.reduce_scatter_tensor(t, filled(n * count, me))
        assert t.eq(n * (n - 1) / 2).all()

    def all_to_all(count: int, root: int) -> None:
        out = torch.empty(n, count)
        dist.all_to_all_single(out, filled((n, count), me))
        assert all(out[r].eq(r).all() for r in range(n))

    def one_way(count: int, root: int) -> None:
        """An all_to_all in which the root alone sends."""
        sent, received = [0] * n, [count * (r == root != me) for r in range(n)]
        sent[1 - root] = count * (me == root)
        out = torch.empty(sum(received))
        dist.all_to_all_single(out, filled(sum(sent), me), received, sent)
        assert out.eq(root).all()

    def barrier(count: int, root: int) -> None:
        dist.barrier()

    operations = [
        broadcast,
        scatter,
        gather,
        send,
        reduce,
        all_reduce,
        all_gather,
        reduce_scatter,
        all_to_all,
        one_way,
        barrier,
    ]
    # In the header; up to Open MPI's eager limit between hosts, 64 KB, and above; in many pieces.
    counts = [kb << 8 for kb in (1, 60, 64, 65, 72, 96, 192, 1_000, 10_000)]
    for operation, count, root, late in itertools.product(operations, counts, range(2), range(3)):
        if me == late:
            time.sleep(0.002)
        try:
            operation(count, root)
        except RuntimeError as error:
            about = f"{operation.__name__} of {count << 2} bytes, root {root}, rank {late} late"
            raise AssertionError(about) from error
        meet()
    work = dist.all_reduce(torch.ones(18_432), async_op=True)
    assert work is not None
    work.wait()
    dist.destroy_process_group()
    meet()
    return {}


def main() -> None:
    transport, scenario, folder, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    rendezvous_by_launcher()
    dist.init_process_group(transport, timeout=timedelta(seconds=60))  # imports take their time
    dist.barrier()
    world: Any = dist.group.WORLD
    world.set_timeout(timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    values = [int(a) if a.isdigit() else a for a in arguments]
    answer = globals()[scenario](Path(folder), *values)
    said = Path(folder) / f"answer-{rank}.partial"
    said.write_text(json.dumps(answer))
    said.rename(said.with_suffix(".json"))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
