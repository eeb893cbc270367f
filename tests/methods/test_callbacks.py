"""Callbacks: when each hook is called, exact resume, and the average of weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Backend, Callback, Trainer
from hvdtrain.errors import InputError, WorldMismatch, notes_of
from hvdtrain.training import checkpoint
from hvdtrain.training.callback_list import CallbackList, load_callback
from hvdtrain.training.callbacks.ema import EMA
from hvdtrain.training.callbacks.timed_checkpoint import TimedCheckpoint
from tests.messages import Message
from tests.methods import data_runs
from tests.methods.arms import KEPT, TWO
from tests.parity import resume
from tests.parity.resume import Stateful
from tests.ranks import Ranks, single
from tests.runs import records, run_json, whole_and_rest

pytestmark = pytest.mark.usefixtures("one_thread")


def state_of(folder: Path) -> dict[str, Any]:
    """The states of the callbacks in the newest checkpoint."""
    path, _ = checkpoint.newest(folder / "checkpoints")
    assert path is not None
    states: dict[str, Any] = checkpoint.load(path, "callbacks")
    return states


def saved_steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in checkpoint.list_checkpoints(folder / "checkpoints")]


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [record for record in records(folder) if "eval_loss" in record]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


# Exact resume


# At this rate the second evaluation is the best, and the next two are not, on any of KEPT.
OPTIONS: dict[str, Any] = {
    "epochs": 5,
    "lr": 0.6,
    "warmup_steps": 0,
    "schedule": "constant",
    "keep": 1,
    "checkpoint_every": 13,
    "early_stop": "loss:2",
    "keep_best": "loss",
    "ema": 0.9,
}


@pytest.mark.parametrize("ranks", KEPT, indirect=True)
def test_callbacks_are_resumed_exactly(ranks: Ranks, tmp_path: Path) -> None:
    """An early stop, a best checkpoint and an average of weights at once."""
    # Killed in the fourth epoch, after one evaluation that was no improvement.
    _, rest = whole_and_rest(ranks, resume.train, tmp_path, 15, **OPTIONS)
    assert [r["step"] for r in rest] == [16] * ranks.n
    assert [len(r["rates"]) for r in rest] == [3] * ranks.n, "it went on after step 13"
    folders = tmp_path / "whole", tmp_path / "parts"
    about = [run_json(folder) for folder in folders]
    assert about[0]["stopped_early"] == about[1]["stopped_early"]
    for folder in folders:
        assert saved_steps(folder) == [8, 16], "--keep 1, and the best"
    assert same(*map(state_of, folders))
    assert evaluations(folders[0]) == evaluations(folders[1])


class Recorder(Callback):
    """Notes each call, with the step and the epoch, and what a collective in it returns."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.weights: list[dict[str, Tensor]] = []
        self.values: list[Any] = []

    def _note(self, hook: str, trainer: Trainer) -> None:
        self.calls.append((hook, trainer.progress.step, trainer.progress.epoch))

    def on_start(self, trainer: Trainer) -> None:
        self._note("start", trainer)

    def on_epoch_start(self, trainer: Trainer) -> None:
        self._note("epoch start", trainer)

    def on_evaluation_start(self, trainer: Trainer) -> None:
        self._note("evaluation", trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        self._note("step", trainer)
        state = trainer.model.state_dict()
        self.weights.append({name: value.clone() for name, value in state.items()})
        (grad, *_) = [p.grad for p in trainer.model.parameters()]
        assert grad is not None
        spread = trainer.backend.all_reduce(grad, "max") - trainer.backend.all_reduce(grad, "min")
        self.values.append((float(grad.norm()), float(spread.abs().max())))

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self._note("evaluate", trainer)
        self.values.append(dict(metrics))

    def on_epoch_end(self, trainer: Trainer) -> None:
        self._note("epoch", trainer)

    def on_checkpoint(self, trainer: Trainer, path: Path | None) -> None:
        self._note("checkpoint", trainer)
        assert (path is not None) == (trainer.world.rank == 0)
        assert path is None or checkpoint.problem(path) is None

    def on_log(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        self._note("log eval" if "eval_loss" in record else "log", trainer)

    def on_end(self, trainer: Trainer) -> None:
        self._note("end", trainer)


def fit(
    backend: Backend, /, folder: Path, *callbacks: Callback, task: Any = None, **changes: Any
) -> Trainer:
    config = replace(resume.CONFIG, run_dir=str(folder), **changes)
    trainer = Trainer(task or Stateful(evaluates=True), backend, config, callbacks=callbacks)
    trainer.fit()
    return trainer


def recorded(backend: Backend, /, folder: Path) -> tuple[list[Any], list[Any]]:
    recorder = Recorder()
    fit(backend, folder, recorder, epochs=2, max_steps=7, checkpoint_every=3, log_every=5)
    return recorder.calls, recorder.values


@TWO
def test_hooks_are_called_on_all_ranks_in_their_order(ranks: Ranks, tmp_path: Path) -> None:
    """Epochs of four steps; the run ends in the middle of the second."""
    found = ranks.run(recorded, tmp_path)
    assert found[0][0] == [
        ("start", 0, 0),
        ("epoch start", 0, 0),
        ("step", 1, 0),
        ("step", 2, 0),
        ("log", 3, 0),  # a checkpoint follows
        ("step", 3, 0),
        ("checkpoint", 3, 0),
        ("log", 4, 0),
        ("step", 4, 0),
        ("evaluation", 4, 1),
        ("log eval", 4, 1),
        ("evaluate", 4, 1),
        ("epoch", 4, 1),
        ("epoch start", 4, 1),
        ("log", 5, 1),
        ("step", 5, 1),
        ("log", 6, 1),
        ("step", 6, 1),
        ("checkpoint", 6, 1),
        ("log", 7, 1),
        ("step", 7, 1),
        ("evaluation", 7, 1),
        ("log eval", 7, 1),
        ("evaluate", 7, 1),
        ("checkpoint", 7, 1),
        ("end", 7, 1),
    ]
    assert all(calls == found[0][0] for calls, _ in found)
    assert all(values == found[0][1] for _, values in found), "gradients and metrics are the same"
    gradients = [value for value in found[0][1] if isinstance(value, tuple)]
    assert all(norm > 0 and spread == 0 for norm, spread in gradients)


class Last(Callback):
    """Notes how the run ended, and fails itself."""

    error: BaseException | None = None

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self.error = error
        raise KeyError("of its own")


def test_an_exception_is_told_to_callbacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = Last()
    with pytest.raises(ArithmeticError) as caught:
        fit(single(), tmp_path, Dies(2), last)
    assert last.error is caught.value
    assert "callback Last.on_exception raised KeyError: 'of its own'" in capsys.readouterr().out
    assert run_json(tmp_path)["error"].startswith("ArithmeticError")


class Counts(Stateful):
    """A task that counts its batches."""

    batches = 0

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        self.batches += net.training
        return super().loss(net, batch)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": torch.tensor(self.batches)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = int(state["batches"])


def counted(backend: Backend, /, folder: Path, **changes: Any) -> int:
    task = Counts(evaluates=True)
    fit(backend, folder, task=task, epochs=1, **changes)
    return task.batches


@TWO
def test_the_state_of_a_task_is_saved_and_given_to_all(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(counted, tmp_path, max_steps=2) == [2, 2]
    assert ranks.run(counted, tmp_path, max_steps=4, resume="must") == [4, 4]


# Stopping, and checkpoints on request


class Asks(Callback):
    """Calls a method of the Trainer in one hook, when the given steps are done."""

    def __init__(self, hook: str, steps: Collection[int], method: str, *arguments: Any) -> None:
        self.hook, self.steps = hook, steps
        self.method, self.arguments = method, arguments

    def _ask(self, hook: str, trainer: Trainer) -> None:
        if hook == self.hook and trainer.progress.step in self.steps:
            getattr(trainer, self.method)(*self.arguments)

    def on_gradients(self, trainer: Trainer, losses: Sequence[Tensor]) -> None:
        self._ask("on_gradients", trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        self._ask("on_step_end", trainer)

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self._ask("on_evaluate", trainer)


class Dies(Callback):
    """Ends the run like a kill, at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.step:
            raise ArithmeticError("as told")


@pytest.mark.parametrize("at", [4, 5, 12])
def test_a_stop_ends_the_run_after_its_step(at: int, tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = fit(
        single(),
        tmp_path,
        Asks("on_step_end", [at], "stop", "enough"),
        recorder,
        checkpoint_every=0,
    )
    assert trainer.progress.step == at
    hooks = [call[0] for call in recorder.calls]
    tail = "log,step,evaluation,log eval,evaluate,epoch,checkpoint,end".split(",")
    if at % 4:  # that it must be logged is known only once the callback has stopped the run
        tail = "step,log,evaluation,log eval,evaluate,checkpoint,end".split(",")
    assert hooks[-len(tail) :] == tail
    about = run_json(tmp_path)
    expected = None if at == 12 else {"step": at, "of": 12, "reason": "enough"}
    assert about.get("stopped_early") == expected


@pytest.mark.parametrize(("hook", "before"), [("on_step_end", 0), ("on_gradients", 1)])
@pytest.mark.parametrize(("kind", "every"), [("indexed", 0), ("stateful", 1), ("stream", 0)])
def test_a_stop_and_a_request_in_an_epoch_are_resumed_exactly(
    kind: str, every: int, hook: str, before: int, tmp_path: Path
) -> None:
    """Of a stream too, which has loaded the next step already. `before`: the step at work, which
    they count for, is not done yet.
    """

    def streamed() -> Any:
        return Stateful(evaluates=True) if kind == "indexed" else data_runs.Streamed(48, kind)

    options: dict[str, Any] = {"checkpoint_every": every, "epochs": 2, "schedule": "constant"}
    options["precision"] = "fp64"  # the streams' dtype
    whole = fit(single(), tmp_path / "whole", task=streamed(), **options)
    parts = tmp_path / "parts"
    request = Asks(hook, [1 - before], "request_checkpoint")
    with pytest.raises(ArithmeticError):
        fit(single(), parts, request, Dies(3), task=streamed(), **options)
    assert saved_steps(parts)[-1] == (2 if every else 1)
    options["resume"] = "must"
    stop = Asks(hook, [5 - before], "stop", "now")
    rest = fit(single(), parts, stop, task=streamed(), **options)
    assert rest.progress.step == 5
    again = fit(single(), parts, task=streamed(), **options)
    assert again.progress.step == whole.progress.step == 8
    assert same(whole.model.state_dict(), again.model.state_dict())


def timed(backend: Backend, folder: Path, interval_s: float) -> None:
    fit(backend, folder, TimedCheckpoint(interval_s), checkpoint_every="3e", keep=99)


@pytest.mark.parametrize("ranks", [("single", 1), ("compat-torchrun", 2)], indirect=True)
@pytest.mark.parametrize(("interval_s", "steps"), [(0.0, [2, 4, 6, 8, 10, 12]), (1e9, [12])])
def test_checkpoints_by_the_clock(
    ranks: Ranks, interval_s: float, steps: list[int], tmp_path: Path
) -> None:
    """The clock is read at the steps that are logged: every second one."""
    ranks.run(timed, tmp_path, interval_s)
    assert saved_steps(tmp_path) == steps


def test_what_a_callback_records_is_in_run_json_and_in_the_result(tmp_path: Path) -> None:
    class Records(Callback):
        def on_end(self, trainer: Trainer) -> None:
            trainer.record(answer=42)

    config = replace(resume.CONFIG, run_dir=str(tmp_path), epochs=1)
    result = Trainer(Stateful(evaluates=True), single(), config, callbacks=[Records()]).fit()
    assert result.recorded == {"answer": 42}
    assert run_json(tmp_path)["answer"] == 42


# The average of weights


def test_the_average_that_is_evaluated(tmp_path: Path) -> None:
    """By hand: the first step's weights, then 0.7 of the average and 0.3 of the weights."""
    recorder = Recorder()
    options: dict[str, Any] = {"epochs": 2, "checkpoint_every": 0, "precision": "fp64"}
    trainer = fit(single(), tmp_path, recorder, ema=0.7, **options)
    average = {name: value.double() for name, value in recorder.weights[0].items()}
    trained = {name for name, _ in trainer.model.named_parameters()}
    for weights in recorder.weights[1:]:
        for name, value in weights.items():
            average[name] = 0.7 * average[name] + 0.3 * value if name in trained else value
    saved = state_of(tmp_path)["EMA"]
    assert saved["num_averaged"] == len(recorder.weights) == 8
    for name, value in average.items():
        torch.testing.assert_close(saved["weights"][name].double(), value.double())
    model = resume.Net().double()
    model.load_state_dict(average)
    inputs = trainer.task.datasets()[0][:7][0].double()
    loss = (model.eval()(inputs).squeeze(1) - inputs.sum(1)).square().mean()
    assert evaluations(tmp_path)[-1]["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    plain = fit(single(), tmp_path / "plain", **options)
    assert evaluations(tmp_path / "plain")[-1]["eval_loss"] != pytest.approx(loss.item(), rel=0.01)
    assert same(plain.model.state_dict(), dict(trainer.model.state_dict())), "it changed training"


class Replaces(resume.Net):
    """Puts another tensor in the place of a buffer in each forward pass."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale = self.scale * 1.5
        return super().forward(x) * self.scale


class Replacing(Stateful):
    def model(self) -> nn.Module:
        return Replaces()


def test_the_average_has_the_buffers_that_a_forward_pass_has_replaced(tmp_path: Path) -> None:
    trainer = fit(single(), tmp_path, task=Replacing(evaluates=True), ema=0.7, max_steps=3)
    assert trainer.model.get_buffer("scale") == 1.5**3
    assert trainer.eval_model.get_buffer("scale") == 1.5**3
    assert state_of(tmp_path)["EMA"]["weights"]["scale"] == 1.5**3


def test_an_average_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(Stateful(), single(), replace(resume.CONFIG, run_dir=str(tmp_path)))
    trainer.set_up(record=False)
    average = EMA(0.9)
    average.on_start(trainer)
    state = average.state_dict()
    del state["weights"]["head.bias"]
    with pytest.raises(RuntimeError, match="head.bias"):
        average.load_state_dict(state)


def test_a_model_that_cannot_be_copied_has_no_average(tmp_path: Path) -> None:
    class Derived(Stateful):
        def model(self) -> nn.Module:
            net = resume.Net()
            net.derived = net.head.weight * 2
            return net

    with pytest.raises(InputError, match="--ema needs a copy of Net"):
        fit(single(), tmp_path, task=Derived(evaluates=True), ema=0.9)


# What is refused


def differing(backend: Backend, /, folder: Path) -> str:
    own = [Recorder()] if backend.world.rank == 0 else []
    with pytest.raises(WorldMismatch) as raised:
        fit(backend, folder, *own)
    return str(raised.value)


@TWO
def test_ranks_with_other_callbacks(ranks: Ranks, tmp_path: Path) -> None:
    said = r"rank 0( on \S+)? has callbacks = Recorder, but rank 1( on \S+)? has none; give every"
    for text in ranks.run(differing, tmp_path / "run"):
        assert re.match(said, text), text
    assert not (tmp_path / "run").exists()


FILE = """
from hvdtrain import Callback, Task
class Plain(Callback): pass
class Wants(Callback):
    def __init__(self, metric): self.metric = metric
wants = Wants("loss")
number = 3
"""


@pytest.mark.parametrize("name", ["own.py:Callback", "own.py:wants"])
def test_how_a_callback_is_named(name: str, own_file: None) -> None:
    found = load_callback(name)
    assert isinstance(found, Callback)
    assert found is not load_callback(name), "two runs would share its state"


@pytest.mark.parametrize(
    "name",
    ["own.py", "no.py:Plain", "own.py:plain", "own.py:number", "own.py:Wants", "tests.nothing:A"],
)
def test_what_names_no_callback(name: str, own_file: None, message: Message) -> None:
    with pytest.raises(InputError) as refused:
        load_callback(name)
    message(refused.value)


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_callbacks_of_one_class_have_states_of_their_own() -> None:
    trainer, one, two = Trainer(Stateful(), single()), EMA(0.5), EMA(0.9)
    found = CallbackList(trainer, [one, Recorder(), two])
    assert list(found._by_name) == ["EMA", "Recorder", "EMA-2"]
    with pytest.raises(InputError):
        CallbackList(trainer, [3])  # type: ignore[list-item]


def test_an_exception_names_the_callback(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError) as raised:
        fit(single(), tmp_path, Dies(3))
    assert notes_of(raised.value) == ["raised in the callback Dies.on_step_end"]
