"""The coordinator alone, with messages in an order that sockets rarely deliver."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.hvd.engine.batch import to_bytes
from hvdtrain.hvd.engine.coordinator import Coordinator
from hvdtrain.hvd.engine.operation import AVERAGE, GLOBAL_SET, MIN, Request
from hvdtrain.hvd.engine.settings import Settings
from hvdtrain.hvd.engine.stall import StallInspector
from hvdtrain.hvd.engine.timeline import Timeline

PAIR = Request("allreduce", dtypes=("float32",), shapes=((2,),), op=AVERAGE)
LARGE = Request("broadcast", dtypes=("float32",), shapes=((100_000,),), root=0)
DATA = to_bytes(torch.ones(2))


class Rank0(Coordinator):
    """A coordinator that records what it sends: ranks, header, payload."""

    def __init__(self, size: int, fusion_bytes: int = 0) -> None:
        self.sent: list[tuple[list[int], list[Any], bytes]] = []
        super().__init__(size, fusion_bytes, lambda *sent: self.sent.append(sent), Timeline(None))

    def deliver(self, rank: int, *header: Any, data: bytes = b"") -> None:
        self.receive(rank, list(header), data, 0.0)

    def submit(
        self,
        ranks: Iterable[int],
        name: str,
        request: Request,
        data: bytes = b"",
        set_id: int = GLOBAL_SET,
    ) -> None:
        """Deliver one operation of each of these ranks."""
        for rank in ranks:
            self.deliver(rank, "ops", [[set_id, request, len(data), [name]]], data=data)

    def submit_numbers(self, rank: int, *parts: list[int], data: bytes) -> None:
        """Deliver operations by their numbers, from the first of each part to before its end."""
        self.deliver(rank, "slots", 0, list(parts), data=data)

    @property
    def answers(self) -> list[str]:
        return [header[0] for _, header, _ in self.sent]


def test_small_data_of_one_message_that_is_reduced_alike_has_one_answer() -> None:
    """test_properties.py looks at the values."""
    rank0 = Rank0(2)
    requests = (PAIR, PAIR, PAIR._replace(op=MIN), PAIR._replace(shapes=((2, 1),)), PAIR)
    entries = [[GLOBAL_SET, r, 8, [name]] for name, r in zip("vwxyz", requests, strict=True)]
    for rank in (0, 1):
        rank0.deliver(rank, "ops", entries, data=DATA * 5)
    assert [header[2] for _, header, _ in rank0.sent] == [["v", "w", "y", "z"], ["x"]]


def agreed(size: int, names: str = "xyz") -> Rank0:
    """A coordinator of ranks that have agreed on these names: the second time they get a number."""
    rank0 = Rank0(size)
    for time in range(2):
        for rank in range(size):
            rank0.deliver(rank, "ops", [[GLOBAL_SET, PAIR, 8, list(names)]], data=DATA * len(names))
        assert rank0.sent[-1][1][3] == ([0, list(range(len(names)))] if time else None)
    rank0.sent.clear()
    return rank0


def ones(count: int, value: float = 1.0) -> bytes:
    return to_bytes(torch.full((2 * count,), value))


def test_a_number_is_answered_once_all_ranks_have_sent_it() -> None:
    rank0 = agreed(2)
    rank0.submit_numbers(0, [0, 3], data=ones(3))
    rank0.submit_numbers(1, [1, 2], data=ones(1, 3.0))
    assert rank0.sent == [([0, 1], ["sums", 0, [[1, 2]]], ones(1, 2.0))]


@pytest.mark.parametrize("first", ["number", "name"])
def test_a_changed_request_is_compared_by_name(first: str) -> None:
    rank0, changed = agreed(2), PAIR._replace(shapes=((3,),))
    if first == "number":
        rank0.submit_numbers(0, [0, 3], data=ones(3))
    rank0.submit([1], "x", changed, data=ones(3)[:12])
    if first == "name":
        rank0.submit_numbers(0, [0, 3], data=ones(3))
    assert rank0.answers == ["error"]
    assert "Mismatched ALLREDUCE tensor shapes" in rank0.sent[-1][1][-1]
    rank0.submit_numbers(1, [1, 3], data=ones(2))
    assert rank0.answers[1:] == ["reduced"]


def test_what_waits_by_number_is_seen_by_name() -> None:
    """So that a rank that is late for it is reported."""
    rank0 = agreed(3)
    rank0.submit_numbers(0, [0, 2], data=ones(2))
    rank0.tick(0.4)
    assert not rank0.negotiations
    rank0.tick(0.6)
    assert [key.name for key in rank0.negotiations] == ["x", "y"]
    assert [missing for _, _, missing in rank0.waiting()] == [[1, 2], [1, 2]]
    for rank in (1, 2):
        rank0.submit_numbers(rank, [0, 2], data=ones(2, 4.0))
    assert rank0.sent[-1][1] == ["reduced", GLOBAL_SET, ["x", "y"], [0, [0, 1]]]
    assert rank0.sent[-1][2] == ones(2, 3.0)


def test_a_joined_rank_has_zeros_for_a_number() -> None:
    rank0 = agreed(2)
    rank0.submit_numbers(0, [0, 1], data=ones(1, 4.0))
    rank0.submit([1], "join", Request("join"))
    rank0.submit_numbers(0, [1, 2], data=ones(1, 8.0))
    assert [data for _, _, data in rank0.sent] == [ones(1, 2.0), ones(1, 4.0)]


def test_numbers_of_a_removed_set_are_refused() -> None:
    rank0 = Rank0(2)
    rank0.submit((0, 1), "add", Request("add_set", data=[0, 1]))
    for _ in range(2):
        rank0.submit((0, 1), "x", PAIR, data=DATA, set_id=1)
    rank0.submit_numbers(0, [0, 1], data=DATA)
    rank0.submit((0, 1), "remove", Request("remove_set", data=1))
    rank0.submit_numbers(1, [0, 1], data=DATA)
    errors = [(ranks, header[-1]) for ranks, header, _ in rank0.sent if header[0] == "error"]
    assert [ranks for ranks, _ in errors] == [[0], [1]]
    assert all("process set of this operation has been removed" in text for _, text in errors)


@pytest.mark.parametrize(
    ("fusion_bytes", "batches"), [(0, [1, 1, 1, 1]), (800_000, [2, 2]), (10_000_000, [4])]
)
def test_waiting_operations_are_fused_up_to_the_threshold(
    fusion_bytes: int, batches: list[int]
) -> None:
    rank0 = Rank0(2, fusion_bytes)
    for name in "abcde":  # of 400,000 bytes; the first runs at once, and the others wait for it
        rank0.submit((0, 1), name, LARGE)
    for _ in batches:
        rank0.deliver(0, "idle")
    assert rank0.answers == ["run"] * len(rank0.sent)
    assert [len(header[2]) for _, header, _ in rank0.sent[1:]] == batches


def test_a_process_set_is_removed_after_its_operations() -> None:
    rank0 = Rank0(2)
    rank0.submit((0, 1), "add", Request("add_set", data=[0, 1]))
    for name in ("runs", "waits for that"):
        rank0.submit((0, 1), name, LARGE, set_id=1)
    rank0.submit([0], "half", LARGE, set_id=1)
    assert rank0.answers == ["done", "run"]
    rank0.submit((0, 1), "remove", Request("remove_set", data=1))
    assert rank0.answers == ["done", "run", "run", "error", "done"]
    rank0.deliver(0, "idle")
    rank0.submit([1], "half", LARGE, set_id=1)
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


@pytest.mark.parametrize("disabled", [False, True])
def test_operations_and_steps_that_stall(disabled: bool, capfd: pytest.CaptureFixture[str]) -> None:
    rank0, settings = Rank0(3), Settings(stall_check_disable=disabled)
    for i in range(5):
        rank0.submit([0, 1], f"x{i}", PAIR, data=DATA)
    rank0.deliver(0, "step", "net", GLOBAL_SET, 1)
    stalls = StallInspector(rank0, settings, str, lambda name: ["weight", "bias"] * (name == "net"))
    step = "allreduce.weight@net"
    expected = [f"1: [{step}, allreduce.bias@net]", f"2: [x0, x1, x2, x3, x4, {step} ...]"]
    for now in (59.0, 61.0, 200.0):
        stalls.check(now)
        is_warned = now == 61.0 and not disabled
        assert capfd.readouterr().err.splitlines()[2:] == (expected if is_warned else [])
    assert not rank0.sent


def test_the_timeline_has_a_step_that_a_fast_rank_has_left(tmp_path: Path) -> None:
    """Its message about the next step arrives before the slow rank's about this one."""
    rank0 = Rank0(2)
    rank0.timeline = Timeline(str(tmp_path / "trace.json"))
    for rank, step in ((1, 1), (1, 2), (0, 1), (0, 2), (0, 3), (1, 3)):
        rank0.deliver(rank, "step", "net", GLOBAL_SET, step)
    rank0.timeline.close()
    labels = [event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())]
    assert [labels.count(label) for label in ("NEGOTIATE_STEP", "0", "1")] == [3, 3, 3]
