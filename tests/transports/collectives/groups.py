"""Groups of some ranks, and several at once."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from hvdtrain.transports import shm_sync
from tests.transports.collectives.table import Dist, case, same, usable


@case()
def groups(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    pair, last, everyone = (dist.new_group(ranks) for ranks in ([0, 1], [n - 1], range(n)))
    for count in (3, 20_000, 400_000):
        for _ in range(3):
            if rank < 2:
                t = torch.full((count,), rank + 1.0)
                dist.all_reduce(t, group=pair)
                same(t, torch.full((count,), 3.0))
                t = torch.full((count,), float(rank))
                dist.broadcast(t, 1, group=pair)
                same(t, torch.ones(count))
            if rank == n - 1:
                t = torch.ones(count)
                dist.all_reduce(t, group=last)
                dist.broadcast(t, rank, group=last)
                dist.barrier(group=last)
                same(t, torch.ones(count))
                out = torch.zeros(count)
                dist.all_gather_into_tensor(out, t, group=last)
                dist.reduce_scatter_tensor(out, t, group=last)
                dist.all_to_all_single(out, t, group=last)
                same(out, t)
            usable(dist, everyone)
    if rank < 2:
        parts = [torch.zeros(2) for _ in range(2)]
        dist.all_gather(parts, torch.full((2,), float(rank)), group=pair)
        same(parts[1], torch.ones(2))
        dist.destroy_process_group(pair)
    if rank == n - 1:
        dist.destroy_process_group(last)
    usable(dist, everyone)
    dist.destroy_process_group(everyone)
    usable(dist)


@case(shm_only=True)
def a_timeout_holds_between_hosts(dist: Dist) -> None:
    """Each rank is a host of its own here. Gloo between them must wait as long as `shm` does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shm_sync, "host_identity", lambda *parts: f"host {dist.get_rank()}")
        group = dist.new_group(timeout=timedelta(seconds=20))
    assert group.transport.hosts == [[r] for r in range(dist.get_world_size())]
    group.set_timeout(timedelta(hours=9))
    assert group.transport.timeout_s == 9 * 3600
    assert group.transport._cross_host_group.options._timeout == timedelta(hours=9)
    usable(dist, group)
    dist.destroy_process_group(group)


@case(sizes=(3,))
def a_group_numbers_its_ranks_itself(dist: Dist) -> None:
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    if rank not in (1, 2):
        assert pair is dist.GroupMember.NON_GROUP_MEMBER
        return
    assert dist.get_rank(pair) == rank - 1
    out = torch.zeros(4)
    dist.all_gather_into_tensor(out, torch.full((2,), float(rank)), group=pair)
    same(out, torch.tensor([1.0, 1, 2, 2]))
    t = torch.tensor([float(rank)])
    dist.broadcast(t, 2, group=pair)
    assert t == 2
    t = torch.tensor([float(rank)])
    dist.reduce(t, 1, group=pair)
    assert rank == 2 or t == 3
    if rank == 1:
        dist.send(torch.tensor([8.0]), 2, group=pair)
    else:
        dist.recv(t, 1, group=pair)
        assert t == 8
    dist.destroy_process_group(pair)


@case(sizes=(3,), everywhere=True)
def groups_in_an_order_of_their_own(dist: Dist) -> None:
    rank = dist.get_rank()
    for members in ([0, 2], [1, 2], [2, 1, 0], [1]):
        group = dist.new_group(members, sort_ranks=False)
        if rank not in members:
            continue
        assert dist.get_rank(group) == members.index(rank)
        t = torch.full((3000,), float(10**rank))
        dist.all_reduce(t, group=group)
        same(t, torch.full((3000,), float(sum(10**r for r in members))))
        t.fill_(rank)
        dist.broadcast(t, members[-1], group=group)
        same(t, torch.full((3000,), float(members[-1])))
        dist.destroy_process_group(group)
    dist.barrier()


@case()
def groups_of_the_same_ranks_at_once(dist: Dist) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    several = [dist.new_group() for _ in range(3)]
    order = several if rank % 2 == 0 else several[::-1]
    for count in (50, 400_000):
        base = torch.empty(3 * count)
        parts = dict(zip(several, torch.split(base, count), strict=True))
        for turn in range(4):
            base.fill_(turn + 1)
            works = [dist.all_reduce(parts[group], group=group, async_op=True) for group in order]
            for work in works:
                work.wait()
            same(base, torch.full((3 * count,), (turn + 1.0) * n))
    for group in several:
        dist.destroy_process_group(group)


@case()
def one_tensor_in_two_groups(dist: Dist) -> None:
    n = dist.get_world_size()
    other = dist.new_group()
    t = torch.empty(400_000)
    for turn in range(4):
        t.fill_(1)
        dist.all_reduce(t)
        dist.all_reduce(t, group=other)
        same(t, torch.full((400_000,), float(n * n)))
        if turn == 2:
            dist.destroy_process_group(other)
            other = dist.new_group()
    dist.destroy_process_group(other)
    t.fill_(1)
    dist.all_reduce(t)
    same(t, torch.full((400_000,), float(n)))


@case()
def a_mesh(dist: Dist) -> None:
    n = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (n, 1), mesh_dim_names=("rows", "columns"))
    usable(dist, mesh.get_group("rows"))
    usable(dist, mesh.get_group("columns"))
    dist.destroy_process_group(mesh.get_group("columns"))


@case()
def the_name_of_the_transport(dist: Dist) -> None:
    group = dist.new_group(timeout=timedelta(seconds=10))
    assert dist.get_backend(group) == dist.get_backend()
    assert dist.get_backend() in ("gloo", "shm", "mpi4py")
    dist.destroy_process_group(group)
