"""What a run shows of itself: TensorBoard files, steps left out, trackers."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from hvdtrain import Backend
from hvdtrain.errors import InputError, TrainingDiverged
from hvdtrain.training.metrics import fingerprint
from tests.launching import ROOT
from tests.messages import Message
from tests.methods.arms import EVERYWHERE, TWO
from tests.methods.test_callbacks import Recorder, fit_on_rank
from tests.parity.resume import Dies, Stateful, fit, fit_on
from tests.ranks import Ranks
from tests.runs import Values, records

pytestmark = pytest.mark.usefixtures("one_thread")


# TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the event files with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {
        tag: [(event.step, event.value) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


@TWO
def test_tensorboard_has_what_metrics_jsonl_has(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    ranks.run(fit_on_rank, tmp_path, tensorboard=True, epochs=2)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1, "rank 0 alone writes"
    found = scalars(tmp_path)
    assert {"train/loss", "train/step_ms", "eval/loss"} <= set(found)
    for record in records(tmp_path):
        for name, value in record.items():
            if name != "step":
                tag = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
                assert dict(found[tag])[record["step"]] == pytest.approx(value, rel=1e-6)


def test_tensorboard_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: Message
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with message.raises(InputError):
        fit(tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()


def test_a_resumed_run_records_no_step_twice(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options: Values = {"tensorboard": True, "log_every": 1, "checkpoint_every": 3}
    with pytest.raises(ArithmeticError):
        fit(tmp_path, Dies(5), **options)
    fit(tmp_path, resume="must", **options)
    assert [step for step, _ in scalars(tmp_path)["train/loss"]] == [*range(1, 13)]


# Steps that are left out


class Poisoned(Stateful):
    """One sample makes the loss, or a gradient alone, not finite, or large."""

    def __init__(self, sample: int, kind: str) -> None:
        super().__init__()
        self.sample, self.kind = sample, kind

    def loss(self, net: nn.Module, batch: Any) -> Any:
        loss = super().loss(net, batch)
        is_bad = net.training and self.sample in batch[1].tolist()
        if self.kind != "grad":
            loss = loss * (math.nan if is_bad else 1.0)
            return (loss, 1.0) if self.kind == "loss with weights" else loss
        if not is_bad:
            return loss
        # The loss is finite, the gradient of a square root at 0 is not.
        (bias,) = [p for name, p in net.named_parameters() if name.endswith("body.0.bias")]
        return loss + (bias * 0).abs().sqrt().sum()


def fit_poisoned(
    backend: Backend, /, folder: Path, kind: str, sample: int = 17, **changes: Any
) -> Values:
    """Train with a sample that is used at the end of the first epoch."""
    task, recorder, error = Poisoned(sample, kind), Recorder(), ""
    try:
        fit_on(backend, folder, recorder, task=task, **changes)
    except TrainingDiverged as diverged:
        error = str(diverged)
    used = [k for k, seen in enumerate(task.seen) if sample in seen]
    return {"error": error, "micro_batches": used, "states": recorder.weights}


def expected(found: list[Values], epoch: int = 1) -> tuple[int, int]:
    """Return rank and step at which the sample was used in an epoch of 4 steps."""
    used = [(rank, k) for rank, one in enumerate(found) for k in one["micro_batches"]]
    return next((rank, k // 2 + 1) for rank, k in used if k // 8 + 1 == epoch)


ACCUMULATED: Values = {"accumulate": 2, "log_every": 4, "checkpoint_every": 0, "epochs": 3}


@EVERYWHERE
@pytest.mark.parametrize("kind", ["loss", "grad"])
def test_a_bad_step_is_left_out_on_all_ranks(ranks: Ranks, kind: str, tmp_path: Path) -> None:
    """It changes neither weights nor buffers."""
    found = ranks.run(fit_poisoned, tmp_path, kind, on_nonfinite="skip", **ACCUMULATED)
    metrics = records(tmp_path)
    skipped = [line for line in metrics if "skipped" in line]
    assert len(skipped) == 3
    for epoch, line in enumerate(skipped, 1):
        rank, step = expected(found, epoch)
        why = f"the loss is nan, first on rank {rank}"
        if kind == "grad":  # the loss is finite
            why = "the norm of the gradient is nan, first in the gradient of body.0.bias"
        assert (line["step"], line["skipped"]) == (step, why)
    for one in found:
        for step in (line["step"] for line in skipped if line["step"] > 1):
            before, after = one["states"][step - 2 : step]
            assert any("running_mean" in name for name in before)
            assert fingerprint(before) == fingerprint(after)
    assert all(
        math.isfinite(r[name]) for r in metrics for name in ("loss", "eval_loss") if name in r
    )
    assert [r["step"] for r in metrics if "eval_loss" in r] == [4, 8, 12]


@TWO
@pytest.mark.parametrize(
    ("kind", "changes", "where"),
    [
        ("loss", {}, "step 2 on rank {rank}"),
        ("loss with weights", {}, "step 2 on rank {rank}"),
        # The loss is finite; that of the next step is not, with these weights.
        ("grad", {}, "step 3 on rank 0"),
        ("grad", {"log_every": 1, "clip_norm": 0.5}, "the gradient of body.0.bias"),
    ],
    ids=str,
)
def test_a_run_that_stops_names_the_first_loss_or_gradient(
    ranks: Ranks, kind: str, changes: Values, where: str, tmp_path: Path
) -> None:
    """Also of step 2, where only every fourth is logged."""
    found = ranks.run(fit_poisoned, tmp_path, kind, sample=14, **{**ACCUMULATED, **changes})
    rank, step = expected(found)
    assert step == 2
    for one in found:
        assert f", first in {where.format(rank=rank)}; lower" in one["error"]


def test_ten_bad_steps_in_a_row_end_the_run(tmp_path: Path, message: Message) -> None:
    options: Values = {"on_nonfinite": "skip", "global_batch_size": 50, "epochs": 12}
    with message.raises(TrainingDiverged):
        fit(tmp_path, task=Poisoned(17, "loss"), **options)


# Trackers

TRACKERS = ROOT / "examples" / "trackers.py"

# What the adapters call, with the signatures of wandb 0.31 and mlflow 3.17; they write files.
WANDB = """
import json
class Run:
    def log(self, data, step=None, commit=None): write("log", step, data)
    def finish(self, exit_code=None): write("finish")
def init(entity=None, project=None, dir=None, id=None, name=None, config=None, resume=None):
    write("start", id, config["run_dir"])
    return Run()
"""
MLFLOW = """
import json
def start_run(run_id=None, experiment_id=None, run_name=None): write("start", run_name)
def log_params(params, synchronous=None): write("start", run_name_of(params), params["run_dir"])
def run_name_of(params): return params["run_dir"].rpartition("/")[2]
def log_metrics(metrics, step=None, synchronous=None): write("log", step, metrics)
def end_run(status="FINISHED"): write("finish")
"""
WRITE = "def write(*what):\n    print(json.dumps(what), file=open({!r}, 'a'), flush=True)\n"


def fit_tracked(backend: Backend, /, folder: Path, name: str) -> None:
    """Train with a module of a tracker's name on the path, on this rank."""
    sys.path.insert(0, str(folder))
    try:
        fit_on(backend, folder / "run", callback=(f"{TRACKERS}:{name}",), epochs=2)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(name, None)


@TWO
@pytest.mark.parametrize(("name", "module"), [("wandb", WANDB), ("mlflow", MLFLOW)])
def test_a_tracker_gets_what_is_logged(
    ranks: Ranks, name: str, module: str, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    (tmp_path / f"{name}.py").write_text(module + WRITE.format(str(calls)))
    ranks.run(fit_tracked, tmp_path, name)
    found = [json.loads(line) for line in calls.read_text().splitlines()]
    assert ["start", "run", str(tmp_path / "run")] in found
    assert [call[0] for call in found].count("finish") == 1, "rank 0 alone"
    assert found[-1] == ["finish"]
    logged = [{"step": call[1], **call[2]} for call in found if call[0] == "log"]
    for line in logged:
        line.pop("time", None)
    assert logged == records(tmp_path / "run")
