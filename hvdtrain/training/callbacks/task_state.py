"""The state of a task in checkpoints: a callback, if the task has a `state_dict` of its own."""

from __future__ import annotations

from typing import Any

from hvdtrain.training.callback import Callback
from hvdtrain.training.task import Task


class TaskState(Callback):
    """Saves the task's state, and restores it after `on_start`."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def state_dict(self) -> dict[str, Any]:
        """Return the task's state."""
        return self._task.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the task the state of a checkpoint."""
        self._task.load_state_dict(state)
