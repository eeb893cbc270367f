"""The coordinator alone, with messages in an order that sockets rarely deliver."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvdtrain.hvd.engine import eager
from hvdtrain.hvd.engine.coordinator import Coordinator
from hvdtrain.hvd.engine.request import AVERAGE, GLOBAL_SET, MIN, Key, Request, dtype_of
from hvdtrain.hvd.engine.timeline import Timeline

X = Key(GLOBAL_SET, "x")
PAIR = Request("allreduce", dtypes=("float32",), shapes=((2,),), op=AVERAGE)
LARGE = Request("broadcast", dtypes=("float32",), shapes=((100_000,),), root=0)
DATA = eager.pack([torch.ones(2)])


class Rank0(Coordinator):
    """A coordinator that records what it sends: ranks, header, payload."""

    def __init__(self, size: int, fusion_bytes: int = 0) -> None:
        self.sent: list[tuple[list[int], list[Any], bytes]] = []
        super().__init__(size, fusion_bytes, lambda *sent: self.sent.append(sent), Timeline(None))

    def deliver(self, rank: int, *header: Any, data: bytes = b"") -> None:
        self.receive(rank, list(header), data, 0.0)

    def submit(self, rank: int, key: Key, request: Request, data: bytes = b"") -> None:
        """Deliver one operation."""
        entry = [key.set_id, request, len(data), [key.name]]
        self.deliver(rank, "ops", [entry], data=data)

    @property
    def answers(self) -> list[str]:
        return [header[0] for _, header, _ in self.sent]


def test_small_data_of_one_message_is_combined_at_once() -> None:
    """Each has the bits that it has alone, whatever is combined beside it."""
    rank0, names = Rank0(2), [f"w{i}" for i in range(6)]
    requests = [PAIR, PAIR, PAIR._replace(op=MIN), PAIR._replace(dtypes=("bfloat16",)), PAIR]
    requests.append(Request("allreduce", ("float32", "int64"), ((2,), (3,))))

    def data_of(rank: int) -> list[bytes]:
        some, found = torch.tensor([0.1, 3.0, 7.0]), []
        for i, request in enumerate(requests):
            tensors = [
                some[: shape[0]].mul(rank + i + 1).to(dtype_of(dtype))
                for dtype, shape in zip(request.dtypes, request.shapes, strict=True)
            ]
            found.append(eager.pack(tensors))
        return found

    both = [data_of(rank) for rank in (0, 1)]
    for rank, data in enumerate(both):
        pieces = zip(requests, data, names, strict=True)
        entries = [[GLOBAL_SET, request, len(each), [name]] for request, each, name in pieces]
        rank0.deliver(rank, "ops", entries, data=b"".join(data))
    ((ranks, header, results),) = rank0.sent
    assert ranks == [0, 1]
    assert header == ["done", GLOBAL_SET, names, None]
    alone = [
        eager.combine([eager.Eager(request, list(pair), 2)])
        for request, *pair in zip(requests, *both, strict=True)
    ]
    assert results == b"".join(alone)
    assert alone[0] == eager.pack([torch.tensor([0.1, 3.0]) * 1.5])


@pytest.mark.parametrize("joins_first", [False, True])
def test_a_joined_rank_contributes_what_it_had_submitted(joins_first: bool) -> None:
    """Not zeros, which a minimum would show; and its joining fails no operation."""
    rank0, request = Rank0(2), PAIR._replace(op=MIN)
    rank0.submit(1, X, request, data=eager.pack([torch.tensor([4.0, 5.0])]))
    rank0.submit(1, Key(GLOBAL_SET, "b"), LARGE)
    if joins_first:
        rank0.deliver(1, "join")
    rank0.submit(0, X, request, data=eager.pack([torch.tensor([7.0, 3.0])]))
    assert rank0.sent[-1][2] == eager.pack([torch.tensor([4.0, 3.0])])
    rank0.submit(0, Key(GLOBAL_SET, "b"), LARGE)
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
            rank0.submit(rank, Key(GLOBAL_SET, name), LARGE)
    for _ in batches:
        rank0.deliver(0, "idle")
    assert rank0.answers == ["run"] * len(rank0.sent)
    assert [len(header[3]) for _, header, _ in rank0.sent[1:]] == batches


def test_a_process_set_is_removed_after_its_operations() -> None:
    rank0 = Rank0(2)
    for rank in (0, 1):
        rank0.submit(rank, Key(GLOBAL_SET, "add"), Request("add_set", data=[0, 1]))
    for name in ("runs", "waits for that"):
        for rank in (0, 1):
            rank0.submit(rank, Key(1, name), LARGE)
    rank0.submit(0, Key(1, "half"), LARGE)
    assert rank0.answers == ["done", "run"]
    for rank in (0, 1):
        rank0.submit(rank, Key(GLOBAL_SET, "remove"), Request("remove_set", data=1))
    assert rank0.answers == ["done", "run", "run", "error", "done"]
    rank0.deliver(0, "idle")
    rank0.submit(1, Key(1, "half"), LARGE)
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
