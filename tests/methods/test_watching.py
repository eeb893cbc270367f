"""What a run shows of itself: TensorBoard files, gradients, steps left out, profiles, trackers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import Backend, Trainer
from hvdtrain.errors import InputError
from hvdtrain.training.run_dir import read_metrics
from tests.parity import resume
from tests.parity.resume import Stateful
from tests.ranks import Ranks, single

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS = [("single", 1), ("ddp-torchrun", 2), ("compat-torchrun", 3)]


def fit(backend: Backend, /, folder: Path, task: Any = None, **changes: Any) -> dict[str, Any]:
    """Train Stateful, or another task; return run.json's part that callbacks recorded."""
    config = replace(resume.CONFIG, **{"run_dir": str(folder), **changes})
    return Trainer(task or Stateful(evaluates=True), backend, config).fit().recorded


# TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read the event files with TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "tensorboard"))
    reader.Reload()
    return {
        tag: [(event.step, event.value) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


@pytest.mark.parametrize("ranks", RANKS, indirect=True)
def test_tensorboard_has_what_metrics_jsonl_has(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    ranks.run(fit, tmp_path, tensorboard=True, epochs=2)
    found = scalars(tmp_path)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1, "rank 0 alone writes"
    assert {"train/loss", "train/lr", "train/grad_norm", "eval/loss"} <= set(found)
    assert {"train/samples_per_s", "train/step_ms", "train/data_ms"} <= set(found)
    for record in read_metrics(tmp_path):
        for name, value in record.items():
            if name != "step":
                tag = f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"
                assert dict(found[tag])[record["step"]] == pytest.approx(value, rel=1e-6)


def test_a_resumed_run_hides_the_steps_that_it_takes_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options: dict[str, Any] = {"tensorboard": True, "checkpoint_every": 3, "log_every": 1}
    resume.train(single(), tmp_path, stop_at=5, **options)
    resume.train(single(), tmp_path, resume="must", **options)
    steps = [step for step, _ in scalars(tmp_path)["train/loss"]]
    assert steps == list(range(1, 13))


def test_tensorboard_that_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'hvdtrain\[tensorboard\]'") as refused:
        fit(single(), tmp_path / "run", tensorboard=True)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()
