"""The commits of an elastic run: streams, and epochs that end with a world.

test_interruption.py compares the bits at one world size;
tests/launch/test_elastic_training.py has worlds that really change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from hvdtrain import Callback, Trainer
from hvdtrain.errors import PeerLost
from hvdtrain.training.commits import Commits
from tests.parity.resume import CONFIG, Stateful
from tests.ranks import single
from tests.runs import records, run_json

pytestmark = pytest.mark.usefixtures("one_thread")

EVERY: dict[str, Any] = {"checkpoint_every": 100}


class Stream(IterableDataset[tuple[Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        inputs = torch.randn(50, 5, generator=torch.Generator().manual_seed(2))
        return iter([(row, number) for number, row in enumerate(inputs)])

    def __len__(self) -> int:
        return 50


class OfStream(Stateful):
    def datasets(self) -> tuple[Stream, None]:
        return Stream(), None


class LoseAPeer(Callback):
    """Loses a peer, as a collective would, after the step that the test sets."""

    after = 0

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.after:
            raise PeerLost("rank 1 has ended")


def test_a_stream_goes_on_where_the_commit_is(tmp_path: Path) -> None:
    config = replace(CONFIG, run_dir=str(tmp_path), callback=(f"{__name__}:LoseAPeer",), **EVERY)
    backend, commits, task = single(), Commits(2), OfStream()
    commits.agree(backend)
    LoseAPeer.after = 7
    for _ in range(2):
        with pytest.raises(PeerLost) as lost:
            Trainer(task, backend, config, commits=commits).fit()
        assert commits.ends_world(lost.value)
        assert run_json(tmp_path)["outcome"] == "running"
        commits.leave(lost.value, 7)
        commits.agree(backend)
    commits.leave(PeerLost("while the ranks meet"), None)  # what was lost before is not forgotten
    commits.agree(backend)
    LoseAPeer.after = 0
    assert Trainer(task, backend, config, commits=commits).fit().steps == 12
    numbers = [range(first, first + 12) for first in range(0, 48, 12)]
    epoch = [list(batch) for batch in numbers]
    assert task.seen == [*epoch, *epoch[:3], epoch[2], *epoch[2:], *epoch]
    assert "lost 1 step since the commit at step 6 (while the ranks meet)" in commits.describe()


def test_every_epoch_is_recorded_and_evaluated(tmp_path: Path) -> None:
    """Also the one after whose last step a world ends, and the one of which a larger step of the
    next world leaves no step: a schedule by epoch is stepped, and `on_epoch_end` called.
    """
    config = replace(
        CONFIG, run_dir=str(tmp_path), schedule="constant", warmup_steps=0, log_every=1, **EVERY
    )
    backend, commits, task = single(), Commits(1), Stateful("by epoch", evaluates=True)
    commits.agree(backend)
    callbacks = CountEpochs(), LoseAPeer()
    for LoseAPeer.after in (5, 8):  # the commits are at step 4, an epoch's end, and 7
        with pytest.raises(PeerLost) as lost:
            Trainer(task, backend, config, callbacks=callbacks, commits=commits).fit()
        commits.leave(lost.value, LoseAPeer.after)
        commits.agree(backend)
    LoseAPeer.after = 0
    larger = replace(config, global_batch_size=24)
    trainer = Trainer(task, backend, larger, callbacks=callbacks, commits=commits)
    assert trainer.fit().steps == 7 + 2
    seen = [
        (one["epoch"], one["from_sample"], one["samples_by_rank"])
        for one in run_json(tmp_path)["seen"]
    ]
    assert seen == [(1, 0, [48]), (2, 36, [0]), (3, 0, [48])]
    evaluated = [record["epoch"] for record in records(tmp_path) if "eval_loss" in record]
    assert evaluated == [1, 2, 3] == CountEpochs.ended
    rates = [record["lr"] for record in records(tmp_path) if "lr" in record]
    assert rates == pytest.approx([0.02] * 4 + [0.01] * 3 + [0.005] * 2)


class CountEpochs(Callback):
    """Lists the epochs that have ended."""

    ended: ClassVar[list[int]] = []

    def on_epoch_end(self, trainer: Trainer) -> None:
        self.ended.append(trainer.progress.epoch)
