"""Rank 0's side by itself, with messages in an order that sockets seldom give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvdtrain.hvd.engine import inline
from hvdtrain.hvd.engine.coordinator import Coordinator
from hvdtrain.hvd.engine.request import AVERAGE, GLOBAL_SET, Key, Meta
from hvdtrain.hvd.engine.timeline import Timeline

X = Key(GLOBAL_SET, "x")
PAIR = Meta("allreduce", dtypes=("float32",), shapes=((2,),), op=AVERAGE)
ONE = PAIR._replace(shapes=((1,),))
DATA = inline.pack([torch.ones(2)])


@pytest.mark.parametrize(
    ("after", "effect"),
    [
        (["join"], None),
        (["op", Key(GLOBAL_SET, "set"), Meta("remove_set", data=1)], None),
        (["bye", {}], "down"),
    ],
    ids=["join", "remove_set", "bye"],
)
def test_nothing_overtakes_an_operation_asked_for_again(
    after: list[Any], effect: str | None
) -> None:
    sent: list[list[Any]] = []
    coordinator = Coordinator(2, 8, 0, lambda to, header, _: sent.append(header), Timeline(None))

    def receive(rank: int, *header: Any) -> None:
        coordinator.receive(rank, list(header), DATA if header[-1] != ONE else b"    ", 0.0)

    for rank in (0, 1):
        receive(rank, "op", X, PAIR)
    cache_id = sent[-1][3]
    receive(0, "op", X, PAIR)
    receive(1, "op", X, ONE)
    assert sent[-1][0] == "error"  # and rank 0 has forgotten what `cache_id` stood for

    receive(0, "op", X, PAIR)
    receive(1, "hit", cache_id)
    assert sent[-1] == ["again", cache_id]
    coordinator.receive(1, after, b"", 0.0)
    assert sent[-1] == ["again", cache_id], "it has overtaken what rank 1 submitted before"
    assert coordinator.waiting.keys() == {X}
    assert not coordinator.joined
    receive(1, "anew", cache_id, X, PAIR)
    answers = sent[sent.index(["again", cache_id]) + 1 :]
    assert answers[0][:3] == ["done", *X]
    assert [header[0] for header in answers[1:]] == ([effect] if effect else [])
    if after == ["join"]:
        assert list(coordinator.joined) == [1]
    if after[0] == "op":
        assert coordinator.waiting[after[1]].asked.keys() == {1}
