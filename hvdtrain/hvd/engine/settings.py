"""The HOROVOD_* variables: which setting each one is, and those that have no effect.

`hvd.init` reads them. docs/horovod-api.md says what each means; a test
compares its list with the tables.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from hvdtrain import transports
from hvdtrain.system.variables import not_negative, one_of, read_variable, whole

_LOG = logging.getLogger("hvdtrain")

DYNAMIC = "DYNAMIC"
LOG_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
TRANSPORTS = ("auto", *(name for name in transports.TRANSPORTS if name != "nccl"))
"""Those of CPU tensors."""
EXACT = "HVDTRAIN_EXACT_HOROVOD"


def _boolean(text: str) -> bool:
    """Return whether the text begins with a positive number, as Horovod reads its booleans."""
    number = re.match(r"[+-]?\d+", text)
    return number is not None and int(number.group()) > 0


def _variable(name: str, parse: Callable[[str], Any], default: Any) -> Any:
    """Return a field that an environment variable sets."""
    return field(default=default, metadata={"variable": name, "parse": parse})


@dataclass(frozen=True)
class Settings:
    """The engine's settings, from the environment."""

    fusion_threshold: int | None = _variable("HOROVOD_FUSION_THRESHOLD", whole, None)
    """Bytes; None means the engine's default."""
    timeline: str | None = _variable("HOROVOD_TIMELINE", str, None)
    """A path, or DYNAMIC."""
    timeline_mark_cycles: bool = _variable("HOROVOD_TIMELINE_MARK_CYCLES", _boolean, False)
    stall_check_disable: bool = _variable("HOROVOD_STALL_CHECK_DISABLE", _boolean, False)
    stall_check_time_s: float = _variable("HOROVOD_STALL_CHECK_TIME_SECONDS", not_negative, 60.0)
    stall_shutdown_time_s: float = _variable(
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", not_negative, 0.0
    )
    dynamic_process_sets: bool = _variable("HOROVOD_DYNAMIC_PROCESS_SETS", _boolean, False)
    elastic: bool = _variable("HOROVOD_ELASTIC", _boolean, False)
    elastic_timeout_s: float = _variable("HOROVOD_ELASTIC_TIMEOUT", not_negative, 600.0)
    gloo_timeout_s: float = _variable("HOROVOD_GLOO_TIMEOUT_SECONDS", not_negative, 30.0)
    gloo_iface: str | None = _variable("HOROVOD_GLOO_IFACE", str, None)
    log_level: str | None = _variable("HOROVOD_LOG_LEVEL", one_of(*LOG_LEVELS), None)
    transport: str = _variable("HVDTRAIN_TRANSPORT", one_of(*TRANSPORTS), "auto")
    peer_limit_s: float = 0.0
    """Seconds without a message after which a rank counts as lost; 0 waits forever, as Horovod
    does. Not a variable: the backend `compat` sets it."""
    exact_horovod: bool = _variable(EXACT, _boolean, False)
    ignored: tuple[str, ...] = ()
    """Variables that are set to a value without effect here."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Read the variables. Raises ValueError naming the one that cannot be parsed.

        An empty variable counts as unset. A boolean is true if it begins with a positive number, as
        in Horovod: "true" is false.
        """
        values = {
            item.name: read_variable(env, name, item.metadata["parse"], item.default)
            for name, item in _VARIABLES.items()
        }
        given = {name: env.get(name, "").strip().lower() for name in IGNORED}
        ignored = (n for n, text in given.items() if text and text != _SILENT_VALUES.get(n))
        return cls(**values, ignored=tuple(ignored))


# The field that each variable sets.
_VARIABLES = {item.metadata["variable"]: item for item in fields(Settings) if item.metadata}
HONOURED = {name: item for name, item in _VARIABLES.items() if name.startswith("HOROVOD_")}
OWN = {name: item for name, item in _VARIABLES.items() if name not in HONOURED}

_NO_TUNING = "autotuning is not implemented; set HOROVOD_FUSION_THRESHOLD yourself"
_TORCH = "the collectives are torch.distributed's"
IGNORED = {
    "HOROVOD_AUTOTUNE": _NO_TUNING,
    "HOROVOD_AUTOTUNE_LOG": _NO_TUNING,
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _NO_TUNING,
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _NO_TUNING,
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _NO_TUNING,
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _NO_TUNING,
    "HOROVOD_CYCLE_TIME": "operations are sent at once or when the caller pauses for 1 ms",
    "HOROVOD_CACHE_CAPACITY": "repeated names are sent as numbers, up to 8 MiB of data of one kind",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "NCCL chooses its algorithm itself",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "NCCL chooses its algorithm itself",
    "HOROVOD_TORUS_ALLREDUCE": "NCCL chooses its algorithm itself",
    "HOROVOD_NUM_NCCL_STREAMS": "NCCL has one stream for each process set",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "torch makes the copies",
    "HOROVOD_DISABLE_GROUP_FUSION": "results do not depend on it",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "completion is always asynchronous on a GPU",
    "HOROVOD_DISABLE_NVTX_RANGES": "hvdtrain has no NVTX ranges",
    "HOROVOD_LOG_HIDE_TIME": "log messages have no timestamp",
    "HOROVOD_MPI_THREADS_DISABLE": "the transport mpi needs threads; the others do not use MPI",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": _TORCH,
    "HOROVOD_THREAD_AFFINITY": "the engine's threads run on any core of the process",
    "HOROVOD_CONTROLLER": "hvdtrain has its own control plane",
    "HOROVOD_CPU_OPERATIONS": _TORCH,
    "HOROVOD_CCL_CACHE": _TORCH,
    "DDL_OPTIONS": _TORCH,
    "HOROVOD_ENABLE_XLA_OPS": "TensorFlow is not supported",
}
# Values without a warning: they request what is done anyway. horovodrun sets the first two.
_SILENT_VALUES = {
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_AUTOTUNE": "0",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
    "HOROVOD_TORUS_ALLREDUCE": "0",
    "HOROVOD_NUM_NCCL_STREAMS": "1",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "1",
    "HOROVOD_DISABLE_NVTX_RANGES": "1",
    "HOROVOD_LOG_HIDE_TIME": "1",
    "HOROVOD_ENABLE_XLA_OPS": "0",
}


def apply_log_level(settings: Settings) -> None:
    """Set the level of the logger `hvdtrain` if the environment has one."""
    if settings.log_level is not None:
        _LOG.setLevel(LOG_LEVELS[settings.log_level])


def announce(settings: Settings, rank: int) -> None:
    """Log on rank 0, once per process, the variables without effect, and the exact mode."""
    if rank == 0:
        for name in settings.ignored:
            _warn(f"{name} has no effect: {IGNORED[name]}")
        if settings.exact_horovod:
            _warn(
                f"{EXACT}=1: results equal Horovod's bit by bit, so broadcast_optimizer_state may "
                "step and move weights, and DistributedOptimizer drops state; unset it afterwards"
            )


@cache  # each text once per process, however often `hvd.init` is called
def _warn(text: str) -> None:
    _LOG.warning(text)
