"""What a resumed run may change: ranks, backend, batch, schedule, rate, precision."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.methods.arms import on
from tests.parity import resume
from tests.parity.interruption import train_with
from tests.ranks import Ranks, single
from tests.runs import Values, records

pytestmark = pytest.mark.usefixtures("one_thread")


def train(*given: Any, **changes: Any) -> Values:
    """Train in this process: a folder, the step to die before, and `--resume`."""
    return resume.train(single(), *given, **changes)


def joined(batches: Iterable[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@on(
    ("ddp-torchrun", 2),
    pytest.param(("ddp-torchrun", 3), marks=pytest.mark.exhaustive),
    pytest.param(("horovod-mpi", 2), marks=pytest.mark.exhaustive),
)
@pytest.mark.parametrize("name", ["plain", "stream"])
def test_across_backends_and_world_sizes(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """One process stops in the middle of an epoch; these ranks go on: each sample once an epoch."""
    first = train_with(single(), tmp_path, name, stop_at=6)
    rest = ranks.run(train_with, tmp_path, name, resume="auto")
    # Steps 1 to 5 have checkpoints: the sixth is taken again.
    seen = [joined(r["seen"][i] for r in rest) for i in range(len(rest[0]["seen"]))]
    taken = first["seen"][:5] + seen
    whole = train_with(single(), tmp_path / "whole", name)
    assert [sorted(batch) for batch in taken] == [sorted(batch) for batch in whole["seen"]]
    assert rest[0]["rates"] == whole["rates"][-len(rest[0]["rates"]) :]
    assert len({r["digest"] for r in rest}) == 1
    skipped = "data     skipping the 24 samples used before the checkpoint" in rest[0]["lines"]
    assert skipped == (name == "stream"), "data with an index are not read"


def test_a_smaller_step_after_resuming(tmp_path: Path) -> None:
    """Another global batch: the position counts samples, so none is lost or repeated."""
    train(tmp_path, 3)
    rest = train(tmp_path, resume="auto", global_batch_size=6)
    whole = joined(train(tmp_path / "whole")["seen"])
    assert joined(rest["seen"][:4]) == whole[24:48]
    # Two steps of 12, then 4 of 6, and two epochs of 8.
    assert rest["step"] == 2 + 4 + 8 + 8


def test_a_larger_step_than_is_left_of_the_epoch(tmp_path: Path) -> None:
    """It took no step, and evaluated for ever. Then epochs of two steps are left, or none."""
    for epoch, left in ((0, 4), (2, 0)):
        folder = tmp_path / str(epoch)
        train(folder, 4 * epoch + 4)
        rest = train(folder, resume="auto", global_batch_size=24)
        # After 36 of 50 samples, a step of 24 would need 60.
        assert (rest["step"], len(rest["seen"])) == (4 * epoch + 3 + left, left)


def test_another_rate_after_resuming_with_a_plateau(tmp_path: Path) -> None:
    """This run's learning rate counts; with other schedules: training/test_schedule.py."""
    whole = train(tmp_path / "whole", own_schedule="plateau")
    train(tmp_path / "parts", 10, own_schedule="plateau")
    rest = train(tmp_path / "parts", resume="auto", own_schedule="plateau", lr=0.2)
    assert len(set(whole["rates"][:10])) > 1, "nothing has dropped before the stop"
    assert rest["rates"][0] == pytest.approx(10 * whole["rates"][9])


@pytest.mark.parametrize("steps", [0, 2])
def test_a_shorter_warm_up_after_resuming(tmp_path: Path, steps: int) -> None:
    """The rate of a plateau is then the whole one, not that of the warm-up when it was saved."""
    options: Values = {"schedule": "plateau:loss:9"}
    train(tmp_path, 4, warmup_steps=8, **options)
    rest = train(tmp_path, resume="auto", warmup_steps=steps, **options)
    assert set(rest["rates"]) == {0.02}


def test_another_schedule_after_resuming(tmp_path: Path) -> None:
    """It continues at the epoch, or the step: neither needs a state."""
    train(tmp_path, 10, own_schedule="plateau")
    by_epoch = train(tmp_path, 11, "auto", own_schedule="by epoch")
    assert by_epoch["rates"] == [0.02 * 0.5**2] * 2
    assert train(tmp_path, resume="auto")["step"] == 12


def test_a_larger_step_is_saved_with_the_end_of_the_epoch(tmp_path: Path) -> None:
    """No step is left of the second epoch: its end is evaluated and saved, once."""
    options: Values = {"own_schedule": "by epoch", "keep_best": "loss"}
    train(tmp_path, 8, **options)
    for stop_at in (8, 9, -1):  # before the first step's checkpoint, and before the second's
        train(tmp_path, stop_at, "auto", global_batch_size=24, **options)
    evaluated = [(r["step"], r["epoch"]) for r in records(tmp_path) if "eval_loss" in r]
    assert evaluated == [(4, 1), (7, 2), (9, 3)]
    assert [r["lr"] for r in records(tmp_path) if r["step"] == 9 and "lr" in r] == [0.005]


def test_a_run_that_has_nothing_left_to_do_is_saved_in_its_own_directory(tmp_path: Path) -> None:
    """Else `--resume auto` starts afresh there."""
    once: Values = {"checkpoint_every": 100}
    train(tmp_path / "first", **once)
    last = tmp_path / "first/checkpoints/step-00000012"
    again = train(tmp_path / "second", resume=str(last), **once)
    assert again["step"] == 12
    assert (tmp_path / "second/checkpoints" / last.name).is_dir()
    more = train(tmp_path / "second", resume="auto", epochs=4, **once)
    assert more["step"] == 16
    assert len(more["seen"]) == 4


def test_another_precision_after_resuming(tmp_path: Path) -> None:
    """From fp32 to fp16, whose gradient scaler the checkpoint knows nothing of."""
    train(tmp_path, 3)
    assert train(tmp_path, resume="auto", precision="fp16")["step"] == 12
