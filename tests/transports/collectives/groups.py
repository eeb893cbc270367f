"""Groups of some ranks, and several at once."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from hvdtrain.transports import shm_sync
from tests.transports.collectives.operations import Call, all_reduce, complete, given, run_each
from tests.transports.collectives.table import Dist, add_up, case, rank_and_size, same, usable


@case(everywhere=True)
def groups_of_some_ranks(dist: Dist) -> None:
    """In an order of their own, too: a group numbers its ranks itself."""
    rank, n = rank_and_size(dist)
    for members in ([0, 1], [1, 0], [n - 1], [0, n - 1], [*range(n)][::-1]):
        group = dist.new_group(members, sort_ranks=False)
        if rank not in members:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert dist.get_rank(group) == members.index(rank)
        assert dist.get_backend(group) == dist.get_backend()
        for count in (3, 20_000):
            run_each(dist, count=count, group=group)
        usable(dist, group)
        dist.destroy_process_group(group)
    mesh = dist.init_device_mesh("cpu", (n, 1), mesh_dim_names=("rows", "columns"))
    for name in mesh.mesh_dim_names:
        usable(dist, mesh.get_group(name))
    usable(dist)


@case(shm_only=True)
def a_timeout_holds_between_hosts(dist: Dist) -> None:
    """Each rank is a host of its own here. Gloo between them must wait as long as `shm` does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shm_sync, "host_identity", lambda *parts: f"host {dist.get_rank()}")
        group = dist.new_group(timeout=timedelta(seconds=20))
    assert group.transport.hosts.ranks == [[r] for r in range(dist.get_world_size())]
    group.set_timeout(timedelta(hours=9))
    assert group.transport.timeout_s == 9 * 3600
    assert group.transport.hosts.channel.group.options._timeout == timedelta(hours=9)
    usable(dist, group)
    dist.destroy_process_group(group)


@case()
def groups_of_the_same_ranks_at_once(dist: Dist) -> None:
    several = [dist.new_group() for _ in range(3)]
    order = several if dist.get_rank() % 2 == 0 else several[::-1]
    for count in (50, 400_000):
        parts = dict(zip(several, torch.split(torch.empty(3 * count), count), strict=True))
        calls = [
            Call(dist, count, group=group, turns=4, is_async=True, layout=given(parts[group]))
            for group in order
        ]
        complete(*map(all_reduce, calls))
    for group in several:
        dist.destroy_process_group(group)


@case()
def one_tensor_in_two_groups(dist: Dist) -> None:
    n = dist.get_world_size()
    other, t = dist.new_group(), torch.empty(400_000)
    for turn in range(4):
        add_up(dist, t)
        dist.all_reduce(t, group=other)
        same(t, torch.full_like(t, n * n))
        if turn == 2:
            dist.destroy_process_group(other)
            other = dist.new_group()
    dist.destroy_process_group(other)
    add_up(dist, t)
