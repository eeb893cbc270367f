"""The table of training methods that a backend, or another method, excludes; the methods that are
not here go with every backend and beside all others.

Two methods exclude each other where one `needs` what the other `lacks`. From the table are made the
refusals before a launch (`check`), the tables of the manual and the tests of each cell
(tests/methods). Imports no torch: `hvdtrain train` checks its options with it.

To add a method: write its file, call it (a callback in `callback_list.from_options`, a wrapper of
the optimizer in `Stepper`), add its options to TrainConfig, an arm to the table of
tests/methods/arms.py, and, if it is excluded anywhere, a row here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from enum import Enum
from typing import NamedTuple

from hvdtrain.errors import InputError
from hvdtrain.training.config import TrainConfig

BACKENDS = ("single", "dp", "ddp", "horovod", "compat")
"""The columns of the table."""

_ONE_PROCESS = {
    name: f"backend {name} is one process, so there is no peer to exchange with"
    for name in ("single", "dp")
}


class Need(Enum):
    """What a method may need of a run. Each holds, unless another method lacks it."""

    FP32 = "fp32 weights"
    EVERY_STEP = "every step to be taken"


class Method(NamedTuple):
    """One row: a method, its options, where it is refused, and what it needs and lacks."""

    name: str
    option: str
    """The options that choose it, as in a command."""
    is_chosen: Callable[[TrainConfig], bool]
    refused: Mapping[str, str] = {}
    """Reasons by backend. The backends that are not named have the method."""
    needs: tuple[Need, ...] = ()
    lacks: Mapping[Need, str] = {}
    """What methods beside it do not have, and why: the end of a sentence."""


_OVERFLOWS = {Need.EVERY_STEP: "the loss scale skips steps that overflow"}


def _half_weights(level: str, half: str) -> Method:
    """Return the row of an opt level with half weights, in one half type."""
    no_bf16 = (
        "Horovod 0.28.1 raises `Tensor type torch.BFloat16Tensor is not supported`; use "
        "--precision fp16, or --backend compat or ddp"
    )
    scales = (level, half) == ("O2", "fp16")  # at O3 the loss scale is 1
    return Method(
        f"{level}: {half} weights",
        f"--precision {half} --opt-level {level}",
        lambda c: (c.opt_level, c.precision) == (level, half),
        refused={"horovod": no_bf16} if half == "bf16" else {},
        lacks={Need.FP32: f"weights and gradients are {half}"} | (_OVERFLOWS if scales else {}),
    )


def _compression(value: str, name: str, need: Need, **refused: str) -> Method:
    """Return the row of a compression. `refused`: reasons, beside those of one process."""
    return Method(
        name,
        f"--compression {value}",
        lambda c: c.compression == value,
        refused={**_ONE_PROCESS, **refused},
        needs=(need,),
    )


METHODS = (
    Method(
        "average of weights",
        "--ema",
        lambda c: c.ema is not None,
        needs=(Need.FP32,),
    ),
    Method(
        "bad steps left out",
        "--on-nonfinite skip",
        lambda c: c.on_nonfinite == "skip",
        needs=(Need.EVERY_STEP,),
        lacks={Need.EVERY_STEP: "steps that are not finite are skipped"},
    ),
    Method(
        "fp16 with a scaled loss",
        "--precision fp16",
        lambda c: c.precision == "fp16" and c.opt_level in ("none", "O1"),
        lacks=_OVERFLOWS,
    ),
    *(_half_weights(level, half) for level in ("O2", "O3") for half in ("fp16", "bf16")),
    Method(
        "SyncBatchNorm",
        "--sync-bn",
        lambda c: c.sync_bn,
        refused={"dp": "nn.DataParallel's replicas cannot communicate; use --backend ddp"},
    ),
    Method(
        "size of buckets",
        "--bucket-mib",
        lambda c: c.bucket_mib != TrainConfig.bucket_mib,
        refused={
            **_ONE_PROCESS,
            **dict.fromkeys(
                ("horovod", "compat"),
                "it sets the size of DDP's buckets; set the variable HOROVOD_FUSION_THRESHOLD for "
                "Horovod's, or use --backend ddp",
            ),
        },
    ),
    _compression("fp16", "fp16 gradients", Need.FP32),
    _compression(
        "bf16",
        "bf16 gradients",
        Need.FP32,
        horovod="Horovod 0.28.1 compresses to fp16 only; use --backend compat or ddp",
    ),
    _compression(
        "powersgd",
        "PowerSGD",
        Need.EVERY_STEP,  # an overflow would stay in the errors that it keeps
        **dict.fromkeys(
            ("horovod", "compat"),
            "PowerSGD is a communication hook of DDP; use --backend ddp",
        ),
    ),
    Method(
        "sharded optimizer",
        "--shard-optimizer",
        lambda c: c.shard_optimizer,
        refused={
            **_ONE_PROCESS,
            "horovod": "Horovod's ranks share no memory; use --backend ddp or compat",
        },
    ),
)


def check(config: TrainConfig, backend: str) -> None:
    """Raise InputError if a method that the options choose is refused. Not collective.

    A backend that is not in the table (a user's own) is assumed to have every method.
    """
    chosen = [method for method in METHODS if method.is_chosen(config)]
    for method in chosen:
        if backend in method.refused:
            raise InputError(f"{method.option}: {method.refused[backend]}")
    for method, other in itertools.permutations(chosen, 2):
        for need in method.needs:
            if why := other.lacks.get(need):
                raise InputError(
                    f"{method.option} needs {need.value}; with {other.option}, {why}; leave out "
                    "one of the two"
                )
