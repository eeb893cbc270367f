"""The Trainer: what callbacks ask of it, and what it logs and records."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import random
import re
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import MeanMetric

from hvdtrain import Backend, BackendOptions, Callback, TrainConfig, Trainer, World
from hvdtrain.backends.single import Single
from hvdtrain.errors import CheckpointError, InputError, Preempted, TrainingDiverged, WorldMismatch
from hvdtrain.training import run_report, stepper, weights
from hvdtrain.training.metrics import agreed_fingerprint
from hvdtrain.training.stepper import Meter
from hvdtrain.training.task import load_task, name_of
from tests.conftest import TWO_RANKS
from tests.forkserver import warm
from tests.launching import ROOT, run, succeed
from tests.messages import Message
from tests.methods.arms import TWO, on
from tests.parity.resume import Asks, Dies, Net, Stateful, fit, fit_on, preempt
from tests.ranks import Ranks, single
from tests.runs import Values, records, run_json, saved_steps

pytestmark = pytest.mark.usefixtures("one_thread")


class Frozen(Stateful):
    """Its BatchNorm is in eval mode, and the other modules are not; or the whole model is."""

    whole: bool
    modes: list[tuple[bool, bool]]

    def model(self) -> nn.Module:
        net = super().model()
        (net if self.whole else net.get_submodule("body.1")).eval()
        return net

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        self.modes.append((net.training, net.get_submodule("body.1").training))
        return super().loss(net, batch)


@pytest.mark.parametrize(
    ("whole", "options"), [(False, {}), (True, {"sync_bn": True}), (False, {"ema": 0.9})]
)
def test_what_the_task_has_frozen_stays_frozen(
    whole: bool, options: Values, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Frozen(whole=whole, modes=[])
    trainer = fit(tmp_path, task=task, epochs=2, **options)
    assert set(task.modes) == {(True, whole), (False, False)}
    assert trainer.model.get_buffer("body.1.running_mean").any().item() == whole
    shown = "model    modules in eval mode, as the task returned them: 1 of 6; they"
    assert (shown in capsys.readouterr().out) != whole


class Noisy(Dataset[Any]):
    """Its samples have noise from three generators, and say which process has made them."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = torch.rand(()) + random.random() + np.random.rand()
        return torch.full((5,), float(noise)), torch.tensor(index), os.getpid()


class Augmented(Stateful):
    def __init__(self) -> None:
        super().__init__()
        self.pids: set[int] = set()
        self.drawn: list[float] = []

    def datasets(self) -> tuple[Dataset[Any], None]:
        return Noisy(50), None

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        *rest, pids = batch
        self.pids |= {*pids.tolist()}
        self.drawn.append(torch.rand(()).item())  # as dropout does
        return super().loss(net, rest)


def test_loader_processes_stay_and_a_resumed_run_has_their_numbers(tmp_path: Path) -> None:
    """Each step has random numbers of its own, too."""
    task, options = Augmented(), {"workers": 2, "epochs": 3, "checkpoint_every": 3}
    fit(tmp_path / "whole", task=task, **options)
    assert len(task.pids) == 2
    assert len(set(task.drawn)) == len(task.drawn) == 12
    assert not multiprocessing.active_children()
    with pytest.raises(ArithmeticError):  # in the middle of the second epoch
        fit(tmp_path / "parts", Dies(7), task=Augmented(), **options)
    fit(tmp_path / "parts", task=Augmented(), resume="must", **options)
    assert weights_of(tmp_path / "parts") == weights_of(tmp_path / "whole")


def weights_of(folder: Path) -> Any:
    """Return the hash of a finished run's weights, and its last evaluation."""
    about = run_json(folder)
    return about["params_sha256"], about["metrics"]


class Measured(Stateful):
    """Draws random numbers in its metrics, and may have a mistake."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.mistake = mistake
        self.metric = MeanMetric()

    def metrics(self, net: nn.Module, batch: Any) -> Values:
        if self.mistake == "metrics":
            raise KeyError("no such thing")
        self.metric.update(torch.rand(()))
        seen = batch[1].tolist()
        found = {"loss": self.loss(net, batch), "drawn": self.metric}
        # What a batch without positives lacks.
        if self.mistake == "late key" and max(seen) < 4:
            return found
        return {**found, "auc": found["loss"]}

    def derived_metrics(self, totals: Values) -> Values:
        if self.mistake == "one batch":  # as a metric that needs both classes
            self.mistake = ""
            raise ValueError("too few samples")
        return {}


def test_a_mistake_in_the_metrics_is_found_before_the_first_step(tmp_path: Path) -> None:
    for step in (0, 4):
        folder = tmp_path / str(step)
        with pytest.raises(KeyError):
            fit(folder, task=Measured("metrics"), no_check=step > 0)
        assert run_json(folder)["last_step"] == step


@TWO
def test_the_check_of_the_metrics_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    checked, unchecked, failed = (
        ranks.run(measured, tmp_path / f"{no_check}-{mistake}", no_check, mistake)[0]
        for no_check, mistake in ((False, ""), (True, ""), (False, "one batch"))
    )
    assert checked == unchecked == failed


def test_a_metric_that_the_first_batch_lacks(tmp_path: Path) -> None:
    options: Values = {"global_batch_size": 4, "epochs": 1, "keep_best": "auc"}
    with pytest.raises(InputError, match="is missing in the evaluation; .* give --no-check"):
        fit(tmp_path / "checked", task=Measured("late key"), **options)
    fit(tmp_path / "run", task=Measured("late key"), no_check=True, **options)
    assert "auc" in run_json(tmp_path / "run")["metrics"]


def measured(backend: Backend, /, folder: Path, no_check: bool, mistake: str) -> Any:
    fit_on(backend, folder, task=Measured(mistake), no_check=no_check, epochs=2)
    return backend.broadcast_object(weights_of(folder) if backend.world.rank == 0 else None)


# Requests


def test_every_request_gets_its_checkpoint(tmp_path: Path) -> None:
    """After each step, also where no other checkpoint is wanted, and no step but the last is
    logged.
    """
    every = [*range(1, 13)]
    asks = Asks("on_step_end", every, "request_checkpoint")
    fit(tmp_path, asks, checkpoint_every="never", log_every=99)
    # Each is logged for its checkpoint, so that a loss that is not finite is not saved.
    logged = [line["step"] for line in records(tmp_path) if "loss" in line]
    assert saved_steps(tmp_path) == logged == every


def test_a_request_does_not_replace_that_of_a_preemption(tmp_path: Path) -> None:
    asks = Asks("on_step_end", range(1, 13), "request_checkpoint")
    with pytest.raises(Preempted, match="saved after step 6"):
        fit(tmp_path, Asks("on_step_end", [5], preempt), asks, checkpoint_every=0)
    assert saved_steps(tmp_path)[-1] == 6


def test_a_run_that_is_stopped_and_preempted_after_the_same_step_is_finished(
    tmp_path: Path,
) -> None:
    """Resumed, it would go on: the stop is no part of a checkpoint that follows its last step."""
    stops = Asks("on_evaluate", [4], "stop", "enough")
    fit(tmp_path, Asks("on_step_end", [3], preempt), stops)
    about = run_json(tmp_path)
    assert (about["outcome"], about["stopped_early"]["step"]) == ("finished", 4)


# Losses and times


def test_losses_add_up_in_double() -> None:
    """In bfloat16 the sum of a thousand stopped growing."""
    loss = torch.tensor(0.2, dtype=torch.bfloat16)
    sums = Meter(single())
    for step in range(1, 1001):
        sums.count(step, 2, [loss / 2, loss / 2])
    assert sums.flush(1000, None, None)["loss"] == pytest.approx(float(loss), rel=1e-12)


class Clock(Callback):
    """A clock in place of the module `time`: a step takes a second, a checkpoint two hundred."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def on_step_end(self, trainer: Trainer) -> None:
        self.now += 1

    def state_dict(self) -> Values:
        self.now += 100  # called while the checkpoint is written
        return {}

    def on_checkpoint(self, trainer: Trainer, path: Path | None) -> None:
        self.now += 100


def test_times_leave_checkpoints_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(stepper, "time", clock)
    fit(tmp_path, clock, log_every=2, checkpoint_every=2)
    found = [record for record in records(tmp_path) if "step_ms" in record]
    assert [record["step"] for record in found] == [2, 4, 6, 8, 10, 12]
    # A record is made before the callback ends its step: the first of an epoch has one second.
    times = [(record["step_ms"], record["samples_per_s"]) for record in found]
    assert times == [(500, 24), (1000, 12)] * 3


# Records


def test_records_may_have_any_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 alone shows and writes them: an error there would leave the others waiting."""
    note = {"epoch": 0.5, "note": "a text", "none": None, "names": ["a"], "rate": 1.23e-5}
    fit(tmp_path, Asks("on_step_end", [4], "log", note), epochs=1)
    shown = "step 4/4  epoch 0.5  rate 1.23e-05"
    assert shown in capsys.readouterr().out.splitlines()
    assert {"step": 4, **note} in records(tmp_path)


# What a task logs


class Logs(Stateful):
    """Logs the mean of the indices of each micro-batch, and twice that of some of them."""

    name: str

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        mean = batch[1].float().mean()
        self.log(self.name, mean)
        if batch[1].min() < 6:
            self.log("rare", 2 * mean.item())
        return super().loss(net, batch)


def logged(backend: Backend, /, folder: Path, name: str = "mean_index") -> list[list[int]]:
    task, options = Logs(name=name), Values(max_steps=4, accumulate=2, checkpoint_every="never")
    fit_on(backend, folder, task=task, **options)
    return task.seen


@on(("ddp-torchrun", 2), ("compat-torchrun", 2))
def test_numbers_that_a_loss_logs_are_means_over_steps_and_ranks(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Two lines of two steps of two micro-batches on each rank; an evaluation logs nothing."""
    seen = ranks.run(logged, tmp_path)
    lines = [record for record in records(tmp_path) if "loss" in record]
    assert [record["step"] for record in lines] == [2, 4]
    for line, record in enumerate(lines):
        batches = [batch for rank in seen for batch in rank[4 * line : 4 * line + 4]]
        means = [sum(batch) / len(batch) for batch in batches]
        assert record["mean_index"] == pytest.approx(sum(means) / 8)
        rare = [2 * mean for mean, batch in zip(means, batches, strict=True) if min(batch) < 6]
        assert record.get("rare") == (pytest.approx(sum(rare) / len(rare)) if rare else None)


def test_a_name_that_every_line_has_is_refused(tmp_path: Path, message: Message) -> None:
    with message.raises(InputError) as refused:
        logged(single(), tmp_path, "lr")
    assert refused.value.on_all_ranks


# Ranks that are not equal


def restarted_on_rank_1(backend: Backend) -> bool:
    env = {"TORCHELASTIC_RESTART_COUNT": str(backend.world.rank)}
    with mock.patch.object(run_report, "launch_env", return_value=env):
        return run_report.is_restart(backend)


@TWO
def test_a_restart_that_one_agent_of_torchrun_counts(ranks: Ranks) -> None:
    assert ranks.run(restarted_on_rank_1) == [True] * 2


class Bypasses(Stateful):
    """Its loss calls the model itself, not the net that it is given."""

    def model(self) -> nn.Module:
        self.own = super().model()
        return self.own

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        return super().loss(self.own, batch)


class Drifts(Callback):
    """Changes the weights of one rank alone."""

    def on_step_end(self, trainer: Trainer) -> None:
        if (trainer.progress.step, trainer.world.rank) == (4, 1):
            next(trainer.model.parameters()).data.add_(1e-6)


def unequal(backend: Backend, /, folder: Path, *callbacks: Callback, task: Any = None) -> str:
    with pytest.raises(WorldMismatch) as caught:
        fit_on(backend, folder, *callbacks, task=task, checkpoint_every=3, epochs=500)
    assert caught.value.on_all_ranks
    return str(caught.value)


@TWO
def test_a_loss_that_leaves_the_net_out_is_found_after_the_first_step(
    ranks: Ranks, tmp_path: Path, message: Message
) -> None:
    for text in ranks.run(unequal, tmp_path, task=Bypasses()):
        digests = re.findall(r"\b[0-9a-f]{12}\b", text)
        assert len(set(digests)) == 2
    message(text, one=digests[0], other=digests[1])
    assert saved_steps(tmp_path) == []


@TWO
def test_ranks_that_drift_apart_are_found_before_the_next_checkpoint(
    ranks: Ranks, tmp_path: Path
) -> None:
    for text in ranks.run(unequal, tmp_path, Drifts()):
        assert text.startswith("the parameters differ after step 6: ")
    assert saved_steps(tmp_path) == [3]


# The best checkpoint


def dies_after_the_best(folder: Path, **changes: Any) -> int:
    """Train until step 6, after the evaluation of the first epoch; return the best step, 4."""
    with pytest.raises(ArithmeticError):
        fit(folder, Dies(6), keep_best="loss", **changes)
    best: int = run_json(folder)["best_checkpoint"]["step"]
    return best


def test_a_resumed_run_knows_its_best_checkpoint_at_once(tmp_path: Path) -> None:
    """Before the next evaluation; also in another run directory than that of the checkpoint, and
    once the run was moved.
    """
    old, moved = tmp_path / "old", tmp_path / "moved"
    assert dies_after_the_best(old) == 4
    for folder in (tmp_path / "new", old):
        assert dies_after_the_best(folder, resume=f"{old}/checkpoints/step-00000005") == 4
        best = old / "checkpoints" / "step-00000004"
        assert run_json(folder)["best_checkpoint"]["path"] == str(best)
        assert weights.find(folder, best=True).path == best
    old.rename(moved)
    assert weights.find(moved, best=True).path == moved / "checkpoints" / best.name


# Resuming


def test_a_run_directory_is_resumed_from_its_newest_valid_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As evaluate and export take it; in a new run directory, and in its own."""
    fit(tmp_path / "whole", epochs=2)
    old = tmp_path / "old"
    fit(old, epochs=1)
    (old / "checkpoints" / "step-00000004" / "model.pt").write_bytes(b"")
    for folder, given in ((tmp_path / "new", old), (old, old / "run.json")):
        fit(folder, resume=str(given), epochs=2)
        assert weights_of(folder) == weights_of(tmp_path / "whole")
        shown = capsys.readouterr().out
        assert "resume   skipped step-00000004: " in shown
        assert f"resume   from {old / 'checkpoints' / 'step-00000003'}, step 3" in shown


def test_a_run_directory_without_a_checkpoint_is_not_resumed(
    tmp_path: Path, message: Message
) -> None:
    with pytest.raises(ArithmeticError):
        fit(tmp_path / "old", Dies(1))
    with message.raises(CheckpointError):
        fit(tmp_path / "new", resume=str(tmp_path / "old"))
    assert not (tmp_path / "new").exists()


# Options


@pytest.mark.parametrize(("option", "saved"), [("checkpoint_every", []), ("eval_every", [4, 8])])
def test_never(
    option: str, saved: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even after the last step, nor the check before the first."""
    changes: Values = {"checkpoint_every": 0, option: "never"}
    fit(tmp_path, epochs=2, **changes)
    assert saved_steps(tmp_path) == saved
    for text in (capsys.readouterr().out, (tmp_path / "metrics.jsonl").read_text()):
        assert ("eval_loss" in text) == (option == "checkpoint_every")


def test_the_weights_of_a_model_with_another_head(
    tmp_path: Path, message: Message, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of one that was trained for other classes; some of its names must be the model's."""
    before = Net().state_dict()
    state = {**before, "head.weight": torch.ones(3, 8), "classes": torch.ones(3)}
    del state["head.bias"]
    path = tmp_path / "other.pt"
    torch.save(state, path)

    def set_up(**options: Any) -> Trainer:
        trainer = Trainer(Stateful(), single(), TrainConfig(init_from=str(path), **options))
        trainer.set_up(record=False)
        return trainer

    with pytest.raises(InputError, match="does not fit this model"):
        set_up()
    trainer = set_up(init_strict=False)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("init "))
    message(line)
    loaded = trainer.model.state_dict()
    assert all(torch.equal(loaded[name], before[name]) for name in before if "body" in name)
    torch.save({"classes": torch.ones(3)}, path)
    with message.raises(InputError):
        set_up(init_strict=False)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        *((Stateful(), {"epoch": 3}), (Stateful, {"epochs": 3}), ("digits", {"epochs": 3})),
        *((Stateful(), {"epochs": 0}), (Stateful(), {"shard_optimizer": True})),
    ],
    ids=["a typing error", "a class", "a name", "a number", "what its backend lacks"],
)
def test_what_a_trainer_cannot_take(task: Any, options: Values, message: Message) -> None:
    with message.raises(InputError):
        Trainer(task, **options)


SCRIPT = """
import hvdtrain
from tests.parity.resume import Stateful

result = hvdtrain.Trainer(Stateful(), epochs=1, batch_size=4, run_dir="run").fit()
print(f"digest {result.params_sha256};")
"""


def test_it_opens_that_of_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    line = warm("torchrun --nproc-per-node 2 own.py".split())
    output = succeed(run(line, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}))
    first, second = re.findall(r"digest (\w{64});", output)
    assert first == second
    assert run_json(tmp_path / "run")["world"]["size"] == 2


def test_options_of_the_backend_count(tmp_path: Path) -> None:
    """run.json has them, and other ones in the configuration are refused."""
    backend = Single(World(), BackendOptions(buffers="local", timeout_s=60))
    trainer = fit_on(backend, tmp_path / "run", epochs=1)
    config = run_json(tmp_path / "run")["config"]
    assert (config["buffers"], config["timeout"]) == ("local", 60)
    assert trainer.config.buffers == "local"
    with pytest.raises(InputError, match="buffers='average', but the backend .* with 'local'; op"):
        fit_on(backend, tmp_path / "other", buffers="average")


def test_a_run_from_python_records_its_task(tmp_path: Path) -> None:
    fit(tmp_path, epochs=1)
    assert run_json(tmp_path)["config"]["task"] == "tests.parity.resume:Stateful"
    assert name_of(load_task("digits")) == "digits"


def test_another_seed_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    """In the middle of one it is refused: tests/test_cli.py."""
    fit(tmp_path, max_steps=8)
    assert fit(tmp_path, resume="must", seed=8).progress.step == 12


def test_max_steps_alone_is_the_length_of_the_run(tmp_path: Path) -> None:
    """Whatever the epochs; with both the run ends at the first of them."""
    for epochs, max_steps, steps in ((None, 47, 47), (2, 47, 8), (None, None, 40)):
        trainer = fit(tmp_path / str(steps), epochs=epochs, max_steps=max_steps)
        assert trainer.progress.step == trainer.ledger.total_steps == steps


class Overflows(Stateful):
    """The losses of some steps are infinite, as are their gradients."""

    at: Sequence[int]

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(net, batch)
        return loss * (math.inf if net.training and len(self.seen) in self.at else 1.0)


def test_the_loss_scaler_leaves_out_a_step_of_an_infinite_loss(tmp_path: Path) -> None:
    """As GradScaler does in a loop of one's own; its loss is in no mean."""
    trainer = fit(tmp_path, task=Overflows(at=[9]), precision="fp16", log_every=1)
    assert trainer.progress.step == 12
    losses = {r["step"]: r.get("loss") for r in records(tmp_path) if "step_ms" in r}
    # The first steps may be left out, too: they find the scale.
    finite = [step for step in range(7, 13) if math.isfinite(losses[step] or math.inf)]
    assert finite == [7, 8, 10, 11, 12]


def test_the_loss_scaler_does_not_leave_out_steps_for_ever(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingDiverged, match=r"overflowed fp16 in the 26 steps up to step \d+, at every"
    ):
        fit(tmp_path, task=Overflows(at=range(3, 99)), precision="fp16", epochs=20)


# TensorBoard


def test_tensorboard_is_closed_with_a_trainer_that_has_failed(tmp_path: Path) -> None:
    """The process may go on with another Trainer."""
    pytest.importorskip("tensorboard")
    before = set(threading.enumerate())
    with pytest.raises(ArithmeticError):
        fit(tmp_path, Dies(2), tensorboard=True)
    gc.collect()
    assert set(threading.enumerate()) <= before


# torch.compile


def compiled(backend: Backend, /, folder: Path, is_compiled: bool) -> tuple[str, int]:
    """Train with or without `--compile`; return the weights' digest, and how often it compiled."""
    exactly = partial(torch.compile, backend="aot_eager")  # keeps the bits
    with mock.patch.object(torch, "compile", side_effect=exactly) as compile_it:
        trainer = fit_on(backend, folder, compile=is_compiled, epochs=2, checkpoint_every=0)
    return agreed_fingerprint(backend, trainer.model), compile_it.call_count


@pytest.mark.exhaustive
@pytest.mark.slow
@on(*TWO_RANKS)
def test_a_compiled_net_trains_the_same(ranks: Ranks, tmp_path: Path) -> None:
    plain = ranks.run(compiled, tmp_path / "plain", False)
    made = ranks.run(compiled, tmp_path / "compiled", True)
    assert [digest for digest, _ in made] == [digest for digest, _ in plain]
    assert [calls for _, calls in (*plain, *made)] == [0, 0, 1, 1]
