"""IterableDataset: divided by rank and loader process, uneven ranks, and exact resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.training.data.stream import StreamBatches
from tests.messages import Message
from tests.methods.arms import EVERYWHERE, SEVERAL, TWO
from tests.methods.data_runs import (
    Regression,
    Streamed,
    assert_is_one_process,
    flat,
    loss_with,
    refusal,
    samples,
    steps,
    train,
)
from tests.ranks import Ranks, single
from tests.runs import Values, run_json, whole_and_rest

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
@pytest.mark.parametrize("uneven", ["drop", "join"])
def test_ranks_of_unequal_length_do_not_hang(ranks: Ranks, uneven: str, tmp_path: Path) -> None:
    """Rank 0 has half of the items, and its part of the rest."""
    found = ranks.run(train, Streamed(50, "unequal"), tmp_path, epochs=1, uneven=uneven)
    assert len({len(rank["seen"]) for rank in found}) == 1
    used = set(flat(found))
    assert len(used) == 50 if uneven != "drop" else len(flat(found)) == len(used) <= 50


@SEVERAL
def test_a_stream_that_is_split_by_rank_is_not_divided_again(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(train, Streamed(NUM, "split"), tmp_path, epochs=1, uneven="join")
    assert sorted(flat(found)) == list(range(NUM))


# With loader processes, which are the same on any number of ranks, it takes long.
RESUMED = [
    (("ddp-torchrun", 2), "stream", 0),
    (("ddp-torchrun", 2), "unequal", 0),
    (("ddp-torchrun", 2), "split", 0),
    pytest.param(("compat-torchrun", 3), "stream", 0, marks=pytest.mark.exhaustive),
    pytest.param(("ddp-torchrun", 2), "stream", 2, marks=pytest.mark.exhaustive),
    pytest.param(("ddp-torchrun", 2), "unequal", 2, marks=pytest.mark.exhaustive),
    pytest.param(("single", 1), "stream", 0, marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("ranks", "kind", "workers"), RESUMED, indirect=["ranks"])
def test_resuming_in_the_middle_of_an_epoch(
    ranks: Ranks, kind: str, workers: int, tmp_path: Path
) -> None:
    whole, rest = whole_and_rest(
        ranks, train, tmp_path, task=(Streamed(NUM, kind),), uneven="join", workers=workers
    )
    assert [rank["seen"] for rank in rest] == [rank["seen"][-2:] for rank in whole]
    used = [sum(map(len, rank["seen"][len(rank["seen"]) // 2 : -2])) for rank in whole]
    num = sum(used) if kind == "stream" else used[0]
    assert f"data     skipping the {num} samples used before the checkpoint" in rest[0]["lines"]


@pytest.mark.parametrize("kind", ["stream", "divided"])
def test_the_state_that_earlier_checkpoints_have_is_not_used(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have that of torchdata's loader, and the number of its processes."""
    whole = train(single(), Streamed(NUM, kind), tmp_path / "whole")
    state = [{"own": 8, "workers": 0, "loader": {"_snapshot": {"_snapshot_step": 2}}}]
    monkeypatch.setattr(StreamBatches, "state", lambda _: state)
    train(single(), Streamed(NUM, kind), tmp_path / "parts", 3)
    rest = train(single(), Streamed(NUM, kind), tmp_path / "parts", resume="must")
    assert (rest["seen"], rest["digest"]) == (whole["seen"][2:], whole["digest"])
    assert "data     skipping the 8 samples used before the checkpoint" in rest["lines"]


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
def test_a_stream_is_evaluated_exactly(ranks: Ranks, tmp_path: Path) -> None:
    task = Streamed(NUM, "stream", evaluates=True)
    found = ranks.run(train, task, tmp_path, epochs=1, max_steps=1)
    wanted = loss_with(found[0]["weights"], task, samples(NUM))
    assert run_json(tmp_path)["metrics"]["loss"] == pytest.approx(wanted, rel=1e-12)


@TWO
def test_resuming_with_more_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """One process stops after two of its steps of 4; these ranks use the other items."""
    changes: Values = {"uneven": "join", "epochs": 1}
    first = train(single(), Streamed(NUM, "stream"), tmp_path, 3, **changes)
    rest = ranks.run(train, Streamed(NUM, "stream"), tmp_path, resume="must", **changes)
    used = [i for batch in first["seen"][:2] for i in batch]
    assert set(used) | set(flat(rest)) == set(range(NUM))
    assert not set(used) & set(flat(rest))


@TWO
def test_a_stream_that_divides_itself_needs_the_same_ranks(
    ranks: Ranks, tmp_path: Path, message: Message
) -> None:
    train(single(), Streamed(NUM, "divided"), tmp_path, 3)
    message(refusal(ranks, Streamed(NUM, "divided"), tmp_path, resume="must"))
