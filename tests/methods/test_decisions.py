"""Early stop, best checkpoint and plateau: decided on reduced values, and resumed exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import Dataset, TensorDataset

from hvdtrain import Backend, Task, TrainConfig, Trainer
from hvdtrain.errors import InputError
from hvdtrain.training import checkpoint
from hvdtrain.training.callbacks.best_so_far import BestSoFar
from hvdtrain.training.criterion import Criterion
from tests.messages import Message
from tests.methods.arms import KEPT, WITH_HOROVOD
from tests.ranks import Ranks, single
from tests.runs import Stop, records, run_json, watch, whole_and_rest

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


class Scripted(Task):
    """Evaluates to what SCRIPT says."""

    trainer: Trainer

    def model(self) -> nn.Module:
        return nn.Linear(3, 1)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1)), TensorDataset(torch.arange(5))

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = (net(batch[0]).squeeze(1) - batch[1]).square().mean()
        return loss

    def metrics(self, net: nn.Module, batch: Any) -> dict[str, Any]:
        values = torch.tensor(SCRIPT[self.trainer.progress.step // 2 - 1], dtype=torch.float64)
        return {"accuracy": values[batch[0]].mean(), "shape": values[batch[0]].mean()}


CONFIG = TrainConfig(
    task="scripted", epochs=6, global_batch_size=6, threads=1, keep=1, early_stop="accuracy:3"
)  # two steps an epoch


def run(
    backend: Backend, /, folder: Path, kill_at: int = -1, resume: str = "none", **changes: Any
) -> dict[str, Any]:
    """Train on this rank; return the outcome, the rate of each step, and the best weights."""
    config = replace(CONFIG, run_dir=str(folder), resume=resume, **changes)
    task = Scripted()
    trainer = task.trainer = Trainer(task, backend, config)
    rates: list[float] = []
    printed: list[str] = []

    def advance(step: int) -> None:
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        if step == kill_at:
            raise Stop

    watch(trainer, advance, printed)
    try:
        result = trainer.fit()
    except Stop:
        return {}
    return {
        "step": result.steps,
        "digest": result.params_sha256,
        "best": result.best_checkpoint,
        "rates": rates,
        "printed": printed,
    }


@pytest.mark.parametrize("ranks", WITH_HOROVOD, indirect=True)
def test_all_ranks_stop_at_the_same_evaluation(
    ranks: Ranks, tmp_path: Path, message: Message
) -> None:
    outcomes = ranks.run(run, tmp_path, keep_best="accuracy")
    # The second evaluation is the best; the third, fourth and fifth do not improve on it.
    assert [out["step"] for out in outcomes] == [10] * ranks.n
    best = tmp_path / "checkpoints" / "step-00000004"
    assert {out["best"] for out in outcomes} == {best}
    names = [path.name for path in checkpoint.list_checkpoints(tmp_path / "checkpoints")]
    assert names == ["step-00000004", "step-00000010"], "--keep 1, and the best"
    assert [checkpoint.problem(tmp_path / "checkpoints" / name) for name in names] == [None, None]
    described = run_json(tmp_path)
    assert described["outcome"] == "finished"
    stopped = described["stopped_early"]
    assert (stopped["step"], stopped["of"]) == (10, 12)
    message(stopped["reason"])
    value = described["best_checkpoint"].pop("value")
    assert value == pytest.approx(MEANS[1])
    assert described["best_checkpoint"] == {
        "step": 4,
        "metric": "accuracy",
        "mode": "max",
        "path": str(best),
    }


@pytest.mark.parametrize("ranks", KEPT, indirect=True)
@pytest.mark.parametrize("warmup", [0, 3])
def test_plateau_has_the_rates_of_torch_in_one_process(
    ranks: Ranks, warmup: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"schedule": "plateau:accuracy:0:0.3"}
    outcomes = ranks.run(run, tmp_path, early_stop=None, warmup_steps=warmup, **options)
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
    assert any(line.startswith("stopped  at step 10 of 12") for line in again["printed"])
    assert run_json(tmp_path)["stopped_early"]["step"] == 10
    longer = run(single(), tmp_path, resume="must", early_stop="accuracy:5")
    assert longer["step"] == 12
    assert longer["digest"] == run(single(), tmp_path / "whole", early_stop=None)["digest"]
    assert "stopped_early" not in run_json(tmp_path)


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"early_stop": "accuracy:4"}, 12),  # with the last evaluation: no early stop
        ({"eval_every": "2e", "early_stop": "accuracy:1"}, 8),  # 0.5, 0.45, 0.1
    ],
)
def test_patience_counts_evaluations(changes: dict[str, Any], step: int, tmp_path: Path) -> None:
    assert run(single(), tmp_path, **changes)["step"] == step
    assert ("stopped_early" in run_json(tmp_path)) == (step < 12)


@pytest.mark.parametrize("ranks", [("ddp-torchrun", 2)], indirect=True)
def test_evaluations_in_the_middle_of_an_epoch(ranks: Ranks, tmp_path: Path) -> None:
    """Of three steps an epoch. The fifth evaluation stops the run, also if it was interrupted."""
    options: dict[str, Any] = {"global_batch_size": 4, "epochs": 4, "eval_every": 2}
    options["keep_best"] = "accuracy"
    for one, other in zip(*whole_and_rest(ranks, run, tmp_path, 8, **options), strict=True):
        assert one["step"] == other["step"] == 10
        assert one["best"].name == other["best"].name == "step-00000004"
    for name in ("whole", "parts"):
        steps = [r["step"] for r in records(tmp_path / name) if "eval_accuracy" in r]
        assert steps == [2, 4, 6, 8, 10]
        assert checkpoint.problem(tmp_path / name / "checkpoints" / "step-00000010") is None


def test_the_best_has_the_weights_of_its_step(tmp_path: Path) -> None:
    run(single(), tmp_path / "whole", early_stop=None, keep_best="accuracy", checkpoint_every=100)
    run(single(), tmp_path / "short", early_stop=None, max_steps=4)
    weights = [
        checkpoint.load(tmp_path / name / "checkpoints" / "step-00000004", "model")
        for name in ("whole", "short")
    ]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])


def test_a_best_checkpoint_that_is_damaged_is_named(tmp_path: Path) -> None:
    run(single(), tmp_path, kill_at=7, keep_best="accuracy")
    (tmp_path / "checkpoints" / "step-00000004" / "COMPLETE").unlink()
    out = run(single(), tmp_path, resume="must", keep_best="accuracy")
    assert out["best"] is None
    (line,) = [line for line in out["printed"] if "WARNING" in line]
    assert "step-00000004: it is incomplete" in line


def test_another_metric_after_resuming_starts_afresh(tmp_path: Path) -> None:
    run(single(), tmp_path, kill_at=7)
    assert run(single(), tmp_path, resume="must", early_stop="accuracy:min:3")["step"] == 12


@pytest.mark.parametrize("mode", ["min", "max"])
def test_an_improvement_is_larger_than_delta(mode: str) -> None:
    criterion, sign = Criterion("loss", mode, 3, delta=0.5), 1 if mode == "max" else -1
    assert not criterion.is_better(sign * 1.5, than=sign * 1.0)
    assert criterion.is_better(sign * 1.75, than=sign * 1.0)


NEEDS_A_METRIC: list[dict[str, Any]] = [
    {"early_stop": "f1:2"},
    {"keep_best": "f1"},
    {"schedule": "plateau"},
]


@pytest.mark.parametrize("options", NEEDS_A_METRIC, ids=str)
def test_a_metric_that_is_not_there(
    options: dict[str, Any], tmp_path: Path, message: Message
) -> None:
    with pytest.raises(InputError) as raised:
        run(single(), tmp_path, **{"early_stop": None, **options})
    assert raised.value.on_all_ranks
    message(raised.value)


class Blind(Scripted):
    def datasets(self) -> tuple[Dataset[Any], Any]:
        return super().datasets()[0], None


def test_without_evaluation_data_it_is_refused(tmp_path: Path, message: Message) -> None:
    config = replace(CONFIG, run_dir=str(tmp_path / "run"))
    with pytest.raises(InputError) as raised:
        Trainer(Blind(), single(), config).fit()
    message(raised.value)
    assert not (tmp_path / "run").exists()


# The options


@pytest.mark.parametrize(
    ("text", "metric", "mode", "patience"),
    [
        ("loss:3", "loss", "min", 3),
        ("eval_loss:3", "loss", "min", 3),
        ("accuracy:1", "accuracy", "max", 1),
        ("top5_accuracy:10", "top5_accuracy", "max", 10),
        ("val-F1:2", "val-F1", "max", 2),
        ("loss:max:3", "loss", "max", 3),
        ("shape:min:7", "shape", "min", 7),
    ],
)
def test_what_a_criterion_says(text: str, metric: str, mode: str, patience: int) -> None:
    config = TrainConfig(
        schedule=f"plateau:{text}", early_stop=f"{text}:0.5", keep_best=text.rpartition(":")[0]
    )
    config.check()
    assert config.early_stop_criterion() == Criterion(metric, mode, patience, 0.5)
    assert config.schedule_option().criterion == Criterion(metric, mode, patience)
    assert config.keep_best_criterion() == Criterion(metric, mode)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_no_improvement(mode: str) -> None:
    best, trainer = BestSoFar(Criterion("x", mode)), Trainer(Scripted(), single())
    for step, value in enumerate([float("nan"), 1, 1, float("nan")]):
        trainer.progress.step = step
        best.on_evaluate(trainer, {"x": value})
    assert (best.value, best.step, best.since) == (1.0, 1, 2)
