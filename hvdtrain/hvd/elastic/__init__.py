"""The names of `horovod.torch.elastic`. `state` and `sampler` are its submodules, as there;
`common` is `horovod.common.elastic`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from hvdtrain.hvd.elastic.common import State, run_fn
from hvdtrain.hvd.elastic.sampler import ElasticSampler
from hvdtrain.hvd.elastic.state import TorchState
from hvdtrain.hvd.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "TorchState", "init", "run", "shutdown"]

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Make `func(state, ...)` survive failures and changes of the world. Collective when called.

    The state is synchronised first, so nothing before it may be collective but what every rank
    does at its start. HorovodInternalError restores the last commit, HostsUpdatedInterrupt keeps
    the state; both make the world anew, run the state's reset callbacks, and call `func` again.
    Any other error is raised.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()
