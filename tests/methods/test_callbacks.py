"""Callbacks: when each hook is called, exact resume, and the average of weights."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Backend, Callback, TrainConfig, Trainer
from hvdtrain.errors import InputError, WorldMismatch
from hvdtrain.training import checkpoint
from hvdtrain.training.callback_list import CallbackList, load_callback
from hvdtrain.training.ema import EMA
from tests.forkserver import warm
from tests.launching import ROOT, run
from tests.methods import data_runs
from tests.methods.arms import KEPT
from tests.parity import resume
from tests.parity.resume import Stateful
from tests.ranks import Ranks, single
from tests.runs import records, run_json

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLES = ROOT / "examples" / "callbacks.py"
OWN = tuple(f"{EXAMPLES}:{name}" for name in ("Plateaued", "Lowest", "Averaged"))


def state_of(folder: Path) -> dict[str, Any]:
    """The states of the callbacks in the newest checkpoint."""
    path, _ = checkpoint.newest(folder / "checkpoints")
    assert path is not None
    states: dict[str, Any] = checkpoint.load(path, "callbacks")
    return states


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
}
BUILT_IN: dict[str, Any] = {"early_stop": "loss:2", "keep_best": "loss", "ema": 0.9}


@pytest.mark.parametrize("ranks", KEPT, indirect=True)
@pytest.mark.parametrize("options", [{"callback": OWN}, BUILT_IN], ids=["own", "built in"])
def test_callbacks_are_resumed_exactly(
    ranks: Ranks, options: dict[str, Any], tmp_path: Path
) -> None:
    """An early stop, a best checkpoint and an average of weights at once."""
    whole = ranks.run(resume.train, tmp_path / "whole", **OPTIONS, **options)
    # Killed in the fourth epoch, after one evaluation that was no improvement.
    ranks.run(resume.train, tmp_path / "parts", 15, **OPTIONS, **options)
    rest = ranks.run(resume.train, tmp_path / "parts", resume="must", **OPTIONS, **options)
    assert [r["digest"] for r in rest] == [r["digest"] for r in whole]
    assert [r["step"] for r in rest] == [16] * ranks.n
    assert [len(r["rates"]) for r in rest] == [3] * ranks.n, "it went on after step 13"
    folders = tmp_path / "whole", tmp_path / "parts"
    about = [run_json(folder) for folder in folders]
    assert about[0]["stopped_early"] == about[1]["stopped_early"]
    for folder in folders:
        names = [path.name for path in checkpoint.list_checkpoints(folder / "checkpoints")]
        assert names == ["step-00000008", "step-00000016"], "--keep 1, and the best"
    assert same(*map(state_of, folders))
    assert evaluations(folders[0]) == evaluations(folders[1])


def test_own_and_built_in_callbacks_are_the_same(tmp_path: Path) -> None:
    own, built_in = tmp_path / "own", tmp_path / "built in"
    resume.train(single(), own, callback=OWN, **OPTIONS)
    resume.train(single(), built_in, **BUILT_IN, **OPTIONS)
    assert evaluations(own) == evaluations(built_in)
    names = [sorted(p.name for p in (f / "checkpoints").iterdir()) for f in (own, built_in)]
    assert names[0] == names[1]
    average = state_of(own)["Averaged"]
    assert average.pop("n_averaged") == state_of(built_in)["EMA"]["num_averaged"]
    weights = state_of(built_in)["EMA"]["weights"]
    assert same(average, {f"module.{name}": value for name, value in weights.items()})


def test_own_callbacks_have_less_than_20_lines() -> None:
    classes = [n for n in ast.parse(EXAMPLES.read_text()).body if isinstance(n, ast.ClassDef)]
    assert [node.name for node in classes] == ["Plateaued", "Lowest", "Averaged"]
    assert all((node.end_lineno or 99) - node.lineno + 1 < 20 for node in classes)


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


@pytest.mark.parametrize("ranks", KEPT, indirect=True)
def test_hooks_are_called_on_all_ranks_in_their_order(ranks: Ranks, tmp_path: Path) -> None:
    """Epochs of four steps; the run ends in the middle of the second."""
    found = ranks.run(recorded, tmp_path)
    assert found[0][0] == [
        ("start", 0, 0),
        ("step", 1, 0),
        ("step", 2, 0),
        ("log", 3, 0),  # a checkpoint follows
        ("step", 3, 0),
        ("checkpoint", 3, 0),
        ("log", 4, 0),
        ("step", 4, 0),
        ("log eval", 4, 1),
        ("evaluate", 4, 1),
        ("epoch", 4, 1),
        ("log", 5, 1),
        ("step", 5, 1),
        ("log", 6, 1),
        ("step", 6, 1),
        ("checkpoint", 6, 1),
        ("log", 7, 1),
        ("step", 7, 1),
        ("log eval", 7, 1),
        ("evaluate", 7, 1),
        ("checkpoint", 7, 1),
        ("end", 7, 1),
    ]
    assert all(calls == found[0][0] for calls, _ in found)
    assert all(values == found[0][1] for _, values in found), "gradients and metrics are the same"
    gradients = [value for value in found[0][1] if isinstance(value, tuple)]
    assert all(norm > 0 and spread == 0 for norm, spread in gradients)


# Stopping, and checkpoints on request


class At(Callback):
    """Calls a method of the Trainer at the end of a step."""

    def __init__(self, step: int, method: str, *arguments: Any) -> None:
        self.step, self.method, self.arguments = step, method, arguments

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.step:
            getattr(trainer, self.method)(*self.arguments)


class Dies(Callback):
    """Ends the run like a kill, at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.step:
            raise ArithmeticError("as told")


@pytest.mark.parametrize(("at", "ends"), [(1, 2), (4, 4), (5, 6), (12, 12)])
def test_a_stop_in_an_epoch_takes_one_more_step(at: int, ends: int, tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = fit(single(), tmp_path, At(at, "stop", "enough"), recorder, checkpoint_every=0)
    assert trainer.progress.step == ends
    hooks = [call[0] for call in recorder.calls]
    tail = ["log", "step", "log eval", "evaluate", "epoch", "checkpoint", "end"]
    if ends % 4:
        tail.remove("epoch")
    assert hooks[-len(tail) :] == tail
    about = run_json(tmp_path)
    expected = None if at == 12 else {"step": ends, "of": 12, "reason": "enough"}
    assert about.get("stopped_early") == expected


@pytest.mark.parametrize("kind", ["indexed", "stateful", "stream"])
@pytest.mark.parametrize("every", [0, 1])
def test_a_stop_and_a_request_in_an_epoch_are_resumed_exactly(
    kind: str, every: int, tmp_path: Path
) -> None:
    """Of a stream too, whose state must be saved with the step that follows the request."""

    def streamed() -> Any:
        return Stateful(evaluates=True) if kind == "indexed" else data_runs.Streamed(48, kind)

    options: dict[str, Any] = {"checkpoint_every": every, "epochs": 2, "schedule": "constant"}
    options["precision"] = "fp64"  # the streams' dtype
    whole = fit(single(), tmp_path / "whole", task=streamed(), **options)
    request = At(1, "request_checkpoint")
    with pytest.raises(ArithmeticError):
        fit(single(), tmp_path / "parts", request, Dies(3), task=streamed(), **options)
    names = [p.name for p in checkpoint.list_checkpoints(tmp_path / "parts" / "checkpoints")]
    assert names[-1] == "step-00000002"
    options["resume"] = "must"
    rest = fit(single(), tmp_path / "parts", At(5, "stop", "now"), task=streamed(), **options)
    assert rest.progress.step == 6
    again = fit(single(), tmp_path / "parts", task=streamed(), **options)
    assert again.progress.step == whole.progress.step == 8
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name


def test_a_stop_that_was_saved_before_its_last_step(tmp_path: Path) -> None:
    """Killed in between, the run takes that step and ends, whatever its callbacks say."""
    with pytest.raises(ArithmeticError):
        fit(single(), tmp_path, At(2, "stop", "enough"), Dies(3), checkpoint_every=1)
    rest = fit(single(), tmp_path, checkpoint_every=1, resume="must")
    assert rest.progress.step == 3
    about = run_json(tmp_path)
    assert about["stopped_early"]["reason"] == "enough"
    assert about["resumed_from"].endswith("step-00000002")


def test_what_a_callback_records_is_in_run_json_and_in_the_result(tmp_path: Path) -> None:
    class Records(Callback):
        def on_end(self, trainer: Trainer) -> None:
            trainer.record(answer=42)

    config = replace(resume.CONFIG, run_dir=str(tmp_path), epochs=1)
    result = Trainer(Stateful(evaluates=True), single(), config, callbacks=[Records()]).fit()
    assert result.recorded == {"answer": 42}
    assert run_json(tmp_path)["answer"] == 42


# The average of weights


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_the_average_that_is_evaluated(precision: str, tmp_path: Path) -> None:
    """By hand: the first step's weights, then 0.7 of the average and 0.3 of the weights."""
    recorder = Recorder()
    options: dict[str, Any] = {"epochs": 2, "checkpoint_every": 0, "precision": precision}
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


def test_an_average_of_another_model_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(Stateful(), single(), replace(resume.CONFIG, run_dir=str(tmp_path)))
    trainer.set_up(record=False)
    average = EMA(0.9)
    average.on_start(trainer)
    state = average.state_dict()
    del state["weights"]["head.bias"]
    with pytest.raises(
        RuntimeError, match='the average of --ema is of another model: .*"head.bias"'
    ):
        average.load_state_dict(state)


def test_a_model_that_cannot_be_copied_has_no_average(tmp_path: Path) -> None:
    class Derived(Stateful):
        def model(self) -> nn.Module:
            net = resume.Net()
            net.derived = net.head.weight * 2
            return net

    with pytest.raises(InputError, match="--ema needs a copy of Net, which copy.deepcopy cannot"):
        fit(single(), tmp_path, task=Derived(evaluates=True), ema=0.9)


@pytest.mark.parametrize("decay", [1, 1.5])
def test_a_decay_by_which_the_average_never_moves(decay: float) -> None:
    with pytest.raises(InputError, match=f"--ema {decay} must be less than 1, such as 0.999"):
        TrainConfig(ema=decay).check()


# What is refused, and what is said


def differing(backend: Backend, /, folder: Path) -> str:
    own = [Recorder()] if backend.world.rank == 0 else []
    with pytest.raises(WorldMismatch) as raised:
        fit(backend, folder, *own)
    return str(raised.value)


@pytest.mark.parametrize("ranks", [("ddp-torchrun", 2)], indirect=True)
def test_ranks_with_other_callbacks(ranks: Ranks, tmp_path: Path) -> None:
    said = r"rank 0( on \S+)? has callbacks = Recorder, but rank 1( on \S+)? has none; give every"
    for text in ranks.run(differing, tmp_path / "run"):
        assert re.match(said, text), text
    assert not (tmp_path / "run").exists()


def test_what_a_resumed_run_has_more_or_less(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(single(), tmp_path, epochs=1, ema=0.9)
    fit(single(), tmp_path, epochs=2, early_stop="loss:9", resume="must")
    printed = capsys.readouterr().out
    assert "resume   EarlyStop: it starts afresh, as the checkpoint has no state of it" in printed
    assert "resume   EMA: the checkpoint's state is not used" in printed


FILE = """
from hvdtrain import Callback, Task
class Plain(Callback): pass
class Wants(Callback):
    def __init__(self, metric): self.metric = metric
wants = Wants("loss")
number = 3
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own.py", "--callback 'own.py' is not module:Class or file.py:Class"),
        ("no.py:Plain", "no callback file 'no.py' here"),
        ("own.py:plain", "own.py has no Callback named 'plain'; it has: Plain, Wants, wants"),
        ("own.py:number", "own.py has no Callback named 'number'; it has: Plain, Wants, wants"),
        ("own.py:Callback", None),
        (
            "own.py:Wants",
            "--callback own.py:Wants: missing a required argument: 'metric'; name an object in "
            "place of the class, such as wants = Wants(...) in that file",
        ),
        ("own.py:wants", None),
        ("tests.nothing:Plain", "no module named 'tests.nothing' for the callback 'tests.nothing'"),
    ],
)
def test_how_a_callback_is_named(
    name: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if said is None:
        found = load_callback(name)
        assert isinstance(found, Callback)
        assert found is not load_callback(name), "two runs would share its state"
    else:
        with pytest.raises(InputError) as raised:
            load_callback(name)
        assert str(raised.value).startswith(said)


def test_callbacks_of_one_class_have_states_of_their_own() -> None:
    one, two = EMA(0.5), EMA(0.9)
    assert list(CallbackList([one, Recorder(), two])._by_name) == ["EMA", "Recorder", "EMA-2"]
    with pytest.raises(InputError, match="callbacks has a int, which is no hvdtrain.Callback"):
        CallbackList([3])  # type: ignore[list-item]


def test_an_exception_on_one_rank_names_the_callback(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from hvdtrain import Callback\n"
        "class Fails(Callback):\n"
        "    def on_step_end(self, trainer):\n"
        "        if trainer.progress.step == 3 and trainer.world.rank == 1:\n"
        "            raise ArithmeticError('as told')\n"
    )
    options = ["--callback", f"{own}:Fails", "--threads", "1", "--run-dir", tmp_path / "run"]
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "hvdtrain"]
    done = run(warm([*torchrun, "--backend", "ddp", *map(str, options)]))
    assert done.code != 0
    assert len(done.lines("[rank 1/2] failed:")) == 1, done.output
    assert "ArithmeticError: as told\nraised in the callback Fails.on_step_end" in done.output
