"""The coordinator alone, with messages in an order that sockets rarely deliver."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvdtrain.hvd.engine import eager
from hvdtrain.hvd.engine.coordinator import Coordinator
from hvdtrain.hvd.engine.request import AVERAGE, GLOBAL_SET, MIN, Key, Request
from hvdtrain.hvd.engine.timeline import Timeline

X = Key(GLOBAL_SET, "x")
PAIR = Request("allreduce", dtypes=("float32",), shapes=((2,),), op=AVERAGE)
ONE = PAIR._replace(shapes=((1,),))
LARGE = Request("broadcast", dtypes=("float32",), shapes=((100_000,),), root=0)
DATA = eager.pack([torch.ones(2)])


class Rank0(Coordinator):
    """A coordinator that records what it sends: ranks, header, payload."""

    def __init__(self, size: int, fusion_bytes: int = 0) -> None:
        self.sent: list[tuple[list[int], list[Any], bytes]] = []
        super().__init__(
            size, 8, fusion_bytes, lambda *sent: self.sent.append(sent), Timeline(None)
        )

    def deliver(self, rank: int, *header: Any, data: bytes = b"") -> None:
        self.receive(rank, list(header), data, 0.0)

    @property
    def answers(self) -> list[str]:
        return [header[0] for _, header, _ in self.sent]


@pytest.mark.parametrize(
    ("after", "effect"),
    [
        (["join"], None),
        (["op", Key(GLOBAL_SET, "set"), Request("remove_set", data=1)], None),
        (["leave", {}], "down"),
    ],
    ids=["join", "remove_set", "leave"],
)
def test_nothing_overtakes_a_resent_operation(after: list[Any], effect: str | None) -> None:
    rank0 = Rank0(2)
    for rank in (0, 1):
        rank0.deliver(rank, "op", X, PAIR, data=DATA)
    cache_id = rank0.sent[-1][1][3]
    rank0.deliver(0, "op", X, PAIR, data=DATA)
    rank0.deliver(1, "op", X, ONE, data=b"    ")
    assert rank0.answers[-1] == "error"  # and rank 0 has dropped `cache_id` from its cache

    rank0.deliver(0, "op", X, PAIR, data=DATA)
    rank0.deliver(1, "hit", cache_id, data=DATA)
    assert rank0.sent.pop()[1] == ["resend", cache_id]
    before = len(rank0.sent)
    rank0.deliver(1, *after)
    assert len(rank0.sent) == before, "the message overtook what rank 1 submitted before"
    assert rank0.negotiations.keys() == {X}
    assert not rank0.joined
    rank0.deliver(1, "resent", cache_id, X, PAIR, data=DATA)
    assert rank0.sent[before][1][:3] == ["done", *X]
    assert rank0.sent[before][2] == DATA
    assert rank0.answers[before + 1 :] == ([effect] if effect else [])
    if after == ["join"]:
        assert list(rank0.joined) == [1]
    if after[0] == "op":
        assert rank0.negotiations[after[1]].requests.keys() == {1}


@pytest.mark.parametrize("joins_first", [False, True])
def test_a_joined_rank_contributes_what_it_had_submitted(joins_first: bool) -> None:
    """Not zeros, which a minimum would show; and its joining fails no operation."""
    rank0, request = Rank0(2), PAIR._replace(op=MIN)
    rank0.deliver(1, "op", X, request, data=eager.pack([torch.tensor([4.0, 5.0])]))
    rank0.deliver(1, "op", Key(GLOBAL_SET, "b"), LARGE)
    if joins_first:
        rank0.deliver(1, "join")
    rank0.deliver(0, "op", X, request, data=eager.pack([torch.tensor([7.0, 3.0])]))
    assert rank0.sent[-1][2] == eager.pack([torch.tensor([4.0, 3.0])])
    rank0.deliver(0, "op", Key(GLOBAL_SET, "b"), LARGE)
    assert rank0.answers == ["done", "run"]


@pytest.mark.parametrize(
    ("fusion_bytes", "batches"), [(0, [1, 1, 1, 1]), (800_000, [2, 2]), (10_000_000, [4])]
)
def test_waiting_operations_are_fused_up_to_the_threshold(
    fusion_bytes: int, batches: list[int]
) -> None:
    rank0 = Rank0(2, fusion_bytes)
    for name in "abcde":  # of 400,000 bytes; the first runs at once, and the others wait for it
        for rank in (0, 1):
            rank0.deliver(rank, "op", Key(GLOBAL_SET, name), LARGE)
    for _ in batches:
        rank0.deliver(0, "idle")
    assert rank0.answers == ["run"] * len(rank0.sent)
    assert [len(header[3]) for _, header, _ in rank0.sent[1:]] == batches


def test_a_process_set_is_removed_after_its_operations() -> None:
    rank0 = Rank0(2)
    for rank in (0, 1):
        rank0.deliver(rank, "op", Key(GLOBAL_SET, "add"), Request("add_set", data=[0, 1]))
    for name in ("runs", "waits for that"):
        for rank in (0, 1):
            rank0.deliver(rank, "op", Key(1, name), LARGE)
    rank0.deliver(0, "op", Key(1, "half"), LARGE)
    assert rank0.answers == ["done", "run"]
    for rank in (0, 1):
        rank0.deliver(rank, "op", Key(GLOBAL_SET, "remove"), Request("remove_set", data=1))
    assert rank0.answers == ["done", "run", "run", "error", "done"]
    rank0.deliver(0, "idle")
    rank0.deliver(1, "op", Key(1, "half"), LARGE)
    assert rank0.sent[-1][0] == [1]
    assert "process set of this operation has been removed" in rank0.sent[-1][1][-1]


def test_a_death_while_another_rank_leaves_is_reported() -> None:
    """Others may be in a step that both had begun."""
    rank0 = Rank0(3)
    rank0.deliver(2, "leave", {"channel": 7})
    rank0.report_lost(1, "process 5 on host", "has ended")
    (_, graceful, _), (_, death, _) = rank0.sent
    assert graceful[2] == {"channel": 7}
    assert death[2] is None
    assert "Rank 1 (process 5 on host) has ended" in death[1]
    for rank in (0, 2):
        rank0.deliver(rank, "drained")
    rank0.report_lost(2, "process 6 on host", "has ended")
    assert rank0.answers == ["down", "down", "close"]
