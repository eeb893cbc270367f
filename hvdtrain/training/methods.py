"""The table of training methods: the options that choose each, and the backends that have it.

Three things are made from it: the refusals before a launch (`check`), the table of the manual
(`python -m hvdtrain.training.methods`), and the tests of each cell (tests/methods). Imports no
torch: `hvdtrain train` checks its options with it.

To add a method: write its file, add its options to TrainConfig, a row here, and an arm to the
table of tests/methods/arms.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdtrain.errors import InputError
from hvdtrain.training.config import TrainConfig

BACKENDS = ("single", "dp", "ddp", "horovod", "compat", "ps")
"""The columns of the table."""

ONE_PROCESS = {
    name: f"backend {name} is one process, so there is no peer to exchange with"
    for name in ("single", "dp")
}

LEFT_OUT_BY_SCALE = "the loss scale leaves steps out itself"
NO_DDP_BUCKETS = (
    "it is the size of DDP's buckets, and Horovod's is the variable HOROVOD_FUSION_THRESHOLD; use "
    "that, or --backend ddp"
)
NO_MASTERS = "the half weights are averaged, and the fp32 masters are not"
NO_MEAN = "it reads the averaged gradient, and each rank steps on its own"
NO_MEAN_AT_ONCE = "it reads the averaged gradient, and each rank's is applied by itself"
NO_OVERFLOW = "an overflow would stay in the errors that each rank keeps"
NO_SCALE = "the loss scale needs gradients that are equal on all ranks"
NO_SERVER = dict.fromkeys(
    ("single", "dp", "ddp", "horovod", "compat"), "it has no server; use --backend ps"
)
NO_RANKS_STEP = "the server alone steps; use --backend ddp"
SENDS_ALL = {"ps": "a parameter server receives uncompressed gradients; use --backend ddp"}

KEPT_BY_RANK = "each rank keeps state of its own, which is lost with it"
NOT_HELD = "an evaluation is of averaged parameters, which no rank has until the next average"


@dataclass(frozen=True)
class Method:
    """One row: a method, its options, and where it is refused."""

    name: str
    option: str
    """An example of the options that choose it, as in a command."""
    is_chosen: Callable[[TrainConfig], bool]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Reasons by backend. The backends that are not named have the method."""
    not_with: Mapping[str, str] = field(default_factory=dict)
    """Reasons by the name of another method."""


_NO_BF16_GRADIENTS = {
    "horovod": "Horovod 0.28.1 raises `Tensor type torch.BFloat16Tensor is not supported`; use "
    "--precision fp16, or --backend compat or ddp"
}


def _half_weights(level: str, half: str, masters: str, refused: Mapping[str, str] = {}) -> Method:
    """Return the row of an opt level with half weights, in one half type."""
    return Method(
        f"{level}: {half} weights{masters}",
        f"--precision {half} --opt-level {level}",
        lambda c: (c.opt_level, c.precision) == (level, half),
        refused=refused,
    )


def _are_sent_in(half: str) -> Mapping[str, str]:
    """Return why the weights of a half type exclude gradients compressed to it."""
    levels = (f"O2: {half} weights, fp32 masters", f"O3: {half} weights alone")
    return dict.fromkeys(levels, f"the gradients are {half} already")


METHODS = (
    Method("gradient accumulation", "--accumulate 4", lambda c: c.accumulate > 1),
    Method("gradient clipping", "--clip-norm 1.0", lambda c: c.clip_norm < float("inf")),
    Method("one-cycle learning rate", "--schedule one-cycle", lambda c: c.schedule == "one-cycle"),
    Method("plateau learning rate", "--schedule plateau", lambda c: c.schedule == "plateau"),
    Method(
        "early stopping",
        "--early-stop loss:3",
        lambda c: c.early_stop is not None,
        not_with={"local SGD": NOT_HELD},
    ),
    Method(
        "best checkpoint",
        "--keep-best accuracy",
        lambda c: c.keep_best is not None,
        not_with={"local SGD": NOT_HELD},
    ),
    Method(
        "average of weights",
        "--ema 0.999",
        lambda c: c.ema is not None,
        not_with={
            "local SGD": "the ranks' weights differ between two averages of local SGD",
            **dict.fromkeys(
                (
                    "O2: fp16 weights, fp32 masters",
                    "O2: bf16 weights, fp32 masters",
                    "O3: fp16 weights alone",
                    "O3: bf16 weights alone",
                ),
                "an average of half weights rounds its small updates away",
            ),
        },
    ),
    Method(
        "bad steps left out",
        "--on-nonfinite skip",
        lambda c: c.on_nonfinite == "skip",
        not_with={
            "local SGD": NO_MEAN,
            "asynchronous parameter server": NO_MEAN_AT_ONCE,
            "PowerSGD": NO_OVERFLOW,
            "fp16 with a scaled loss": LEFT_OUT_BY_SCALE,
            "O2: fp16 weights, fp32 masters": LEFT_OUT_BY_SCALE,
        },
    ),
    Method(
        "gradient spikes",
        "--spike 10",
        lambda c: c.spike is not None,
        not_with={"local SGD": NO_MEAN, "asynchronous parameter server": NO_MEAN_AT_ONCE},
    ),
    Method(
        "gradient log",
        "--log-gradients 100",
        lambda c: c.log_gradients > 0,
        not_with={"local SGD": NO_MEAN, "asynchronous parameter server": NO_MEAN_AT_ONCE},
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
    ),
    Method("O1: autocast", "--precision fp16 --opt-level O1", lambda c: c.opt_level == "O1"),
    _half_weights("O2", "fp16", ", fp32 masters"),
    _half_weights("O2", "bf16", ", fp32 masters", refused=_NO_BF16_GRADIENTS),
    _half_weights("O3", "fp16", " alone"),
    _half_weights("O3", "bf16", " alone", refused=_NO_BF16_GRADIENTS),
    Method("padded last batch", "--uneven pad", lambda c: c.uneven == "pad"),
    Method(
        "short last batch, weighted",
        "--uneven join",
        lambda c: c.uneven == "join",
        not_with={"local SGD": "a step of one rank has no mean over the samples of all"},
    ),
    Method(
        "SyncBatchNorm",
        "--sync-bn",
        lambda c: c.sync_bn,
        refused={"dp": "nn.DataParallel's replicas cannot communicate; use --backend ddp"},
    ),
    Method("buffers of each rank", "--buffers local", lambda c: c.buffers == "local"),
    Method(
        "size of buckets",
        "--bucket-mib 10",
        lambda c: c.bucket_mib != TrainConfig.bucket_mib,
        refused={
            **ONE_PROCESS,
            **dict.fromkeys(("horovod", "compat"), NO_DDP_BUCKETS),
            "ps": "a parameter server is sent whole parameters; use --backend ddp",
        },
        not_with={"local SGD": "no gradients are sent"},
    ),
    Method(
        "fp16 gradients",
        "--compression fp16",
        lambda c: c.compression == "fp16",
        refused={**ONE_PROCESS, **SENDS_ALL},
        not_with=_are_sent_in("fp16"),
    ),
    Method(
        "bf16 gradients",
        "--compression bf16",
        lambda c: c.compression == "bf16",
        refused={
            **ONE_PROCESS,
            **SENDS_ALL,
            "horovod": "Horovod 0.28.1 compresses to fp16 only; use --backend compat or ddp",
        },
        not_with=_are_sent_in("bf16"),
    ),
    Method(
        "PowerSGD",
        "--compression powersgd",
        lambda c: c.compression == "powersgd",
        refused={
            **ONE_PROCESS,
            **SENDS_ALL,
            "horovod": "PowerSGD is a communication hook of DDP; use --backend ddp",
            "compat": "PowerSGD is a communication hook of DDP; use --backend ddp",
        },
        not_with=dict.fromkeys(
            ("fp16 with a scaled loss", "O2: fp16 weights, fp32 masters"),
            NO_OVERFLOW,
        ),
    ),
    Method(
        "sharded optimizer",
        "--shard-optimizer",
        lambda c: c.shard_optimizer,
        refused={
            **ONE_PROCESS,
            "horovod": "Horovod's ranks share no memory; use --backend ddp or compat",
            "ps": "its servers step for all ranks, --ps-servers all in parts; use --backend ddp",
        },
        not_with={"local SGD": "each rank steps on its own"},
    ),
    Method(
        "local SGD",
        "--sync-every 8",
        lambda c: c.sync_every > 0,
        refused={**ONE_PROCESS, "ps": NO_RANKS_STEP},
        not_with={
            "gradient clipping": NO_MEAN,
            "fp16 with a scaled loss": NO_SCALE,
            "O2: fp16 weights, fp32 masters": NO_MASTERS,
            "O2: bf16 weights, fp32 masters": NO_MASTERS,
            "SyncBatchNorm": "its layers communicate in every step",
            **dict.fromkeys(
                ("fp16 gradients", "bf16 gradients", "PowerSGD"), "no gradients are sent"
            ),
        },
    ),
    Method(
        "DiLoCo",
        "--sync-every 8 --outer-optimizer nesterov",
        lambda c: c.outer_optimizer != "none",
        refused={**ONE_PROCESS, "ps": NO_RANKS_STEP},
    ),
    Method(
        "sharded parameter servers",
        "--ps-servers all",
        lambda c: c.ps_servers == "all",
        refused=NO_SERVER,
    ),
    Method(
        "asynchronous parameter server",
        "--ps-async",
        lambda c: c.ps_async,
        refused=NO_SERVER,
        not_with={
            "gradient clipping": NO_MEAN_AT_ONCE,
            "fp16 with a scaled loss": NO_SCALE,
            "O2: fp16 weights, fp32 masters": NO_SCALE,
            "O2: bf16 weights, fp32 masters": "the masters are not at the server",
            "short last batch, weighted": "there is no mean over the samples of all ranks",
            "SyncBatchNorm": "its layers wait for all ranks in every step",
            "average of weights": "the ranks have different weights between two evaluations",
        },
    ),
    Method(
        "elastic training",
        "--elastic",
        lambda c: c.elastic,
        refused={
            "horovod": "Horovod's engine is not opened again in one process; use --backend compat "
            "or ddp",
            "ps": "the parameters of a lost server are lost; use --backend compat or ddp",
        },
        not_with={
            "PowerSGD": KEPT_BY_RANK,
            "local SGD": KEPT_BY_RANK,
            "buffers of each rank": KEPT_BY_RANK,
            "sharded optimizer": KEPT_BY_RANK,
        },
    ),
)


NOT_WEIGHTED = {
    "local SGD": "a step of one rank has no mean over the weights of all",
    "asynchronous parameter server": "there is no mean over the weights of all ranks",
}
"""Why a method excludes a task whose `loss` returns `(loss, weight)`, by the method's name."""


def chosen(config: TrainConfig) -> list[Method]:
    """Return the methods that the options choose."""
    return [method for method in METHODS if method.is_chosen(config)]


def check(config: TrainConfig, backend: str) -> None:
    """Raise InputError if a method that the options choose is refused. Not collective.

    A backend that is not in the table (a user's own) is assumed to have every method.
    """
    methods = chosen(config)
    for method in reversed(methods):  # the more special ones are below
        if backend in method.refused:
            raise InputError(f"{as_given(method, config)}: {method.refused[backend]}")
        for other in methods:
            if why := method.not_with.get(other.name):
                given = f"{as_given(method, config)} with {as_given(other, config)}"
                raise InputError(f"{given}: {why}; leave one of them out")


def as_given(method: Method, config: TrainConfig) -> str:
    """Return the options of a method with the values of `config`, for messages."""
    words = method.option.split()
    for at, (flag, example) in enumerate(itertools.pairwise(words), start=1):
        value = getattr(config, flag.removeprefix("--").replace("-", "_"), None)
        if not example.startswith("--") and value is not None:
            words[at] = f"{value:g}" if isinstance(value, float) else str(value)
    return " ".join(words)


def check_weighted_loss(config: TrainConfig) -> None:
    """Raise InputError if a chosen method excludes losses with weights: on every rank, as all have
    weights or none (see `Stepper`), unless they step at different times.

    Not collective. No option says it: the first loss does.
    """
    for method in chosen(config):
        if why := NOT_WEIGHTED.get(method.name):
            raise InputError(
                f"{as_given(method, config)} with a loss that has a weight: {why}",
                on_all_ranks=not config.ps_async,
            )


def table() -> str:
    """Return the table of methods and backends, in Markdown, with the reasons below."""
    lines = [
        f"| method | options | {' | '.join(BACKENDS)} |",
        "|---|---|" + "---|" * len(BACKENDS),
    ]
    reasons: list[str] = []

    def cell(method: Method, backend: str) -> str:
        reason = method.refused.get(backend)
        if reason is None:
            return "yes"
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"

    for method in METHODS:
        cells = " | ".join(cell(method, backend) for backend in BACKENDS)
        lines.append(f"| {method.name} | `{method.option}` | {cells} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    apart = [
        f"- `{method.option}` is refused with {other}: {why}"
        for method in METHODS
        for other, why in method.not_with.items()
    ]
    apart += [
        f"- `{method.option}` is refused with a loss that has a weight: {NOT_WEIGHTED[method.name]}"
        for method in METHODS
        if method.name in NOT_WEIGHTED
    ]
    return "\n".join([*lines, "", *notes, "", *apart]).strip() + "\n"


if __name__ == "__main__":
    print(table(), end="")
