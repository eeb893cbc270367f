"""`--ema DECAY`: a callback that evaluates an exponential moving average of the weights.

After each step, average = DECAY x average + (1 - DECAY) x weights, by torch's AveragedModel; the
first step's weights are its start. Buffers, such as BatchNorm statistics, are the model's own.
Training is not changed. A checkpoint has the weights as always, and the average in `callbacks.pt`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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
        self._decay = decay

    def on_start(self, trainer: Trainer) -> None:
        """Copy the model. Raises InputError if it cannot be copied."""
        model = trainer.model
        update = get_ema_multi_avg_fn(self._decay)  # type: ignore[no-untyped-call]
        try:
            self._average = average = AveragedModel(model, multi_avg_fn=update)
        except RuntimeError as error:
            raise InputError(
                f"--ema needs a copy of {type(model).__name__}, which copy.deepcopy cannot "
                f"make: {one_line(error)}"
            ) from None
        # `update_parameters` reads the number: on a GPU, each step would wait for the device.
        average.n_averaged = average.n_averaged.cpu()
        trainer.eval_model = average.module

    def on_step_end(self, trainer: Trainer) -> None:
        """Take the weights of a step into the average."""
        self._average.update_parameters(trainer.model)

    def state_dict(self) -> dict[str, Any]:
        """Return the average by the names of the model, and the number of steps in it."""
        state = self._average.module.state_dict()
        weights = {uncompiled(name): value for name, value in state.items()}
        return {"weights": weights, "num_averaged": int(self._average.n_averaged)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from an average. Raises CheckpointError if it is of another model."""
        average = self._average.module
        names = {uncompiled(name): name for name in average.state_dict()}
        weights = {names.get(name, name): value for name, value in state["weights"].items()}
        try:
            average.load_state_dict(weights)
        except RuntimeError as error:
            raise CheckpointError(
                f"the average of --ema is of another model: {one_line(error)}", on_all_ranks=True
            ) from None
        self._average.n_averaged.fill_(state["num_averaged"])
