"""The state of a task in checkpoints: a callback, if the task has a `state_dict` of its own."""

from __future__ import annotations

from hvdtrain.training.callback import Callback
from hvdtrain.training.task import Task


class TaskState(Callback):
    """Saves the task's state, and restores it after `on_start`, by the task's own methods."""

    def __init__(self, task: Task) -> None:
        self.state_dict = task.state_dict  # type: ignore[method-assign]
        self.load_state_dict = task.load_state_dict  # type: ignore[method-assign]
