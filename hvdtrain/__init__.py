"""One training script, any data-parallel engine.

The public names are in the list below. Each is imported on first use: importing torch takes
seconds, and `import hvdtrain` must not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.3.0.dev0"

__all__ = [
    "Backend",
    "BackendOptions",
    "Callback",
    "Checkpoints",
    "HvdtrainError",
    "Loader",
    "Task",
    "TrainConfig",
    "Trainer",
    "World",
    "detect",
    "open_backend",
    "run",
    "shard_bounds",
]

_HOME = {
    "Backend": "hvdtrain.backends.base",
    "BackendOptions": "hvdtrain.backends.options",
    "Callback": "hvdtrain.training.callback",
    "Checkpoints": "hvdtrain.training.loop_checkpoints",
    "HvdtrainError": "hvdtrain.errors",
    "Loader": "hvdtrain.training.data.loader",
    "Task": "hvdtrain.training.task",
    "TrainConfig": "hvdtrain.training.config",
    "Trainer": "hvdtrain.training.trainer",
    "World": "hvdtrain.job.world",
    "detect": "hvdtrain.job.world",
    "open_backend": "hvdtrain.backends",
    "run": "hvdtrain.launch.runner",
    "shard_bounds": "hvdtrain.training.sharding",
}

if TYPE_CHECKING:
    from hvdtrain.backends import open_backend
    from hvdtrain.backends.base import Backend
    from hvdtrain.backends.options import BackendOptions
    from hvdtrain.errors import HvdtrainError
    from hvdtrain.job.world import World, detect
    from hvdtrain.launch.runner import run
    from hvdtrain.training.callback import Callback
    from hvdtrain.training.config import TrainConfig
    from hvdtrain.training.data.loader import Loader
    from hvdtrain.training.loop_checkpoints import Checkpoints
    from hvdtrain.training.sharding import shard_bounds
    from hvdtrain.training.task import Task
    from hvdtrain.training.trainer import Trainer


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
