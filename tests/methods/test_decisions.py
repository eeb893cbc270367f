"""Early stop, best checkpoint and plateau: decided on reduced values, and resumed exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset, TensorDataset

from hvdtrain import Backend, TrainConfig, Trainer
from hvdtrain.errors import InputError
from hvdtrain.training import checkpoint
from hvdtrain.training.callbacks.best_so_far import BestSoFar
from hvdtrain.training.criterion import Criterion
from tests.messages import Message
from tests.methods.arms import EVERYWHERE, WITH_HOROVOD
from tests.methods.data_runs import Regression
from tests.parity.resume import Stateful, fit
from tests.ranks import Ranks, single
from tests.runs import Values, fit_watched, run_json, saved_steps

pytestmark = pytest.mark.usefixtures("one_thread")


# Accuracy of each of five samples, at the evaluation after each second step. The mean improves
# twice (0.3, 0.5, then 0.4, 0.45, 0.44, 0.1). Samples go to ranks in turn, and each rank's own mean
# goes another way: rank 0 of two (samples 0, 2, 4) improves at the fourth evaluation.
SCRIPT = (
    (0.1, 0.9, 0.1, 0.3, 0.1),
    (0.2, 1.0, 0.2, 0.9, 0.2),
    (0.1, 0.8, 0.1, 0.9, 0.1),
    (0.6, 0.2, 0.6, 0.25, 0.6),
    (0.4, 0.5, 0.4, 0.5, 0.4),
    (0.1, 0.1, 0.1, 0.1, 0.1),
)
MEANS = [sum(values) / 5 for values in SCRIPT]


class Scripted(Regression):
    """Evaluates to what SCRIPT says."""

    trainer: Trainer

    def __init__(self) -> None:
        super().__init__(12)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        return super().datasets()[0], TensorDataset(torch.arange(5))

    def metrics(self, net: nn.Module, batch: Any) -> Values:
        values = torch.tensor(SCRIPT[self.trainer.progress.step // 2 - 1], dtype=torch.float64)
        return {"accuracy": values[batch[0]].mean(), "shape": values[batch[0]].mean()}


OPTIONS: Values = {"epochs": 6, "global_batch_size": 6, "keep": 1, "early_stop": "accuracy:3"}
CONFIG = TrainConfig(**OPTIONS, threads=1, precision="fp64")  # two steps an epoch


def run(backend: Backend, /, folder: Path, stop_at: int = -1, **changes: Any) -> Values:
    """Train on this rank, or die before step `stop_at`; return what `fit_watched` does."""
    config = replace(CONFIG, run_dir=str(folder), **changes)
    task = Scripted()
    task.trainer = Trainer(task, backend, config)
    return fit_watched(task.trainer, stop_at)


@WITH_HOROVOD
def test_all_ranks_stop_at_the_same_evaluation(
    ranks: Ranks, tmp_path: Path, message: Message
) -> None:
    outcomes = ranks.run(run, tmp_path, keep_best="accuracy")
    # The second evaluation is the best; the third, fourth and fifth do not improve on it.
    best = tmp_path / "checkpoints" / "step-00000004"
    assert {(out["step"], out["best"]) for out in outcomes} == {(10, best)}
    assert saved_steps(tmp_path) == [4, 10], "--keep 1, and the best"
    for path in best.parent.iterdir():
        assert checkpoint.problem(path) is None
    about = run_json(tmp_path)
    assert about["outcome"] == "finished"
    message(about["stopped_early"].pop("reason"))
    assert about["stopped_early"] == {"step": 10, "of": 12}
    assert about["best_checkpoint"].pop("value") == pytest.approx(MEANS[1])
    wanted = {"step": 4, "metric": "accuracy", "mode": "max", "path": str(best)}
    assert about["best_checkpoint"] == wanted


@EVERYWHERE
@pytest.mark.parametrize("warmup", [0, 3])
def test_plateau_has_the_rates_of_torch_in_one_process(
    ranks: Ranks, warmup: int, tmp_path: Path
) -> None:
    outcomes = ranks.run(
        run, tmp_path, early_stop=None, warmup_steps=warmup, schedule="plateau:accuracy:0:0.3"
    )
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    plain = ReduceLROnPlateau(optimizer, "max", factor=0.3, patience=0)
    expected = []
    for epoch, mean in enumerate(MEANS, 1):
        # `run` reads the rate after each step, and before its evaluation.
        for step in (2 * epoch - 1, 2 * epoch):
            warm = (step + 1) / (warmup + 1) if step < warmup else 1.0
            expected.append(warm * optimizer.param_groups[0]["lr"])
        if 2 * epoch >= warmup:
            plain.step(mean)
    for out in outcomes:
        assert out["rates"] == expected
    ledger = run_json(tmp_path)["ledger"]
    assert ledger["lr_at_start"] == pytest.approx([0.1 / (warmup + 1)])
    assert ledger["lr_at_end"] is None, "evaluations decide"
    assert expected[-1] < 0.01, "it has dropped more than twice"


def test_an_early_stopped_run_is_done(tmp_path: Path) -> None:
    """Resumed with the same patience it takes no step; with more it goes on as if it always had."""
    first = run(single(), tmp_path)
    again = run(single(), tmp_path, resume="must")
    assert (again["step"], again["digest"], again["rates"]) == (10, first["digest"], [])
    assert any(line.startswith("stopped  at step 10 of 12") for line in again["lines"])
    assert run_json(tmp_path)["stopped_early"]["step"] == 10
    longer = run(single(), tmp_path, resume="must", early_stop="accuracy:5")
    whole = run(single(), tmp_path / "whole", early_stop=None)
    assert (longer["step"], longer["digest"]) == (12, whole["digest"])
    assert "stopped_early" not in run_json(tmp_path)


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"early_stop": "accuracy:4"}, 12),  # with the last evaluation: no early stop
        ({"eval_every": "2e", "early_stop": "accuracy:1"}, 8),  # 0.5, 0.45, 0.1
        # In the middle of epochs of three steps.
        ({"eval_every": 2, "global_batch_size": 4, "epochs": 4}, 10),
    ],
)
def test_patience_counts_evaluations(changes: Values, step: int, tmp_path: Path) -> None:
    assert run(single(), tmp_path, **changes)["step"] == step
    assert ("stopped_early" in run_json(tmp_path)) == (step < 12)


def test_a_best_checkpoint_that_is_damaged_is_named(tmp_path: Path) -> None:
    run(single(), tmp_path, stop_at=7, keep_best="accuracy")
    (tmp_path / "checkpoints" / "step-00000004" / "COMPLETE").unlink()
    out = run(single(), tmp_path, resume="must", keep_best="accuracy")
    assert out["best"] is None
    (line,) = [line for line in out["lines"] if "WARNING" in line]
    assert "step-00000004: it is incomplete" in line


def test_another_metric_after_resuming_starts_afresh(tmp_path: Path) -> None:
    run(single(), tmp_path, stop_at=7)
    assert run(single(), tmp_path, resume="must", early_stop="accuracy:min:3")["step"] == 12


NEVER: Values = {"eval_every": "never"}
PLATEAU: Values = {"own_schedule": "plateau"}


@pytest.mark.parametrize(
    ("of_task", "options"),
    [
        *(({}, each) for each in ({"early_stop": "f1:2"}, {"keep_best": "f1"})),
        *(({}, each) for each in ({"schedule": "plateau:f1:2"}, {**NEVER, "keep_best": "loss"})),
        *(({}, {"early_stop": "loss:2", **NEVER}), ({}, {"schedule": "plateau:loss:2", **NEVER})),
        ({"evaluates": False}, {"early_stop": "loss:2"}),
        *(({**PLATEAU, "schedule_metric": "score"}, {}), ({**PLATEAU, "evaluates": False}, {})),
    ],
    ids=str,
)
def test_what_needs_an_evaluation_that_there_is_not(
    of_task: Values, options: Values, tmp_path: Path, message: Message
) -> None:
    """No metric of that name, no evaluation data, or no evaluation: found before the first step."""
    folder = tmp_path / "run"
    with message.raises(InputError) as raised:
        fit(folder, task=Stateful(**of_task), **{"warmup_steps": 0, **options})
    assert raised.value.on_all_ranks
    assert folder.exists() == ("need evaluations" not in str(raised.value))
    assert saved_steps(folder) == []


# The options


@pytest.mark.parametrize(
    ("text", "metric", "mode", "patience"),
    [
        ("loss:3", "loss", "min", 3),
        ("eval_loss:3", "loss", "min", 3),
        ("top5_accuracy:10", "top5_accuracy", "max", 10),
        ("val-F1:2", "val-F1", "max", 2),
        ("loss:max:3", "loss", "max", 3),
    ],
)
def test_what_a_criterion_says(text: str, metric: str, mode: str, patience: int) -> None:
    config = TrainConfig(early_stop=f"{text}:0.5", keep_best=text.rpartition(":")[0])
    config.check()
    assert config.early_stop_criterion() == Criterion(metric, mode, patience, 0.5)
    assert config.keep_best_criterion() == Criterion(metric, mode)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_an_improvement_is_larger_than_delta_and_never_nan(mode: str) -> None:
    sign = 1 if mode == "max" else -1
    best, trainer = BestSoFar(Criterion("x", mode, delta=0.5)), Trainer(Scripted(), single())
    for step, value in enumerate([float("nan"), 1, 1, float("nan"), 1 + sign * 0.5]):
        trainer.progress.step = step
        best.on_evaluate(trainer, {"x": value})
    assert (best.value, best.step, best.since) == (1.0, 1, 3)
    assert best.criterion.is_better(1 + sign * 0.75, than=1)
