"""The base class of callbacks: code that the Trainer calls at fixed points of a run.

`--early-stop`, `--keep-best`, `--ema` and `--tensorboard` are callbacks, one file each. A user's
own is given as `Trainer(..., callbacks=[MyCallback()])`, or with `--callback my.py:MyCallback`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from hvdtrain.training.trainer import Trainer


class Callback:
    """Code that the Trainer calls at fixed points of a run; override the hooks that it needs.

        on_start, then load_state_dict if the run is resumed
        for each epoch:    on_epoch_start
        for each step:     on_gradients, then on_step_end
        for each evaluation, after some steps or an epoch:  on_evaluation_start, then on_evaluate
        for each epoch:    on_epoch_end, after its evaluation
        for each save:     state_dict, then on_checkpoint
        on_end, or on_exception on a rank that fails

    Each hook except the last is called on every rank, after the same step, callback after callback.
    So a hook may call the collectives of `trainer.backend`, if it calls them on all ranks: a
    condition for the call must have the same value on all ranks. The same on all ranks are
    `trainer.progress`, `trainer.config`, the metrics of `on_evaluate`, and after each step the
    parameters, their gradients and the optimizer's state. Different are the batch, its loss, times,
    and the buffers with `--buffers local`.

    A hook may call `trainer.stop`, `request_checkpoint`, `record` and `log`, on all ranks. Every
    rank must have the same callbacks with the same state: rank 0's is saved for all.

    An exception ends the run, and is reported with the names of the callback and the hook.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Called at the start of a run, after model, optimizer and position are created, and
        restored in a resumed run. Collectives may be called.

        Create here what `load_state_dict` fills: it is called next.
        """

    def on_epoch_start(self, trainer: Trainer) -> None:
        """Called before the first step of each epoch; in a resumed run, before the first of its
        remaining steps. Collectives may be called.
        """

    def on_gradients(self, trainer: Trainer, losses: Sequence[Tensor]) -> None:
        """Called in each step, after the gradients are averaged and before they are clipped.
        Collectives may be called.

        `p.grad` is the mean, multiplied by the loss scale. `losses`: this rank's losses, one
        for each micro-batch, scaled so that their sum is the loss of the step; only that sum if the
        losses have weights.
        `trainer.skip_step` leaves the step out. `trainer.progress` does not count the step yet.
        """

    def on_step_end(self, trainer: Trainer) -> None:
        """Called after each optimizer step. Collectives may be called.

        `trainer.progress.step` counts it. Gradients are still there, as the optimizer used them;
        with `--opt-level O2` these are the half ones, multiplied by the loss scale.
        """

    def on_evaluation_start(self, trainer: Trainer) -> None:
        """Called before each evaluation of `trainer.eval_model`, but not before the check of one
        batch. Collectives may be called.
        """

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Called after each evaluation, after the learning-rate schedule has used its metrics.
        Collectives may be called.

        `metrics`: the names and values of the evaluation, with the same bits on all ranks.
        """

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Called after the last step of each epoch and its evaluation. Collectives may be called.

        `trainer.progress.epoch` counts it. A run that ends in the middle of an epoch does not call
        it.
        """

    def on_checkpoint(self, trainer: Trainer, path: Path | None) -> None:
        """Called after each checkpoint is written. Collectives may be called.

        `path` is that of the checkpoint on rank 0, and None on the others; `trainer.saved_step` is
        its step. The state of the callback is in it already.
        """

    def on_log(self, trainer: Trainer, record: Mapping[str, Any]) -> None:
        """Called after each record of metrics.jsonl. Collectives may be called.

        Losses, norms and evaluations are the same on all ranks; times are this rank's. A record of
        a step that `--on-nonfinite skip` leaves out is {"step": ..., "skipped": ...}.
        """

    def on_end(self, trainer: Trainer) -> None:
        """Called at the end of a run, after its last checkpoint; not if it fails or is killed.
        Collectives may be called.
        """

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Called on each rank that ends with an exception, including Ctrl-C and a preemption. It
        must not call a collective. An exception that it raises is printed and ignored.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: tensors, numbers and strings, in dicts and lists.

        It must not call a collective. Rank 0's is saved, unless it is empty.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Called on every rank, after `on_start`, with the same
        tensors on the CPU; not called if the checkpoint has no state of this class.
        """

    def kept_steps(self) -> Iterable[int]:
        """Return the steps whose checkpoints are kept in addition to those of `--keep`.

        Called on rank 0 only, at each save: it must not call a collective. The steps are stored in
        the checkpoint, and are kept as long as it is.
        """
        return ()
