"""What tests read of a run directory, and how they watch a run from step to step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hvdtrain import Trainer
from tests.ranks import Ranks


class Stop(Exception):
    """The run dies here."""


def run_json(run_dir: Path) -> dict[str, Any]:
    """Return the record of a run."""
    found: dict[str, Any] = json.loads((run_dir / "run.json").read_text())
    return found


def records(folder: Path, file: str = "metrics.jsonl") -> list[Any]:
    """Return the records of a run's metrics, without the times at which they were written; or of
    another file with one on each line.
    """
    found = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    if file == "metrics.jsonl":
        for record in found:
            del record["time"]
    return found


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the model's state, which training leaves alone."""
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def whole_and_rest(
    ranks: Ranks,
    train: Callable[..., Any],
    folder: Path,
    stop: int = 0,
    *,
    task: tuple[Any, ...] = (),
    **given: Any,
) -> tuple[list[Any], list[Any]]:
    """Train in one go; and stopped before a step, and resumed. Check that both come to the same;
    return what the ranks say of the whole run and of the resumed part: by default two steps.
    """
    whole = ranks.run(train, *task, folder / "whole", **given)
    stop = stop or len(whole[0]["seen"]) - 1
    ranks.run(train, *task, folder / "parts", stop, **given)
    rest = ranks.run(train, *task, folder / "parts", resume="must", **given)
    assert [rank["digest"] for rank in rest] == [rank["digest"] for rank in whole]
    return whole, rest


def watch(trainer: Trainer, advance: Callable[[int], None], lines: list[str] | None = None) -> None:
    """Call `advance` with each step of this rank; collect in `lines` what the run would print."""

    class Watch(type(trainer.console)):  # type: ignore[misc]
        def advance(self, step: int) -> None:
            advance(step)

        def print_line(self, text: str) -> None:
            if lines is None:
                super().print_line(text)
            else:
                lines.append(text)

    trainer.console = Watch()
