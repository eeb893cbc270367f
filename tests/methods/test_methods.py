"""The table of methods: each no says why; and what methods keep on each rank.

Each method trains and resumes in tests/parity.
"""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import hvdtrain
from hvdtrain import Backend
from hvdtrain.backends import ddp_compression
from hvdtrain.errors import InputError
from hvdtrain.optim.model_sync import broadcast_tree
from hvdtrain.system.trees import map_tree
from hvdtrain.training import checkpointer, loop_checkpoints, methods
from hvdtrain.training.config import TrainConfig
from tests.messages import Message
from tests.methods import arms
from tests.methods.arms import TWO, on
from tests.methods.manual_table import table
from tests.parity.interruption import train_with
from tests.ranks import Ranks
from tests.runs import saved_parts

REFUSED = [(method, backend) for method in methods.METHODS for backend in method.refused]


def chosen(method: methods.Method) -> TrainConfig:
    return TrainConfig(**arms.SETTINGS[method.name])


@pytest.mark.parametrize(
    ("method", "backend"), REFUSED, ids=lambda value: getattr(value, "name", value)
)
def test_a_refusal_says_why(method: methods.Method, backend: str, message: Message) -> None:
    with message.raises(InputError):
        methods.check(chosen(method), backend)


PAIRS = [
    (method, other)
    for method, other in itertools.permutations(methods.METHODS, 2)
    for need in method.needs
    if need in other.lacks
]


@pytest.mark.parametrize(("method", "other"), PAIRS, ids=lambda method: method.name)
def test_what_a_method_needs_and_another_lacks(
    method: methods.Method, other: methods.Method, message: Message
) -> None:
    config = TrainConfig(**{**arms.SETTINGS[method.name], **arms.SETTINGS[other.name]})
    with message.raises(InputError):
        methods.check(config, "ddp")


def test_the_manual_has_the_table() -> None:
    manual = (Path(hvdtrain.__file__).parents[1] / "docs" / "methods.md").read_text()
    assert table() in manual, "run: python -m tests.methods.manual_table"


@TWO
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("PowerSGD", "fp16 gradients", "resume   PowerSGD: the checkpoint's state is not used"),
        ("fp16 gradients", "PowerSGD", "PowerSGD: each rank starts without a state"),
        ("PowerSGD", "PowerSGD", ""),
    ],
)
def test_a_resumed_run_may_have_another_method(
    ranks: Ranks, before: str, after: str, said: str, tmp_path: Path
) -> None:
    ranks.run(train_with, tmp_path, before, stop_at=7)
    found = ranks.run(train_with, tmp_path, after, resume="must")[0]
    assert len(found["digest"]) == 64
    printed = "\n".join(found["lines"])
    assert said in printed
    assert said or "without a state" not in printed


@on(("ddp-torchrun", 1))
def test_one_rank_sends_nothing_and_rounds_nothing(ranks: Ranks, tmp_path: Path) -> None:
    digests = {
        ranks.run(train_with, tmp_path / kind, "plain", compression=kind, epochs=1)[0]["digest"]
        for kind in ("none", "fp16", "bf16", "powersgd")
    }
    assert len(digests) == 1


# What each rank keeps for itself


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


def held_at_a_time(backend: Backend, /, folder: Path) -> list[int]:
    """Save, and resume; return the most trees of others while saving, and while resuming."""
    most = []
    for module, part in ((checkpointer, {"stop_at": 7}), (loop_checkpoints, {"resume": "must"})):
        counted = Counted()
        with mock.patch.object(module, "broadcast_tree", counted):
            train_with(backend, folder, "buffers of each rank", **part)
        most.append(counted.most)
    return most


@on(("ddp-torchrun", 3))
def test_a_rank_holds_one_other_rank_s_state_at_a_time(ranks: Ranks, tmp_path: Path) -> None:
    for saving, resuming in ranks.run(held_at_a_time, tmp_path):
        assert saving == 1
        assert resuming <= 3  # what it keeps for good is the optimizer's state, and its own
    assert {f"rank-{rank}" for rank in range(3)} <= set(saved_parts(tmp_path))


def test_powersgd_s_errors_are_where_the_gradients_are() -> None:
    names = ("errors", "factors", "products")
    hook = ddp_compression.PowerSGD(torch.device("meta"))
    hook.load_state_dict({"steps": 3, **dict.fromkeys(names, {0: torch.ones(2)})})
    assert {hook.state_dict()[name][0].device.type for name in names} == {"meta"}
