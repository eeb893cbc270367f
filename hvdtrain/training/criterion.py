"""Criteria on evaluations: a metric, whether less or more of it is better, and a patience.

TrainConfig reads them from the options; the learning-rate schedule and the callbacks `early_stop`
and `best_checkpoint` use them. Evaluations have the same bits on all ranks (see evaluation.py), and
a decision is a function of them alone. So every rank decides for itself, and all decide the same.
Imports no torch: `hvdtrain --help` must be fast.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import InputError

LOWER_IS_BETTER = frozenset(
    "loss error err perplexity ppl mse rmse mae mape nll wer cer fid brier distance".split()
)
HIGHER_IS_BETTER = frozenset(
    """accuracy acc top1 top5 f1 auc auroc ap map precision recall specificity sensitivity iou miou
    dice bleu rouge r2 psnr ssim kappa mcc score""".split()
)
"""The words of a metric's name by which its mode is known."""


@dataclass(frozen=True)
class Criterion:
    """A metric of the evaluation, whether `min` or `max` of it is best, and a patience."""

    metric: str
    mode: str
    patience: int = 0
    delta: float = 0.0
    """An improvement is larger than this."""

    def is_better(self, value: float, than: float | None) -> bool:
        """Return whether `value` improves on the best one so far. NaN never does."""
        if than is None:
            return value == value
        if self.mode == "min":
            return value < than - self.delta
        return value > than + self.delta


def parse_criterion(
    text: str,
    option: str,
    with_patience: bool = False,
    with_delta: bool = False,
    least: int = 1,
) -> Criterion:
    """Read METRIC[:min|max], with :PATIENCE behind it if `with_patience`, and then [:DELTA].

    Raises InputError that names `option`; also if the metric's name does not tell its mode.
    """
    metric, *rest = text.split(":")
    metric = metric.strip().removeprefix("eval_")  # as records and the last line of a run name it
    mode = rest.pop(0) if rest and rest[0] in ("min", "max") else ""
    patience = rest.pop(0) if rest and with_patience else ""
    delta = rest.pop(0) if rest and with_delta else "0"
    # isdecimal alone accepts the digits of every script; int reads them, too.
    if not metric or rest or (with_patience and not (patience.isdecimal() and patience.isascii())):
        form = "METRIC:PATIENCE or METRIC:max:PATIENCE, such as loss:3" if with_patience else ""
        form = form or "METRIC or METRIC:max, such as accuracy"
        raise InputError(f"{option} {text!r} is not {form}")
    if with_patience and (len(patience) > 9 or int(patience) < least):
        raise InputError(f"{option} {text!r:.60} has a patience below {least}, or above 999999999")
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", delta):
        raise InputError(f"{option} {text!r:.60}: {delta!r} is not a DELTA, such as 0.001")
    mode = mode or _mode_of(metric, text, option)
    return Criterion(metric, mode, int(patience or 0), float(delta))


def _mode_of(metric: str, text: str, option: str) -> str:
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    lower, higher = bool(words & LOWER_IS_BETTER), bool(words & HIGHER_IS_BETTER)
    if lower == higher:
        say = text.replace(metric, f"{metric}:max", 1)
        raise InputError(
            f"{option} {text!r}: the name {metric!r} does not tell whether more is better; say "
            f"{say!r}, or min in place of max"
        )
    return "min" if lower else "max"


def number_of(metrics: Mapping[str, Any], name: str, option: str) -> float:
    """Return one number of an evaluation. Raises InputError if it is missing, or no number."""
    value = metrics.get(name)
    if isinstance(value, (int, float)):
        return float(value)
    numbers = [key for key, item in metrics.items() if isinstance(item, (int, float))]
    problem = "which is not a single number" if name in metrics else "which it does not have"
    raise InputError(
        f"{option} depends on the evaluation's {name!r}, {problem}; one of: {', '.join(numbers)}",
        on_all_ranks=True,  # the names are equal on all ranks
    )
