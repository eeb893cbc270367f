"""The callbacks of one run: made from the options, called, saved, resumed. Used by the Trainer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hvdtrain.backends.handshake import check_same
from hvdtrain.errors import HvdtrainError, InputError, add_note, one_line
from hvdtrain.optim.model_sync import to_cpu
from hvdtrain.training.callback import Callback
from hvdtrain.training.callbacks.best_checkpoint import BestCheckpoint
from hvdtrain.training.callbacks.early_stop import EarlyStop
from hvdtrain.training.callbacks.ema import EMA
from hvdtrain.training.callbacks.gradient_guard import GradientGuard
from hvdtrain.training.callbacks.tensorboard import TensorBoard
from hvdtrain.training.callbacks.timed_checkpoint import TimedCheckpoint
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.task import Task
from hvdtrain.training.user_module import load_named

if TYPE_CHECKING:
    from hvdtrain.training.trainer import Trainer


def from_options(config: TrainConfig) -> list[Callback]:
    """Return the callbacks that the options choose. Not collective.

    Raises InputError for a `--callback` that cannot be found, and for a missing package.
    """
    options: dict[Callable[..., Callback], Any] = {
        EarlyStop: config.early_stop_criterion(),
        BestCheckpoint: config.keep_best_criterion(),
        TimedCheckpoint: config.checkpoint_interval().seconds or None,
        EMA: config.ema,
    }
    found = [make(value) for make, value in options.items() if value is not None]
    if config.on_nonfinite == "skip":
        found.append(GradientGuard())
    if config.tensorboard:
        found.append(TensorBoard())
    return [*found, *map(load_callback, config.callback)]


def load_callback(spec: str) -> Callback:
    """Return the callback that `spec` names, `module:NAME` or `file.py:NAME`: a class without
    constructor arguments, or an object. Not collective. Raises InputError.
    """
    found: Callback | type[Callback] = load_named(
        spec,
        "callback",
        "Callback",
        lambda value: issubclass(value if isinstance(value, type) else type(value), Callback),
    )
    if isinstance(found, Callback):
        return copy.deepcopy(found)  # the next run in this process has its own
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        name = found.__name__
        raise InputError(
            f"--callback {spec}: {error}; name an object instead of the class, such as "
            f"{name.lower()} = {name}(...) in that file"
        ) from error
    return found()


class TaskState(Callback):
    """Saves the task's state, and restores it after `on_start`, by the task's own methods."""

    def __init__(self, task: Task) -> None:
        self.state_dict = task.state_dict  # type: ignore[method-assign]
        self.load_state_dict = task.load_state_dict  # type: ignore[method-assign]


class CallbackList:
    """The callbacks of a run by class name; the second of a class is "NAME-2", and so on."""

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]) -> None:
        self._trainer = trainer
        self._by_name: dict[str, Callback] = {}
        for callback in callbacks:
            kind = type(callback).__name__
            if not isinstance(callback, Callback):
                raise InputError(f"callbacks contains {kind}, which is not an hvdtrain.Callback")
            number = 1 + sum(name.partition("-")[0] == kind for name in self._by_name)
            self._by_name[kind if number == 1 else f"{kind}-{number}"] = callback

    def check(self) -> None:
        """Raise WorldMismatch, on every rank, if another rank has other callbacks. Collective."""
        names = ", ".join(self._by_name) or "none"
        check_same(
            self._trainer.backend, {"callbacks": names}, "; give every rank the same callbacks"
        )

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks, with the Trainer. Collective if one of them is."""
        for name in self._by_name:
            self._ask(name, hook, self._trainer, *args)

    def _ask(self, name: str, method: str, *args: Any) -> Any:
        """Call a method of one callback. Add its name to an exception that is not expected."""
        try:
            return getattr(self._by_name[name], method)(*args)
        except HvdtrainError:
            raise
        except Exception as error:
            add_note(error, f"raised in the callback {name}.{method}")
            raise

    def tell_exception(self, error: BaseException) -> None:
        """Call `on_exception` of all callbacks; print what they raise. Not collective."""
        for name, callback in self._by_name.items():
            try:
                callback.on_exception(self._trainer, error)
            except Exception as own:
                text = f"{name}.on_exception raised {type(own).__name__}: {one_line(own)}"
                self._trainer.console.print_line(f"callback {text}")

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all callbacks by name, on the CPU. Not collective."""
        states = {name: self._ask(name, "state_dict") for name in self._by_name}
        return {name: to_cpu(state) for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restore the callbacks' states; print which of them the checkpoint, or the run, lacks."""
        print_line = self._trainer.console.print_line
        for name, callback in self._by_name.items():
            if name in states:
                self._ask(name, "load_state_dict", states[name])
            elif callback.state_dict():
                print_line(
                    f"resume   {name}: starts without a state: the checkpoint has none for it"
                )
        for name in sorted(states.keys() - self._by_name):
            print_line(f"resume   {name}: the checkpoint's state is not used")

    def kept_steps(self) -> list[int]:
        """Return the steps whose checkpoints are not removed. Not collective."""
        return sorted({step for name in self._by_name for step in self._ask(name, "kept_steps")})
