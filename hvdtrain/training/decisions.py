"""What a run decides by its evaluations: when it stops early, and which checkpoint is the best.

Used by the Trainer; TrainConfig and the learning-rate schedule use `Criterion`. Evaluations have
the same bits on all ranks (see evaluation.py), and a decision is a function of them alone. So every
rank decides for itself, and all decide the same. The state is part of each checkpoint. Imports no
torch: `hvdtrain --help` must be fast.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
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

    def is_better(self, value: float, than: float | None) -> bool:
        """Return whether `value` improves on the best one so far. NaN never does."""
        if than is None:
            return value == value
        return value < than if self.mode == "min" else value > than


def parse_criterion(text: str, option: str, with_patience: bool, least: int = 1) -> Criterion:
    """Read METRIC[:min|max], with :PATIENCE behind it if `with_patience`.

    Raises InputError that names `option`; also if the metric's name does not tell its mode.
    """
    metric, *rest = text.split(":")
    metric = metric.strip().removeprefix("eval_")  # as records and the last line of a run name it
    mode = rest.pop(0) if rest and rest[0] in ("min", "max") else ""
    patience = rest.pop(0) if rest and with_patience else ""
    # isdecimal alone accepts the digits of every script; int reads them, too.
    if not metric or rest or (with_patience and not (patience.isdecimal() and patience.isascii())):
        form = "METRIC:PATIENCE or METRIC:max:PATIENCE, such as loss:3" if with_patience else ""
        form = form or "METRIC or METRIC:max, such as accuracy"
        raise InputError(f"{option} {text!r} is not {form}")
    if with_patience and (len(patience) > 9 or int(patience) < least):
        raise InputError(f"{option} {text!r:.60} has a patience below {least}, or above 999999999")
    return Criterion(metric, mode or _mode_of(metric, text, option), int(patience or 0))


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


class BestSoFar:
    """The best value of one metric, its step, and how many evaluations there were since."""

    def __init__(self, criterion: Criterion, option: str) -> None:
        self.criterion = criterion
        self._option = option
        self.value: float | None = None
        self.step = -1
        self.since = 0

    def update(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Take one evaluation into account; return whether it is the best so far."""
        value = number_of(metrics, self.criterion.metric, self._option)
        if self.criterion.is_better(value, self.value):
            self.value, self.step, self.since = value, step, 0
            return True
        self.since += 1
        return False

    def about(self, path: Path | None) -> dict[str, Any]:
        """Return the best so far, for run.json. `path`: its checkpoint."""
        about = {"step": self.step, "metric": self.criterion.metric, "mode": self.criterion.mode}
        return {**about, "value": self.value, "path": None if path is None else str(path)}

    def state_dict(self) -> dict[str, Any]:
        """Return the criterion and the best so far."""
        state = {"value": self.value, "step": self.step, "since": self.since}
        return {**asdict(self.criterion), **state}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restore `state`, unless it is of another metric or mode; return whether it was."""
        if (state["metric"], state["mode"]) != (self.criterion.metric, self.criterion.mode):
            return False
        self.value, self.step, self.since = state["value"], state["step"], state["since"]
        return True


class Decisions:
    """`--early-stop` and `--keep-best` of one run; nothing if neither is given.

    No method is collective. All ranks must pass the same evaluations.
    """

    def __init__(self, early_stop: Criterion | None, keep_best: Criterion | None) -> None:
        self.stop = None if early_stop is None else BestSoFar(early_stop, "--early-stop")
        self.best = None if keep_best is None else BestSoFar(keep_best, "--keep-best")

    @property
    def is_stopped(self) -> bool:
        """Whether the patience of `--early-stop` is used up."""
        return self.stop is not None and self.stop.since >= self.stop.criterion.patience

    def update(self, metrics: Mapping[str, Any], step: int) -> bool:
        """Take the evaluation after `step` into account; return whether to keep its checkpoint.

        Raises InputError if a metric is missing.
        """
        if self.stop is not None:
            self.stop.update(metrics, step)
        return self.best is not None and self.best.update(metrics, step)

    def why_stopped(self) -> str:
        """Return the reason of an early stop, for people."""
        assert self.stop is not None
        criterion, value = self.stop.criterion, self.stop.value
        count = self.stop.since
        evaluations = "1 evaluation" if count == 1 else f"{count} evaluations"
        best = "has not been a number" if value is None else f"has not improved on {value:.4f}"
        since = "" if value is None else f" (step {self.stop.step})"
        return f"eval_{criterion.metric} {best}{since} in {evaluations}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        parts = {"stop": self.stop, "best": self.best}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Restore what `state_dict` returned; return the options that start afresh because they
        name another metric than the checkpoint.
        """
        afresh = []
        for name, part in (("stop", self.stop), ("best", self.best)):
            if part is not None and name in state and not part.load_state_dict(state[name]):
                afresh.append(part._option)
        return afresh
