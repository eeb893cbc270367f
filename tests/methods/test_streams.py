"""IterableDataset: divided by rank and loader process, uneven ranks, and exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain import Backend
from hvdtrain.training.data.stream import StreamBatches
from tests.messages import Message
from tests.methods.arms import EVERYWHERE, SEVERAL, TWO
from tests.methods.data_runs import (
    Regression,
    Streamed,
    assert_is_one_process,
    flat,
    refusal,
    steps,
    train,
)
from tests.ranks import Ranks, single
from tests.runs import Values

NUM = 27


@EVERYWHERE
def test_every_item_once(ranks: Ranks, tmp_path: Path) -> None:
    """27 items: the last batch is short on some ranks; with three ranks none is without."""
    found = ranks.run(train, Streamed(NUM, "stream"), tmp_path / "run", epochs=1, uneven="join")
    assert sorted(flat(found)) == list(range(NUM))
    dropped = ranks.run(train, Streamed(NUM, "stream"), tmp_path / "drop", epochs=1)
    assert len(flat(dropped)) == len(set(flat(dropped))) == NUM // (4 * ranks.n) * 4 * ranks.n
    assert steps(dropped) == steps(found)[: len(steps(dropped))]


@SEVERAL
def test_join_weights_by_samples(ranks: Ranks, tmp_path: Path) -> None:
    """The weights are those of one process that takes the same steps."""
    num = 4 * ranks.n * 2 + 1  # one rank has a sample in the last step
    found = ranks.run(train, Streamed(num, "stream"), tmp_path, epochs=1, uneven="join")
    used = steps(found)
    assert len(used[-1]) == ranks.n  # the stand-ins of the ranks without a sample are among them
    assert_is_one_process(found, Regression(num), [*used[:-1], used[-1][:1]], tmp_path)


@TWO
@pytest.mark.parametrize("kind", ["stream", "by worker"])
def test_loader_processes_change_nothing(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    alone, helped = (
        ranks.run(train, Streamed(NUM, kind), tmp_path / f"{n}", uneven="join", workers=n)
        for n in (0, 2)
    )
    for one, other in zip(alone, helped, strict=True):
        assert (one["seen"], one["digest"]) == (other["seen"], other["digest"])


@SEVERAL
@pytest.mark.parametrize(
    ("kind", "uneven"), [("unequal", "drop"), ("unequal", "join"), ("split", "join")]
)
def test_a_stream_that_is_divided_is_not_divided_again(
    ranks: Ranks, kind: str, uneven: str, tmp_path: Path
) -> None:
    """By itself: rank 0 has half of the items, and its part of the rest. Or split by rank."""
    found = ranks.run(train, Streamed(50, kind), tmp_path, epochs=1, uneven=uneven)
    assert len({len(rank["seen"]) for rank in found}) == 1
    used = set(flat(found))
    assert len(used) == 50 if uneven != "drop" else len(flat(found)) == len(used) <= 50


@TWO
@pytest.mark.parametrize(
    ("kind", "num", "changes"),
    [
        ("stream", NUM, {"schedule": "cosine"}),
        ("stream", NUM, {"uneven": "error"}),
        ("with length", NUM, {"uneven": "pad"}),
        ("with length", NUM, {"uneven": "error"}),
        ("stream", 7, {}),
        ("split for others", NUM, {}),
    ],
    ids=str,
)
def test_what_a_stream_cannot_do(
    ranks: Ranks, kind: str, num: int, changes: Values, tmp_path: Path, message: Message
) -> None:
    """Some options need its length, or that it can be divided among others; 7 are no step."""
    message(refusal(ranks, Streamed(num, kind), tmp_path, **changes))


@TWO
def test_options_that_need_a_length(ranks: Ranks, tmp_path: Path) -> None:
    """Of the dataset, or else of the run."""
    for kind, max_steps, taken in (("with length", None, 6), ("stream", 4, 4)):
        task = Streamed(NUM, kind)
        found = ranks.run(train, task, tmp_path / kind, schedule="cosine", max_steps=max_steps)
        assert [len(rank["seen"]) for rank in found] == [taken, taken]
    fits = ranks.run(train, Streamed(24, "with length"), tmp_path / "fits", uneven="error")
    assert sorted(flat(fits)) == sorted(2 * list(range(24)))


@TWO
def test_a_stream_that_divides_itself_needs_the_same_ranks(
    ranks: Ranks, tmp_path: Path, message: Message
) -> None:
    train(single(), Streamed(NUM, "divided"), tmp_path, 3)
    message(refusal(ranks, Streamed(NUM, "divided"), tmp_path, resume="must"))


def resumed(backend: Backend, /, folder: Path) -> Any:
    """Resume from a checkpoint of an earlier release, which has more; return the lines."""
    with pytest.MonkeyPatch.context() as patch:

        def state(data: StreamBatches) -> list[Values]:
            return [{"own": num, "workers": 0, "loader": {}} for num in data._used]

        patch.setattr(StreamBatches, "state", state)
        train(backend, Streamed(NUM, "unequal"), folder, 3, uneven="join")
    return train(backend, Streamed(NUM, "unequal"), folder, resume="must", uneven="join")["lines"]


@TWO
def test_the_samples_that_are_skipped_are_those_of_the_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Of the 15 that were used, rank 0 had 8."""
    lines, _ = ranks.run(resumed, tmp_path)
    assert "data     skipping the 8 samples used before the checkpoint" in lines
