r"""Callbacks of one's own for any task: an early stop, a best checkpoint, an average of weights.

torchrun --nproc-per-node 2 -m hvdtrain --callback examples/callbacks.py:Plateaued \
    --callback examples/callbacks.py:Lowest --callback examples/callbacks.py:Averaged
"""

import math
from collections.abc import Mapping
from typing import Any

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hvdtrain import Callback, Trainer


class Plateaued(Callback):
    """Ends the run when two evaluations in a row have not lowered the loss."""

    lowest, since = math.inf, 0

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self.since = 0 if metrics["loss"] < self.lowest else self.since + 1
        self.lowest = min(self.lowest, metrics["loss"])
        if self.since >= 2:
            trainer.stop("the loss has not fallen in 2 evaluations")

    def state_dict(self) -> dict[str, Any]:
        return {"lowest": self.lowest, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lowest, self.since = state["lowest"], state["since"]


class Lowest(Callback):
    """Saves a checkpoint after each evaluation with the lowest loss so far, and keeps the last."""

    lowest, step = math.inf, 0

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        if metrics["loss"] < self.lowest:
            self.lowest, self.step = metrics["loss"], trainer.progress.step
            trainer.request_checkpoint()

    def kept_steps(self) -> list[int]:
        return [self.step]

    def state_dict(self) -> dict[str, Any]:
        return {"lowest": self.lowest, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lowest, self.step = state["lowest"], state["step"]


class Averaged(Callback):
    """Evaluates an exponential moving average of the weights."""

    def on_start(self, trainer: Trainer) -> None:
        update = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        self.average = AveragedModel(trainer.model, multi_avg_fn=update)
        trainer.eval_model = self.average.module

    def on_step_end(self, trainer: Trainer) -> None:
        self.average.update_parameters(trainer.model)

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state)
