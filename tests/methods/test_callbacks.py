"""Callbacks: when each hook is called, and the average of weights. Resumed: tests/parity."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Backend, Callback, Trainer
from hvdtrain.errors import CheckpointError, InputError, notes_of
from hvdtrain.training import checkpoint
from hvdtrain.training.callback_list import CallbackList, load_callback
from hvdtrain.training.callbacks.ema import EMA
from hvdtrain.training.callbacks.timed_checkpoint import TimedCheckpoint
from tests.messages import Message
from tests.methods.arms import TWO, on, rest
from tests.parity.reference import State
from tests.parity.resume import Asks, Dies, Net, Stateful, fit, fit_on
from tests.ranks import Ranks, single
from tests.runs import Values, evaluations, run_json, saved_parts, saved_steps, snapshot

pytestmark = pytest.mark.usefixtures("one_thread")


def fit_on_rank(backend: Backend, /, *given: Any, **changes: Any) -> None:
    """Train on this rank. A Trainer cannot be returned to the test."""
    fit_on(backend, *given, **changes)


# Hooks


class Recorder(Callback):
    """Notes each call, with the step and the epoch, and the weights after each step."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.weights: list[State] = []
        hooks = "start epoch_start evaluation_start step_end evaluate epoch_end checkpoint log end"
        for hook in hooks.split():
            setattr(self, f"on_{hook}", partial(self._note, hook))

    def _note(self, hook: str, trainer: Trainer, given: Any = None) -> None:
        if hook == "step_end":
            self.weights.append(snapshot(trainer.model))
            assert any(p.grad is not None for p in trainer.model.parameters())
        elif hook == "checkpoint":
            assert (given is not None) == (trainer.world.rank == 0)
            assert given is None or checkpoint.problem(given) is None
        elif hook == "log" and "eval_loss" in given:
            hook = "log_eval"
        self.calls.append(f"{hook} {trainer.progress.step} {trainer.progress.epoch}")


def recorded(backend: Backend, /, folder: Path) -> list[str]:
    recorder = Recorder()
    fit_on(backend, folder, recorder, epochs=2, max_steps=7, checkpoint_every=3, log_every=5)
    return recorder.calls


@TWO
def test_hooks_are_called_on_all_ranks_in_their_order(ranks: Ranks, tmp_path: Path) -> None:
    """Epochs of four steps; the run ends in the middle of the second."""
    found = ranks.run(recorded, tmp_path)
    wanted = """
        start 0 0, epoch_start 0 0, step_end 1 0, step_end 2 0,
        log 3 0, step_end 3 0, checkpoint 3 0,
        log 4 0, step_end 4 0, evaluation_start 4 1, log_eval 4 1, evaluate 4 1, epoch_end 4 1,
        epoch_start 4 1, log 5 1, step_end 5 1, log 6 1, step_end 6 1, checkpoint 6 1,
        log 7 1, step_end 7 1, evaluation_start 7 1, log_eval 7 1, evaluate 7 1, checkpoint 7 1,
        end 7 1
    """
    assert found == [[call.strip() for call in wanted.split(",")]] * 2


class Last(Callback):
    """Notes how the run ended, and fails itself."""

    error: BaseException | None = None

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        self.error = error
        raise KeyError("of its own")


def test_an_exception_names_its_callback_and_is_told_to_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = Last()
    with pytest.raises(ArithmeticError) as caught:
        fit(tmp_path, Dies(2), last)
    assert notes_of(caught.value) == ["raised in the callback Dies.on_step_end"]
    assert last.error is caught.value
    assert "callback Last.on_exception raised KeyError: 'of its own'" in capsys.readouterr().out
    assert run_json(tmp_path)["error"].startswith("ArithmeticError")


# Stopping, and checkpoints on request


@pytest.mark.parametrize("at", [4, 5, 12])
def test_a_stop_ends_the_run_after_its_step(at: int, tmp_path: Path) -> None:
    recorder = Recorder()
    stops = Asks("on_step_end", [at], "stop", "enough")
    trainer = fit(tmp_path, stops, recorder, checkpoint_every=0)
    assert trainer.progress.step == at
    hooks = " ".join(call.split()[0] for call in recorder.calls)
    tail = "log step_end evaluation_start log_eval evaluate epoch_end checkpoint end"
    if at % 4:  # that it must be logged is known only once the callback has stopped the run
        tail = "step_end log evaluation_start log_eval evaluate checkpoint end"
    assert hooks.endswith(tail)
    expected = None if at == 12 else {"step": at, "of": 12, "reason": "enough"}
    assert run_json(tmp_path).get("stopped_early") == expected


@on(("single", 1), *rest(("compat-torchrun", 2)))
@pytest.mark.parametrize(("interval_s", "steps"), [(0.0, [2, 4, 6, 8, 10, 12]), (1e9, [12])])
def test_checkpoints_by_the_clock(
    ranks: Ranks, interval_s: float, steps: list[int], tmp_path: Path
) -> None:
    """The clock is read at the steps that are logged: every second one."""
    ranks.run(fit_on_rank, tmp_path, TimedCheckpoint(interval_s), checkpoint_every="3e")
    assert saved_steps(tmp_path) == steps


# The average of weights


class Replacing(Stateful):
    """Puts another tensor in the place of a buffer in each forward pass."""

    def model(self) -> nn.Module:
        net = super().model()
        net.register_buffer("scale", torch.ones(1))
        return net

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        if net.training:
            net.scale = net.get_buffer("scale") * 1.5
        return super().loss(net, batch)


def test_the_average_that_is_evaluated(tmp_path: Path) -> None:
    """By hand: the first step's weights, then 0.7 of the average and 0.3 of the weights; and the
    buffers, also one that a forward pass has replaced.
    """
    recorder = Recorder()
    options: Values = {"epochs": 2, "checkpoint_every": 0, "precision": "fp64"}
    options["task"] = Replacing()
    trainer = fit(tmp_path, recorder, ema=0.7, **options)
    average = {name: value.double() for name, value in recorder.weights[0].items()}
    trained = {name for name, _ in trainer.model.named_parameters()}
    for weights in recorder.weights[1:]:
        for name, value in weights.items():
            average[name] = 0.7 * average[name] + 0.3 * value if name in trained else value
    saved = saved_parts(tmp_path)["callbacks"]["EMA"]
    assert saved["num_averaged"] == len(recorder.weights) == 8
    for name, value in average.items():
        torch.testing.assert_close(saved["weights"][name].double(), value.double())
    assert average["scale"] == 1.5**8
    model = trainer.task.model().double()
    model.load_state_dict(average)
    inputs = trainer.task.datasets()[0][:7][0].double()
    loss = (model.eval()(inputs).squeeze(1) - inputs.sum(1)).square().mean()
    assert evaluations(tmp_path)[-1]["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_a_model_that_cannot_be_copied_has_no_average(tmp_path: Path) -> None:
    class Derived(Stateful):
        def model(self) -> nn.Module:
            net = Net()
            net.derived = net.head.weight * 2
            return net

    with pytest.raises(InputError, match="--ema needs a copy of Net"):
        fit(tmp_path, task=Derived(), ema=0.9)


def test_an_average_of_another_model_is_refused() -> None:
    trainer, average = Trainer(Stateful(), single()), EMA(0.9)
    trainer.set_up(record=False)
    average.on_start(trainer)
    state = average.state_dict()
    del state["weights"]["head.bias"]
    with pytest.raises(CheckpointError, match="head.bias"):
        average.load_state_dict(state)


# What is refused


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
    with message.raises(InputError):
        load_callback(name)


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
