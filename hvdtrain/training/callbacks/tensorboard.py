"""`--tensorboard`: a callback that writes every number of metrics.jsonl as a TensorBoard scalar."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import InputError
from hvdtrain.training.callback import Callback

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from hvdtrain.training.trainer import Trainer


class TensorBoard(Callback):
    """Writes event files into the folder `tensorboard` of the run directory, on rank 0.

    The scalars are `train/loss`, `train/lr` (with a number from the second parameter group on),
    `train/samples_per_s`, `train/step_ms`, `train/data_ms`, `train/grad_norm`, and
    `eval/<metric>`. Lists, such as a confusion matrix, are left out.
    """

    def __init__(self) -> None:
        """Raises InputError, on every rank that lacks it, if the package is not installed."""
        if importlib.util.find_spec("tensorboard") is None:
            raise InputError(
                "--tensorboard needs the package tensorboard, which is not installed; "
                "pip install 'hvdtrain[tensorboard]', or leave --tensorboard out"
            )
        self._writer: SummaryWriter | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Open an event file. Hide what an earlier run here wrote after the step of this one."""
        if trainer.run_dir is None:
            return
        from torch.utils.tensorboard import SummaryWriter

        folder = str(trainer.run_dir / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=trainer.progress.step + 1)

    def on_log(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        """Write the numbers of a record."""
        if self._writer is None:
            return
        values = dict(record)
        if "lr" in record:
            more = enumerate(trainer.last_lrs[1:], 2)
            values.update({f"lr_{number}": rate for number, rate in more})
        step = values.pop("step")
        for name, value in values.items():
            if isinstance(value, (int, float)):
                group, _, rest = name.partition("eval_")
                tag = f"train/{name}" if group or not rest else f"eval/{rest}"
                self._writer.add_scalar(tag, value, step)
        self._writer.flush()  # the writer's own thread waits two minutes

    def on_end(self, trainer: Trainer) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Close the event file of a run that fails: its process may go on."""
        self.on_end(trainer)
