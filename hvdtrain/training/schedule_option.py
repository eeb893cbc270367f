"""`--schedule`: the kind of the learning-rate schedule, and its numbers.

Imports no torch: `hvdtrain --help` must be fast.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hvdtrain.errors import InputError
from hvdtrain.training.criterion import Criterion, parse_criterion

KINDS = ("constant", "cosine", "one-cycle", "step", "plateau")
_FACTOR = r"(?::([0-9]*\.?[0-9]+(?:e-?[0-9]+)?))?"
_NUMBERS = {
    "step": ("([1-9][0-9]*(?:,[1-9][0-9]*)*)", "30,60,80", "EPOCH,EPOCH,...[:FACTOR]", 1e6),
    "plateau": ("(.+?:[0-9]+)", "loss:10", "METRIC[:min|max]:PATIENCE[:FACTOR]", 1.0),
}
"""What may follow a kind: its pattern, the default, the form in messages, and what the factor is
below.
"""


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
    """Read a kind, with what may follow it: see `_NUMBERS`. Raises InputError."""
    kind, colon, numbers = map(str.strip, text.partition(":"))
    numbers = numbers if kind == "plateau" else numbers.replace(" ", "")  # a metric may have some
    if kind not in KINDS or (colon and kind not in _NUMBERS):
        raise InputError(f"--schedule {text!r} is not one of: {', '.join(KINDS)}")
    if kind not in _NUMBERS:
        return ScheduleOption(kind)
    pattern, default, form, below = _NUMBERS[kind]
    found = re.fullmatch(pattern + _FACTOR, numbers if colon else default)
    factor = float(found[2] or 0.1) if found is not None else 0.0
    if found is None or not 0 < factor < below:
        raise InputError(
            f"--schedule {text!r} is not {kind}:{form}, such as {kind}:{default}:0.1, whose factor "
            f"is above 0 and below {below:g}"
        )
    if kind == "plateau":
        watched = parse_criterion(found[1], "--schedule plateau:", with_patience=True, least=0)
        return ScheduleOption(kind, factor=factor, criterion=watched)
    return ScheduleOption(kind, tuple(sorted(map(int, found[1].split(",")))), factor)
