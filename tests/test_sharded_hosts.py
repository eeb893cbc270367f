"""The sharded step on several hosts, each of which has parameters of its own.

As test_sharded_optimizer.py, the ranks are threads; each has the letter of its host.
On hosts with sshd: tests/launch/test_hosts.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvdtrain.errors import InputError
from hvdtrain.optim.sharded_optimizer import shard
from hvdtrain.optim.shared_tensors import Group
from tests.test_sharded_optimizer import (
    Model,
    Threads,
    adamw,
    assert_same_bits,
    set_gradients,
    sharded,
    take_steps,
    write,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("hosts", ["aabb", "abb", "abab"])
def test_each_host_divides_the_whole_step(hosts: str) -> None:
    assert_same_bits(len(hosts), adamw, take_steps, hosts)


def test_memory_is_shared_within_a_host_alone() -> None:
    def rank(group: Group) -> tuple[float, int]:
        model, optimizer = sharded(group)
        take_steps(model, optimizer)
        group.all_gather_object(None)
        if group.rank == 0:
            with torch.no_grad():
                model.large.fill_(3.0)
        group.all_gather_object(None)
        for p in model.parameters():  # torch.save writes the whole storage
            assert p.untyped_storage().nbytes() == max(p.numel(), 1) * p.element_size()
        pieces = optimizer._sharding._pieces.values()
        return float(model.large.detach().mean()), sum(piece.numel() for piece, _, _ in pieces)

    found = Threads(4, "abab").run(rank)
    total = sum(p.numel() for p in Model().parameters())
    assert [mean == 3.0 for mean, _ in found] == [True, False, True, False]
    assert found[0][1] + found[2][1] == found[1][1] + found[3][1] == total
    assert max(num for _, num in found) < 0.55 * total


def test_hosts_that_differ_are_refused_on_all_ranks() -> None:
    def rank(group: Group) -> None:
        model: Any = Model()
        model.odd.data[5] += group.host == "b"
        optimizer = adamw(model)
        shard(optimizer, group, {p: name for name, p in model.named_parameters()})
        set_gradients(model, 0)
        optimizer.step()

    for error in Threads(4, "aabb").run(rank):
        assert type(error) is InputError
        assert "odd differs between rank 0 and rank 2; broadcast the parameters" in str(error)


def test_a_change_on_one_host_is_refused_on_all_ranks() -> None:
    def rank(group: Group) -> None:
        model, optimizer = sharded(group)
        take_steps(model, optimizer)
        if group.rank == 3:
            write(model.large)
        group.all_gather_object(None)
        set_gradients(model, 4)
        optimizer.step()

    for error in Threads(4, "aabb").run(rank):
        assert type(error) is InputError
        assert "large was changed outside step" in str(error)
