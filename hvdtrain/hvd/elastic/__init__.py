"""The names of `horovod.torch.elastic`, for scripts.

`state` and `sampler` are submodules, as in Horovod; `common` is `horovod.common.elastic`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.elastic.common import run_fn
from hvdtrain.hvd.elastic.sampler import ElasticSampler
from hvdtrain.hvd.elastic.state import TorchState
from hvdtrain.hvd.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "TorchState", "init", "run", "shutdown"]

F = TypeVar("F", bound=Callable[..., Any])


def run(func: F) -> F:
    """Wrap `func(state, ...)` so that it survives failures and changes of the world.

    The wrapper is collective. It first synchronises the state, so before it a script may only make
    collectives that every rank makes at its start. HorovodInternalError restores the last commit,
    HostsUpdatedInterrupt keeps the state; both shut hvd down and initialise it again, run the
    state's reset callbacks, and call `func` again. Any other error is raised.
    """
    return run_fn(func, _reset)


def _reset() -> bool:
    """Enter the next world. Return whether a process has joined, which has no state yet."""
    shutdown()
    init(process_sets=basics.process_sets)  # the same as on a process that joins
    return any(info["is_new"] for info in basics.engine.rank_infos)
