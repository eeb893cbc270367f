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
    pattern = "(?P<metric>[^:]+)(?::(?P<mode>min|max))?"
    form = "METRIC or METRIC:max, such as accuracy"
    if with_patience:
        pattern += ":(?P<patience>[0-9]{1,9})"
        form = f"METRIC:PATIENCE or METRIC:max:PATIENCE, such as loss:3, with {least} or more"
    if with_delta:
        pattern += r"(?::(?P<delta>[0-9]{1,9}(\.[0-9]{0,9})?))?"
        form += ", or loss:3:0.001 with a DELTA"
    found = re.fullmatch(pattern, text)
    given = {} if found is None else found.groupdict()
    patience = int(given.get("patience") or 0)
    # As records and the last line of a run name it, with or without "eval_".
    metric = given.get("metric", "").strip().removeprefix("eval_")
    if not metric or (with_patience and patience < least):
        raise InputError(f"{option} {text!r:.60} is not {form}")
    mode = given["mode"] or _mode_of(metric, text, option)
    return Criterion(metric, mode, patience, float(given.get("delta") or 0))


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
    names = ", ".join(numbers) or "none"
    raise InputError(
        f"{option} depends on the evaluation's {name!r}, {problem}; its numbers: {names}",
        on_all_ranks=True,  # the names are equal on all ranks
    )
