"""IterableDataset: divided by rank and loader process, uneven ranks, and exact resume."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.methods.arms import EVERYWHERE, LIVE, TWO
from tests.methods.data_runs import Regression, Streamed, one_process, samples, train
from tests.ranks import Ranks, single
from tests.runs import records

SEVERAL = pytest.mark.parametrize(
    "ranks", [("ddp-torchrun", 2), ("compat-torchrun", 3)], indirect=True
)
HAS_TORCHDATA = importlib.util.find_spec("torchdata") is not None
NUM = 27


def flat(found: list[dict[str, Any]]) -> list[int]:
    return [i for rank in found for batch in rank["seen"] for i in batch]


def steps(found: list[dict[str, Any]]) -> list[list[int]]:
    """The samples of all ranks, by step."""
    together = zip(*(rank["seen"] for rank in found), strict=True)
    return [sorted(i for batch in step for i in batch) for step in together]


@EVERYWHERE
def test_every_item_once(ranks: Ranks, tmp_path: Path) -> None:
    """27 items: the last batch is short on some ranks; with three ranks none is without."""
    found = ranks.run(train, Streamed(NUM, "stream"), tmp_path / "run", epochs=1, uneven="join")
    assert sorted(flat(found)) == list(range(NUM))
    dropped = ranks.run(train, Streamed(NUM, "stream"), tmp_path / "drop", epochs=1)
    assert len(flat(dropped)) == len(set(flat(dropped))) == NUM // (4 * ranks.n) * 4 * ranks.n
    assert steps(dropped) == steps(found)[: len(steps(dropped))]
    padded = ranks.run(train, Streamed(NUM, "stream"), tmp_path / "pad", epochs=1, uneven="pad")
    assert set(flat(padded)) == set(range(NUM))
    assert {len(batch) for rank in padded for batch in rank["seen"]} == {4}


@SEVERAL
def test_join_weights_by_samples(ranks: Ranks, tmp_path: Path) -> None:
    """The weights are those of one process that takes the same steps."""
    num = 4 * ranks.n * 2 + 1  # one rank has a sample in the last step
    found = ranks.run(train, Streamed(num, "stream"), tmp_path / "run", epochs=1, uneven="join")
    used = steps(found)
    assert len(used[-1]) == ranks.n  # the stand-ins of the ranks without a sample are among them
    wanted, _ = one_process(Regression(num), [*used[:-1], used[-1][:1]])
    for rank in found:
        assert (rank["weights"] - wanted).abs().max() < 1e-12
    assert records(tmp_path / "run")[-1]["step"] == len(used)


@TWO
@pytest.mark.parametrize("kind", ["stream", "divided", "by worker"])
def test_loader_processes_change_nothing(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    alone = ranks.run(train, Streamed(NUM, kind), tmp_path / "0", uneven="join")
    helped = ranks.run(train, Streamed(NUM, kind), tmp_path / "2", uneven="join", workers=2)
    for one, other in zip(alone, helped, strict=True):
        assert one["seen"] == other["seen"]
        assert one["digest"] == other["digest"]


@EVERYWHERE
@pytest.mark.parametrize("uneven", ["drop", "pad", "join"])
def test_ranks_of_unequal_length_do_not_hang(ranks: Ranks, uneven: str, tmp_path: Path) -> None:
    """Rank 0 has half of the items, and its part of the rest."""
    found = ranks.run(train, Streamed(50, "unequal"), tmp_path / "run", epochs=1, uneven=uneven)
    assert len({len(rank["seen"]) for rank in found}) == 1
    used = set(flat(found))
    assert len(used) == 50 if uneven != "drop" else len(flat(found)) == len(used) <= 50


def resumptions() -> list[Any]:
    """Loader processes on three ranks are the same as on two."""
    made = []
    for arm in LIVE:
        for kind in ("stream", "stateful", "unequal"):
            made.append(pytest.param(arm, kind, 0))
            if arm[1] < 3:
                kept = (arm, kind) == (("ddp-torchrun", 2), "stateful")
                mark = () if kept else pytest.mark.exhaustive
                made.append(pytest.param(arm, kind, 2, marks=mark))
    return made


@pytest.mark.parametrize(("ranks", "kind", "workers"), resumptions(), indirect=["ranks"])
def test_resuming_in_the_middle_of_an_epoch(
    ranks: Ranks, kind: str, workers: int, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"uneven": "join", "workers": workers}
    whole = ranks.run(train, Streamed(NUM, kind), tmp_path / "whole", **changes)
    stop = len(whole[0]["seen"]) - 1
    ranks.run(train, Streamed(NUM, kind), tmp_path / "parts", stop, **changes)
    rest = ranks.run(train, Streamed(NUM, kind), tmp_path / "parts", resume="must", **changes)
    for one, other in zip(whole, rest, strict=True):
        assert one["digest"] == other["digest"]
        assert one["seen"][stop - 1 :] == other["seen"]
    line = next((line for line in rest[0]["lines"] if line.startswith("data     skipping")), "")
    if kind == "stateful" and HAS_TORCHDATA:
        assert not line
        if not workers:
            used = sum(map(len, rest[0]["seen"]))
            assert rest[0]["read"] < NUM if ranks.n > 1 else rest[0]["read"] == used
    elif kind == "stateful":
        assert "torchdata is not installed; pip install 'hvdtrain[data]'" in line
    else:
        assert line.endswith("has no state_dict)")


@TWO
def test_steps_that_are_not_known(ranks: Ranks, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"schedule": "cosine"}
    for rank in ranks.run(train, Streamed(NUM, "stream"), tmp_path / "run", **changes):
        assert rank["error"] == (
            "the learning-rate schedule (cosine) needs the number of steps, which a stream does "
            "not say; give --max-steps, or give the dataset a method __len__"
        )
    known = ranks.run(train, Streamed(NUM, "with length"), tmp_path / "len", **changes)
    assert any(line.startswith("steps    6 (3 an epoch)") for line in known[0]["lines"])
    short = ranks.run(train, Streamed(NUM, "stream"), tmp_path / "max", max_steps=4, **changes)
    assert len(short[0]["seen"]) == 4 + 0
    for rank in ranks.run(train, Streamed(7, "stream"), tmp_path / "few"):
        assert rank["error"].startswith("epoch 1 has no step: the training data are fewer than")


@TWO
def test_error_needs_a_length(ranks: Ranks, tmp_path: Path) -> None:
    for rank in ranks.run(train, Streamed(NUM, "stream"), tmp_path / "run", uneven="error"):
        assert (
            "--uneven error needs the number of samples, and Stream has no len()" in rank["error"]
        )
    for rank in ranks.run(train, Streamed(NUM, "with length"), tmp_path / "run", uneven="error"):
        assert "--uneven error: 27 samples are not a multiple" in rank["error"]
    fits = ranks.run(train, Streamed(24, "with length"), tmp_path / "fits", uneven="error")
    assert sorted(flat(fits)) == sorted(2 * list(range(24)))


@SEVERAL
def test_a_stream_is_evaluated_exactly(ranks: Ranks, tmp_path: Path) -> None:
    task = Streamed(NUM, "stream", evaluates=True)
    found = ranks.run(train, task, tmp_path / "run", epochs=1, max_steps=1)
    (logged,) = (r["eval_loss"] for r in records(tmp_path / "run") if "eval_loss" in r)
    model = task.model().double()
    nn.utils.vector_to_parameters(found[0]["weights"], model.parameters())
    assert logged == pytest.approx(task.loss(model, samples(NUM)).item(), rel=1e-12)


@SEVERAL
@pytest.mark.parametrize("kind", ["stream", "stateful"])
def test_resuming_with_more_ranks(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """One process stops after two of its steps of 4; these ranks use the other items."""
    changes: dict[str, Any] = {"uneven": "join", "epochs": 1}
    first = train(single(), Streamed(NUM, kind), tmp_path, 3, **changes)
    rest = ranks.run(train, Streamed(NUM, kind), tmp_path, resume="must", **changes)
    used = [i for batch in first["seen"][:2] for i in batch]
    assert set(used) | set(flat(rest)) == set(range(NUM))
    assert not set(used) & set(flat(rest))
    why = "Stream has no state_dict" if kind == "stream" else "another number of ranks"
    if kind == "stream" or HAS_TORCHDATA:
        lines = [line for line in rest[0]["lines"] if line.startswith("data     skipping the 8")]
        assert why in lines[0]


@TWO
def test_a_stream_that_divides_itself_needs_the_same_ranks(ranks: Ranks, tmp_path: Path) -> None:
    train(single(), Streamed(NUM, "divided"), tmp_path, 3)
    for rank in ranks.run(train, Streamed(NUM, "divided"), tmp_path, resume="must"):
        assert rank["error"] == (
            "the checkpoint is from the middle of an epoch with 1 ranks, and the dataset divides "
            "itself; resume with 1 ranks"
        )


@TWO
def test_a_stream_that_divides_itself_is_not_elastic(ranks: Ranks, tmp_path: Path) -> None:
    for rank in ranks.run(train, Streamed(NUM, "divided"), tmp_path, elastic=True):
        assert rank["on_all_ranks"]
        assert rank["error"] == (
            "--elastic with a stream that divides itself (Divided): a part of another number of "
            "ranks cannot go on in the middle of an epoch; remove its method rank_shard, or leave "
            "--elastic out"
        )


@pytest.mark.parametrize("ranks", [("ps-torchrun", 2)], indirect=True)
def test_asynchronous_ranks_have_no_stream(ranks: Ranks, tmp_path: Path) -> None:
    for rank in ranks.run(train, Streamed(NUM, "stream"), tmp_path, ps_async=True):
        assert rank["on_all_ranks"]
        assert rank["error"] == (
            "--ps-async with a stream (Stream): the ranks exchange the sizes of their batches "
            "before every step, so that all wait for each other; give the dataset __len__ and "
            "__getitem__, or leave --ps-async out"
        )
    limited = {"ps_async": True, "ps_max_staleness": 0}  # which is synchronous training
    found = ranks.run(train, Streamed(NUM, "stream"), tmp_path, epochs=1, **limited)
    assert {len(batch) for rank in found for batch in rank["seen"]} == {4}
