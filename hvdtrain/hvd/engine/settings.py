"""The HOROVOD_* variables: the meaning of each here, and those that have no effect.

`hvd.init` reads them. A test compares the tables with the list in hvd/README.md.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, overload

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

HONOURED = {
    "HOROVOD_FUSION_THRESHOLD": "bytes fused into one collective",
    "HOROVOD_CYCLE_TIME": "milliseconds for which an operation keeps its name, done or not",
    "HOROVOD_CACHE_CAPACITY": "operations remembered, so as not to be negotiated again; 0: none",
    "HOROVOD_TIMELINE": "file that rank 0 writes its trace to, or DYNAMIC for start_timeline()",
    "HOROVOD_TIMELINE_MARK_CYCLES": "whether the trace marks the rounds of negotiation",
    "HOROVOD_STALL_CHECK_DISABLE": "whether waiting for missing ranks goes without warning",
    "HOROVOD_STALL_CHECK_TIME_SECONDS": "seconds until that warning",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "seconds until such operations fail; 0: never",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "whether process sets may be added and removed after init()",
    "HOROVOD_ELASTIC": "whether the world may change",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "seconds that the ranks wait for each other at init()",
    "HOROVOD_GLOO_IFACE": "network interface, as GLOO_SOCKET_IFNAME",
    "HOROVOD_LOG_LEVEL": "level of the logger `hvdtrain`",
    "HOROVOD_THREAD_AFFINITY": "core of the engine's threads, one for each local rank",
}

EXACT = "HVDTRAIN_EXACT_HOROVOD"
OWN = {
    "HVDTRAIN_TRANSPORT": "what carries CPU tensors: shm, gloo, mpi; auto as for --transport",
    EXACT: "whether to deviate from Horovod in no bit, its surprises included",
}
TRANSPORTS = ("auto", "shm", "gloo", "mpi")

_NO_TUNING = "there is nothing to tune"
_TORCH = "the collectives are torch.distributed's"
IGNORED = {
    "HOROVOD_AUTOTUNE": _NO_TUNING,
    "HOROVOD_AUTOTUNE_LOG": _NO_TUNING,
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _NO_TUNING,
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _NO_TUNING,
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _NO_TUNING,
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _NO_TUNING,
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "NCCL chooses its algorithm itself",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "NCCL chooses its algorithm itself",
    "HOROVOD_TORUS_ALLREDUCE": "NCCL chooses its algorithm itself",
    "HOROVOD_NUM_NCCL_STREAMS": "NCCL has one stream for each process set",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "torch copies",
    "HOROVOD_DISABLE_GROUP_FUSION": "results do not depend on it",
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "completion is always asynchronous on a GPU",
    "HOROVOD_DISABLE_NVTX_RANGES": "there are no NVTX ranges",
    "HOROVOD_LOG_HIDE_TIME": "messages have no time",
    "HOROVOD_MPI_THREADS_DISABLE": "MPI is not used",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "MPI is not used",
    "HOROVOD_CONTROLLER": "the control plane is our own",
    "HOROVOD_CPU_OPERATIONS": _TORCH,
    "HOROVOD_CCL_CACHE": _TORCH,
    "DDL_OPTIONS": _TORCH,
    "HOROVOD_ENABLE_XLA_OPS": "there is no TensorFlow here",
}
# Values that request what happens anyway. horovodrun --gloo always sets the first two.
_AGREEABLE = {
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


@dataclass(frozen=True)
class Settings:
    """The engine's settings, from the environment."""

    fusion_threshold: int | None = None
    """Bytes; None means the engine's default."""
    cycle_time_ms: float = 1.0
    """How long a name stays in use if its operation is neither synchronized nor polled as done."""
    cache_capacity: int = 1024
    timeline: str | None = None
    """A path, or DYNAMIC."""
    timeline_mark_cycles: bool = False
    stall_check_disable: bool = False
    stall_check_time_s: float = 60.0
    stall_shutdown_time_s: float = 0.0
    dynamic_process_sets: bool = False
    elastic: bool = False
    gloo_timeout_s: float = 30.0
    gloo_iface: str | None = None
    log_level: str | None = None
    thread_affinity: tuple[int, ...] = ()
    transport: str = "auto"
    peer_limit_s: float = 0.0
    """Seconds without a message after which a rank counts as lost; 0 waits for ever, as Horovod
    does. Not a variable: the backend `compat` sets it."""
    exact_horovod: bool = False
    ignored: tuple[str, ...] = ()
    """Variables that are set to a value without effect here."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Read the variables. Raises ValueError naming the one that cannot be parsed.

        An empty variable counts as unset. A boolean is true if it begins with a positive number, as
        in Horovod: "true" is false.
        """
        read = _Reader(env)
        default = cls()
        return cls(
            fusion_threshold=read.integer("HOROVOD_FUSION_THRESHOLD", None),
            cycle_time_ms=read.number("HOROVOD_CYCLE_TIME", default.cycle_time_ms),
            cache_capacity=read.integer("HOROVOD_CACHE_CAPACITY", default.cache_capacity),
            timeline=read.text("HOROVOD_TIMELINE"),
            timeline_mark_cycles=read.boolean("HOROVOD_TIMELINE_MARK_CYCLES"),
            stall_check_disable=read.boolean("HOROVOD_STALL_CHECK_DISABLE"),
            stall_check_time_s=read.number(
                "HOROVOD_STALL_CHECK_TIME_SECONDS", default.stall_check_time_s
            ),
            stall_shutdown_time_s=read.number(
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", default.stall_shutdown_time_s
            ),
            dynamic_process_sets=read.boolean("HOROVOD_DYNAMIC_PROCESS_SETS"),
            elastic=read.boolean("HOROVOD_ELASTIC"),
            gloo_timeout_s=read.number("HOROVOD_GLOO_TIMEOUT_SECONDS", default.gloo_timeout_s),
            gloo_iface=read.text("HOROVOD_GLOO_IFACE"),
            log_level=read.one_of("HOROVOD_LOG_LEVEL", tuple(LOG_LEVELS), None),
            thread_affinity=read.integers("HOROVOD_THREAD_AFFINITY"),
            transport=read.one_of("HVDTRAIN_TRANSPORT", TRANSPORTS, default.transport),
            exact_horovod=read.boolean(EXACT),
            ignored=tuple(
                name
                for name in IGNORED
                if (value := read.text(name)) is not None and value.lower() != _AGREEABLE.get(name)
            ),
        )


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
                f"{EXACT}=1: optimizers deviate from Horovod in no bit; so their hidden step moves "
                "the weights, and wrapping one drops its state; unset it once results are compared"
            )


@functools.cache  # each text once per process, however often `hvd.init` is called
def _warn(text: str) -> None:
    _LOG.warning(text)


class _Reader:
    """Reads typed values of an environment."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def text(self, name: str) -> str | None:
        return self._env.get(name, "").strip() or None

    def boolean(self, name: str) -> bool:
        number = re.match(r"[+-]?\d+", self.text(name) or "")
        return number is not None and int(number.group()) > 0

    @overload
    def integer(self, name: str, default: int) -> int: ...
    @overload
    def integer(self, name: str, default: None) -> int | None: ...
    def integer(self, name: str, default: int | None) -> int | None:
        value = self.text(name)
        return default if value is None else _number(name, value, int)

    def integers(self, name: str) -> tuple[int, ...]:
        values = self.text(name)
        return tuple(_number(name, v, int) for v in values.split(",")) if values else ()

    def number(self, name: str, default: float) -> float:
        value = self.text(name)
        return default if value is None else _number(name, value, float)

    @overload
    def one_of(self, name: str, choices: tuple[str, ...], default: str) -> str: ...
    @overload
    def one_of(self, name: str, choices: tuple[str, ...], default: None) -> str | None: ...
    def one_of(self, name: str, choices: tuple[str, ...], default: str | None) -> str | None:
        value = self.text(name)
        if value is not None and value.lower() not in choices:
            raise ValueError(f"{name}={value} must be one of {', '.join(choices)}")
        return value.lower() if value is not None else default


_Number = TypeVar("_Number", int, float)


def _number(name: str, value: str, kind: type[_Number]) -> _Number:
    try:
        number = kind(value)
    except ValueError:
        number = kind(-1)  # takes the branch of the error below
    if not 0 <= number < math.inf:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{name}={value} must be {what} >= 0")
    return number
