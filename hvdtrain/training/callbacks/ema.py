"""`--ema DECAY`: a callback that evaluates an exponential moving average of the weights.

After each step, average = DECAY x average + (1 - DECAY) x weights, by torch's
`get_ema_multi_avg_fn`; the first step's weights are its start. Buffers, such as BatchNorm
statistics, are the model's own. Training is not changed. A checkpoint has the weights as always,
and the average in `callbacks.pt`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hvdtrain.errors import CheckpointError, InputError, one_line
from hvdtrain.optim.model_sync import uncompiled
from hvdtrain.training.callback import Callback

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer


class EMA(Callback):
    """Averages the weights, and lets the Trainer evaluate the average.

    Every rank has the average of its own weights, which are the same on all ranks.
    """

    def __init__(self, decay: float) -> None:
        self._update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        self._num = 0
        """The steps in the average."""

    def on_start(self, trainer: Trainer) -> None:
        """Copy the model. Raises InputError if it cannot be copied."""
        model = trainer.model
        try:
            trainer.eval_model = self._average = average = copy.deepcopy(model)
        except RuntimeError as error:
            raise InputError(
                f"--ema needs a copy of {type(model).__name__}, which copy.deepcopy cannot "
                f"make: {one_line(error)}"
            ) from None
        # Not torch's AveragedModel, which collects these in each step: two thirds of its time.
        self._parameters = list(average.parameters()), list(model.parameters())
        # By module and name: a forward pass may put another tensor in the place of a buffer.
        self._buffers = [
            (copied, own, name)
            for copied, own in zip(average.modules(), model.modules(), strict=True)
            for name, _ in own.named_buffers(recurse=False)
        ]

    @torch.no_grad()
    def on_step_end(self, trainer: Trainer) -> None:
        """Take the weights of a step into the average."""
        if self._num:
            self._update(*self._parameters, self._num)
        else:
            for average, value in zip(*self._parameters, strict=True):
                average.copy_(value)
        for copied, own, name in self._buffers:
            setattr(copied, name, getattr(own, name).clone())
        self._num += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the average by the names of the model, and the number of steps in it."""
        state = self._average.state_dict()
        weights = {uncompiled(name): value for name, value in state.items()}
        return {"weights": weights, "num_averaged": self._num}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from an average. Raises CheckpointError if it is of another model."""
        names = {uncompiled(name): name for name in self._average.state_dict()}
        weights = {names.get(name, name): value for name, value in state["weights"].items()}
        try:
            self._average.load_state_dict(weights)
        except RuntimeError as error:
            raise CheckpointError(
                f"the average of --ema is from another model: {one_line(error)}", on_all_ranks=True
            ) from None
        self._num = state["num_averaged"]
