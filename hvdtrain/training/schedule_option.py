"""`--schedule`: the kind of the learning-rate schedule, and its numbers.

Imports no torch: `hvdtrain --help` must be fast.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.errors import InputError
from hvdtrain.training.criterion import Criterion, parse_criterion

KINDS = ("constant", "cosine", "one-cycle", "step", "plateau")
_MAX_FACTOR = 1e6


@dataclass(frozen=True)
class ScheduleOption:
    """What `--schedule` says."""

    kind: str
    epochs: tuple[int, ...] = ()
    """For `step`: those after which the rate drops, sorted."""
    factor: float = 1.0
    """For `step` and `plateau`: by which a drop multiplies the rate."""
    criterion: Criterion | None = None
    """For `plateau`: the metric, and its patience; the rate drops when more evaluations in a row
    than that bring no improvement.
    """


def parse_schedule(text: str) -> ScheduleOption:
    """Read a kind, with what follows it: `step:EPOCH,EPOCH,...[:FACTOR]`, or
    `plateau:METRIC[:min|max]:PATIENCE[:FACTOR]`. Raises InputError.
    """
    kind, *rest = (part.strip() for part in text.split(":"))
    if kind not in KINDS:
        raise InputError(f"--schedule {text!r} is not one of: {', '.join(KINDS)}")
    if kind == "step":
        epochs, *factor = rest or ["30,60,80"]
        return ScheduleOption(kind, _epochs(epochs, text), _factor(factor, text))
    if kind == "plateau":
        criterion = rest or ["loss", "10"]
        factor = criterion[3 if criterion[1:2] in (["min"], ["max"]) else 2 :]
        watched = ":".join(criterion[: len(criterion) - len(factor)])
        found = parse_criterion(watched, f"--schedule {text!r}:", with_patience=True, least=0)
        return ScheduleOption(kind, factor=_factor(factor, text, 1.0), criterion=found)
    if rest:
        raise InputError(f"--schedule {text!r}: {kind} has no numbers; give {kind} alone")
    return ScheduleOption(kind)


def _epochs(given: str, text: str) -> tuple[int, ...]:
    try:
        epochs = sorted(int(part) for part in given.split(",") if part.strip())
    except ValueError:
        epochs = []
    if not epochs or epochs[0] < 1:
        raise InputError(
            f"--schedule {text!r}: {given!r} is not a list of epochs, such as 30,60,80"
        )
    return tuple(epochs)


def _factor(given: list[str], text: str, below: float = _MAX_FACTOR) -> float:
    try:
        (factor,) = map(float, given or ["0.1"])
    except ValueError:
        factor = 0.0
    if not 0 < factor < below:
        raise InputError(
            f"--schedule {text!r}: {':'.join(given)!r} is not one factor above 0 and below "
            f"{below:g}, such as 0.1"
        )
    return factor
