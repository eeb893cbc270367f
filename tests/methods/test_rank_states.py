"""What each rank keeps for itself goes into checkpoints, and back, one rank at a time."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hvdtrain import Backend
from hvdtrain.backends import ddp_compression
from hvdtrain.optim.model_sync import broadcast_tree
from hvdtrain.system.trees import map_tree
from hvdtrain.training import checkpoint, checkpointer, loop_checkpoints
from hvdtrain.training.metrics import fingerprint
from tests.methods import data_runs
from tests.methods.arms import SEVERAL, on
from tests.parity.interruption import train_with
from tests.ranks import Ranks
from tests.runs import newest, whole_and_rest


class Counted:
    """Counts, in a block, the trees of other ranks that this rank holds at a time."""

    def __init__(self) -> None:
        self.most = 0
        self._alive: set[int] = set()
        self._real = broadcast_tree

    def __call__(self, backend: Backend, tree: Any, root: int = 0) -> Any:
        number = max(self._alive, default=0) + 1
        received = self._real(backend, tree, root)
        tensors: list[Tensor] = []
        map_tree(tensors.append, Tensor, received)
        if tensors and backend.world.rank != root:
            self._alive.add(number)
            weakref.finalize(tensors[0], self._alive.discard, number)
            self.most = max(self.most, len(self._alive))
        return received


OWN = "buffers of each rank"


def held_at_a_time(backend: Backend, /, folder: Path) -> tuple[int, int, str]:
    """Save, and resume; return the most trees of others while saving, and while resuming."""
    saving, resuming = Counted(), Counted()
    with mock.patch.object(checkpointer, "broadcast_tree", saving):
        train_with(backend, folder, OWN, stop_at=7)
    with mock.patch.object(loop_checkpoints, "broadcast_tree", resuming):
        digest = train_with(backend, folder, OWN, resume="must")["digest"]
    return saving.most, resuming.most, digest


@on(("ddp-torchrun", 3))
def test_a_rank_holds_one_other_rank_s_state_at_a_time(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks.run(train_with, tmp_path / "whole", OWN)[0]["digest"]
    for saving, resuming, digest in ranks.run(held_at_a_time, tmp_path / "parts"):
        assert (saving, digest) == (1, whole)
        assert resuming <= 3  # what it keeps for good is the optimizer's state, and its own
    parts = checkpoint.part_names(newest(tmp_path / "parts"))
    assert {f"rank-{rank}" for rank in range(3)} <= set(parts)


def test_powersgd_s_errors_are_where_the_gradients_are() -> None:
    names = ("errors", "factors", "products")
    hook = ddp_compression.PowerSGD(torch.device("meta"))
    hook.load_state_dict({"steps": 3, **dict.fromkeys(names, {0: torch.ones(2)})})
    assert {hook.state_dict()[name][0].device.type for name in names} == {"meta"}


@SEVERAL
def test_each_rank_resumes_with_its_own_buffers(ranks: Ranks, tmp_path: Path) -> None:
    task = (data_runs.Regression(8 * ranks.n, conv=True),)
    whole, rest = whole_and_rest(ranks, data_runs.train, tmp_path, 3, task=task, buffers="local")
    for one, other in zip(whole, rest, strict=True):
        assert fingerprint(one["buffers"]) == fingerprint(other["buffers"])
    means = {tuple(one["buffers"]["2.running_mean"].tolist()) for one in whole}
    assert len(means) == ranks.n, "the ranks' statistics are equal, so that this tests nothing"
