"""The table of training methods: the options that choose each, the backends that have it, what it
needs of the others and what it takes from them.

Two methods exclude each other where one `needs` what the other `lacks`. From the table are made the
refusals before a launch (`check`), the tables of the manual and the tests of each cell
(tests/methods). Imports no torch: `hvdtrain train` checks its options with it.

To add a method: write its file, call it (a callback in `callback_list.from_options`, a wrapper of
the optimizer in `prepared_model.prepare`), add its options to TrainConfig and to METHOD_OPTIONS, a
row here, and an arm to the table of tests/methods/arms.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from hvdtrain.errors import InputError
from hvdtrain.training.config import TrainConfig

BACKENDS = ("single", "dp", "ddp", "horovod", "compat")
"""The columns of the table."""

ONE_PROCESS = {
    name: f"backend {name} is one process, so there is no peer to exchange with"
    for name in ("single", "dp")
}

NO_DDP_BUCKETS = (
    "it is the size of DDP's buckets, and Horovod's is the variable HOROVOD_FUSION_THRESHOLD; use "
    "that, or --backend ddp"
)


class Need(Enum):
    """What a method may need of a run. Each holds, unless another method lacks it."""

    FP32 = "fp32 weights"
    EVERY_STEP = "that nothing else leaves steps out"


@dataclass(frozen=True)
class Method:
    """One row: a method, its options, where it is refused, and what it needs and lacks."""

    name: str
    option: str
    """An example of the options that choose it, as in a command."""
    is_chosen: Callable[[TrainConfig], bool]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Reasons by backend. The backends that are not named have the method."""
    needs: tuple[Need, ...] = ()
    lacks: Mapping[Need, str] = field(default_factory=dict)
    """What methods beside it do not have, and why: the end of a sentence."""


_NO_BF16_GRADIENTS = {
    "horovod": "Horovod 0.28.1 raises `Tensor type torch.BFloat16Tensor is not supported`; use "
    "--precision fp16, or --backend compat or ddp"
}


_LEAVES_STEPS_OUT = {Need.EVERY_STEP: "the loss scale leaves out steps that overflow"}


def _half_weights(
    level: str,
    half: str,
    masters: str,
    refused: Mapping[str, str] = {},
    lacks: Mapping[Need, str] = {},
) -> Method:
    """Return the row of an opt level with half weights, in one half type."""
    return Method(
        f"{level}: {half} weights{masters}",
        f"--precision {half} --opt-level {level}",
        lambda c: (c.opt_level, c.precision) == (level, half),
        refused=refused,
        lacks={Need.FP32: f"weights and gradients are {half}", **lacks},
    )


METHODS = (
    Method("gradient accumulation", "--accumulate 4", lambda c: c.accumulate > 1),
    Method(
        "gradient clipping",
        "--clip-norm 1.0",
        lambda c: c.clip_norm < float("inf"),
    ),
    Method(
        "one-cycle learning rate",
        "--schedule one-cycle",
        lambda c: c.schedule_option().kind == "one-cycle",
    ),
    Method(
        "plateau learning rate",
        "--schedule plateau",
        lambda c: c.schedule_option().kind == "plateau",
    ),
    Method(
        "early stopping",
        "--early-stop loss:3",
        lambda c: c.early_stop is not None,
    ),
    Method(
        "best checkpoint",
        "--keep-best accuracy",
        lambda c: c.keep_best is not None,
    ),
    Method(
        "average of weights",
        "--ema 0.999",
        lambda c: c.ema is not None,
        needs=(Need.FP32,),
    ),
    Method(
        "bad steps left out",
        "--on-nonfinite skip",
        lambda c: c.on_nonfinite == "skip",
        needs=(Need.EVERY_STEP,),
        lacks={Need.EVERY_STEP: "steps that are not finite are left out"},
    ),
    Method(
        "bf16 autocast",
        "--precision bf16",
        lambda c: c.precision == "bf16" and c.opt_level in ("none", "O1"),
    ),
    Method(
        "fp16 with a scaled loss",
        "--precision fp16",
        lambda c: c.precision == "fp16" and c.opt_level in ("none", "O1"),
        lacks=_LEAVES_STEPS_OUT,
    ),
    Method("O1: autocast", "--precision fp16 --opt-level O1", lambda c: c.opt_level == "O1"),
    _half_weights("O2", "fp16", ", fp32 masters", lacks=_LEAVES_STEPS_OUT),
    _half_weights("O2", "bf16", ", fp32 masters", refused=_NO_BF16_GRADIENTS),
    _half_weights("O3", "fp16", " alone"),
    _half_weights("O3", "bf16", " alone", refused=_NO_BF16_GRADIENTS),
    Method("padded last batch", "--uneven pad", lambda c: c.uneven == "pad"),
    Method(
        "short last batch, weighted",
        "--uneven join",
        lambda c: c.uneven == "join",
    ),
    Method(
        "SyncBatchNorm",
        "--sync-bn",
        lambda c: c.sync_bn,
        refused={"dp": "nn.DataParallel's replicas cannot communicate; use --backend ddp"},
    ),
    Method(
        "buffers of each rank",
        "--buffers local",
        lambda c: c.buffers == "local",
    ),
    Method(
        "size of buckets",
        "--bucket-mib 10",
        lambda c: c.bucket_mib != TrainConfig.bucket_mib,
        refused={
            **ONE_PROCESS,
            **dict.fromkeys(("horovod", "compat"), NO_DDP_BUCKETS),
        },
    ),
    Method(
        "fp16 gradients",
        "--compression fp16",
        lambda c: c.compression == "fp16",
        refused=ONE_PROCESS,
        needs=(Need.FP32,),
    ),
    Method(
        "bf16 gradients",
        "--compression bf16",
        lambda c: c.compression == "bf16",
        refused={
            **ONE_PROCESS,
            "horovod": "Horovod 0.28.1 compresses to fp16 only; use --backend compat or ddp",
        },
        needs=(Need.FP32,),
    ),
    Method(
        "PowerSGD",
        "--compression powersgd",
        lambda c: c.compression == "powersgd",
        refused={
            **ONE_PROCESS,
            "horovod": "PowerSGD is a communication hook of DDP; use --backend ddp",
            "compat": "PowerSGD is a communication hook of DDP; use --backend ddp",
        },
        needs=(Need.EVERY_STEP,),  # an overflow would stay in the errors that it keeps
    ),
    Method(
        "sharded optimizer",
        "--shard-optimizer",
        lambda c: c.shard_optimizer,
        refused={
            **ONE_PROCESS,
            "horovod": "Horovod's ranks share no memory; use --backend ddp or compat",
        },
    ),
)


def chosen(config: TrainConfig) -> list[Method]:
    """Return the methods that the options choose."""
    return [method for method in METHODS if method.is_chosen(config)]


def check(config: TrainConfig, backend: str) -> None:
    """Raise InputError if a method that the options choose is refused. Not collective.

    A backend that is not in the table (a user's own) is assumed to have every method.
    """
    methods = chosen(config)
    for i, method in enumerate(reversed(methods), start=1):  # the more special ones are below
        if backend in method.refused:
            raise InputError(f"{as_given(method, config)}: {method.refused[backend]}")
        for other in methods[:-i]:
            _check_needs(method, other, config)
            _check_needs(other, method, config)


def _check_needs(method: Method, other: Method, config: TrainConfig) -> None:
    """Raise InputError if a method needs what the other lacks."""
    for need in method.needs:
        if why := other.lacks.get(need):
            raise InputError(
                f"{as_given(method, config)} needs {need.value}; with {as_given(other, config)}, "
                f"{why}; leave one of them out"
            )


def as_given(method: Method, config: TrainConfig) -> str:
    """Return the options of a method with the values of `config`, for messages."""
    words = method.option.split()
    for at, (flag, example) in enumerate(itertools.pairwise(words), start=1):
        value = getattr(config, flag.removeprefix("--").replace("-", "_"), None)
        if not example.startswith("--") and value is not None:
            words[at] = f"{value:g}" if isinstance(value, float) else str(value)
    return " ".join(words)
