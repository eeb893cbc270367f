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

_WORDS = {
    "min": "loss error err perplexity ppl mse rmse mae mape nll wer cer fid brier distance",
    "max": """accuracy acc top1 top5 f1 auc auroc ap map precision recall specificity sensitivity
        iou miou dice bleu rouge r2 psnr ssim kappa mcc score""",
}
"""The words of a metric's name by which its mode is known."""

_METRIC = "([^:]+)(?::(min|max))?"
_PATIENCE = "METRIC:PATIENCE or METRIC:max:PATIENCE, such as loss:3, with"
_FORMS = {
    "--keep-best": ("()()", "METRIC or METRIC:max, such as accuracy"),
    "--schedule plateau:": (":([0-9]{1,9})()", f"{_PATIENCE} 0 or more"),
    "--early-stop": (
        r":((?=0*[1-9])[0-9]{1,9})(?::([0-9]{1,9}(?:\.[0-9]{0,9})?))?",
        f"{_PATIENCE} 1 or more, or loss:3:0.001 with a DELTA",
    ),
}
"""By option: the pattern of what follows the metric, a patience and a delta; the form in messages.
"""


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


def parse_criterion(text: str | None, option: str) -> Criterion | None:
    """Read a criterion in the form of `option`; None if it is not given.

    Raises InputError that names `option`; also if the metric's name does not tell its mode.
    """
    if text is None:
        return None
    pattern, form = _FORMS[option]
    found = re.fullmatch(_METRIC + pattern, text)
    metric, mode, patience, delta = found.groups() if found else [""] * 4
    # As records and the last line of a run name it, with or without "eval_".
    metric = metric.strip().removeprefix("eval_")
    if not metric:
        raise InputError(f"{option} {text!r:.60} is not {form}")
    words = re.split(r"[^a-z0-9]+", metric.lower())
    modes = [mode] if mode else [key for key in _WORDS if {*words} & {*_WORDS[key].split()}]
    if len(modes) != 1:
        say = text.replace(metric, f"{metric}:max", 1)
        raise InputError(
            f"{option} {text!r}: the name {metric!r} does not tell whether higher is better; give "
            f"{say!r}, or min instead of max"
        )
    return Criterion(metric, modes[0], int(patience or 0), float(delta or 0))


def number_of(metrics: Mapping[str, Any], name: str, option: str) -> float:
    """Return one number of an evaluation. Raises InputError if it is missing, or no number."""
    value = metrics.get(name)
    if isinstance(value, (int, float)):
        return float(value)
    numbers = [key for key, item in metrics.items() if isinstance(item, (int, float))]
    problem = "is not a single number" if name in metrics else "is missing"
    raise InputError(
        f"{option} needs the metric {name!r}, which {problem} in the evaluation; its numbers: "
        f"{', '.join(numbers) or 'none'}",
        on_all_ranks=True,  # the names are equal on all ranks
    )
