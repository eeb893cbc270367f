"""The options of a comparison, resolved and validated.

The command line makes them; `comparison` and `arm_pool` read them. Imports no torch.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hvdtrain.errors import InputError
from hvdtrain.launch.host_list import Host, choose_slots, parse_host_list
from hvdtrain.system.commands import own_environment
from hvdtrain.training.config import TrainConfig

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
# With 5 blocks even their whole range contains the median with a probability of only 1 - 2/2**5 =
# 93.75 %, less than the 95 % that an interval needs.
MIN_BLOCKS = 6
METHOD_OPTIONS = (
    "precision opt_level sync_bn compression shard_optimizer sync_every local_warmup local_state "
    "outer_optimizer".split()
)
"""Options of `hvdtrain train` that all arms share unless an arm has its own: `ddp/shm+sync-bn`."""
EXACT_METHODS = ("shard_optimizer",)
"""Those that change no bits: an arm with one must compute what the others do."""
# Options that mean the same to `hvdtrain train`.
_SHARED_WITH_TRAIN = (
    "task set accumulate device lr clip_norm buffers unused_parameters uneven workers seed".split()
    + METHOD_OPTIONS
)


def seconds(text: str) -> float:
    """Return the seconds in "90s", "10m", "1.5h" or a plain number. Raise InputError."""
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        raise InputError(f"{text!r} is not a time; such as 90s, 10m or 1.5h")
    return float(found[1]) * _SECONDS[found[2]]


def share(text: str) -> float:
    """Return the share in "2%" or "0.02". Raise InputError."""
    try:
        value = float(text.rstrip("% ")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise InputError(f"{text!r} is not a share; such as 2% or 0.02") from None
    if not (0 < value < 1 or (value == 1 and "%" in text)):  # a bare 1 may mean 1 %
        raise InputError(f"{text!r} is not a share between 0 and 1; such as 2% or 0.02")
    return value


def _arm_names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if text and not names:
        raise InputError(f"{text!r} names no arm; give for example ddp/gloo,compat/shm")
    return names


def _world_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{text!r} is not a world size, nor a list such as 1,2,4") from None


def _option(default: Any, text: str, read: Callable[[str], Any] | None = None, **more: Any) -> Any:
    """Return a field, with the arguments of its click option. `read` parses its text, and that of
    the default.
    """
    about = {"default": default, "help": text, "read": read, **more}
    value = read(default) if read is not None and default is not None else default
    return field(default=value, metadata=about)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The resolved options; `check` validates them. Those without a text are TrainConfig's."""

    commands: tuple[str, ...] = ()
    """Command lines to compare, in place of `arms`: whatever they run, it takes optimizer steps."""
    names: tuple[str, ...] = _option(
        (), "Names of the commands, in their order.", flags="-n --name", multiple=True
    )
    optimizer: int = _option(
        1, "Of commands with several: which one's steps count, by the order of their first steps."
    )
    allow_different: bool = _option(
        False, "Time arms that do other work, too; every table says so.", is_flag=True
    )
    task: str = "digits"
    set: tuple[str, ...] = ()
    ranks: tuple[int, ...] = _option(
        "2",
        "Ranks of every arm; several to compare world sizes. [with -H: all slots]",
        _world_sizes,
        flags="-np --np",
        metavar="N[,N...]",
    )
    hosts: str = _option(
        "",
        "Start the ranks on these hosts, over ssh, in place of this one.",
        flags="-H --hosts",
        metavar="HOST:SLOTS,...",
    )
    scaling: Literal["weak", "strong"] = _option(
        "weak",
        "With several sizes: keep the batch of a rank, or that of all ranks of the smallest.",
        choices=("weak", "strong"),
    )
    arms: tuple[str, ...] = _option(
        "",
        "backend/transport or horovod/controller, such as ddp/gloo,compat/shm,horovod/mpi; "
        "or module:Class/transport; +option=value adds a method, such as "
        "ddp/gloo+compression=fp16. [default: the usual ones that can be had here]",
        _arm_names,
        metavar="A,B,...",
    )
    baseline: str | None = _option(
        None, "What the others are compared with. [default: the first arm]", metavar="ARM"
    )
    budget_s: float = _option(
        "3m",
        "Stop after this time, such as 90s or 10m; after twice that if fewer than 6 blocks count.",
        seconds,
        metavar="TIME",
    )
    target_ci: float = _option(
        "2%",
        "Stop once no interval extends further than this to either side.",
        share,
        metavar="SHARE",
    )
    blocks: int | None = _option(
        None, "Run exactly so many blocks, whatever --budget and --target-ci are.", type=int
    )
    steps: int | None = _option(
        None, "Steps of each arm in a block. [default: about 0.25 s]", type=int
    )
    proof_steps: int = _option(10, "Steps that must be equal.")
    batch_size: int = _option(32, "Samples of one rank's micro-batch.")
    accumulate: int = 1
    precision: str = "fp32"
    opt_level: str = "none"
    sync_bn: bool = False
    compression: str = "none"
    shard_optimizer: bool = False
    sync_every: int = 0
    local_warmup: int = 0
    local_state: str = "local"
    outer_optimizer: str = "none"
    device: str = "auto"
    lr: float | None = None
    clip_norm: float = math.inf
    buffers: str = "broadcast"
    unused_parameters: str = "error"
    uneven: str = "drop"
    workers: int = 0
    threads: int | None = _option(
        None, "CPU threads of each rank. [default: cores / ranks of its host]", type=int
    )
    pin: bool = _option(True, "Bind each rank to its share of the cores.", flags="--pin/--no-pin")
    """Unbound, a rank that wakes up may share a core with another for a while, which tripled the
    noise of a block on two cores.
    """
    seed: int = _option(0, "Of the weights, the data, and the order of the arms.")
    max_foreign: float = _option(
        "50%",
        "Drop blocks in which others, the host included, took more of the cores; 100%: none.",
        share,
        metavar="SHARE",
    )
    fail_slower: float | None = _option(
        None,
        "Exit with 6 if an arm is slower than the baseline by more than this, beyond noise.",
        share,
        metavar="SHARE",
    )
    against: str | None = _option(
        None,
        "With --fail-slower: not than the baseline, but than in this compare.json, relative to it.",
        metavar="FILE",
    )
    timeout_s: float = _option(300.0, "Seconds that a rank waits for the others.")
    output: str | None = _option(None, "[default: runs/compare-<time>-<task>]", metavar="DIR")

    def check(self) -> None:
        """Raise InputError for invalid values."""
        self._check_commands()
        if self.against is not None and self.fail_slower is None:
            raise InputError("--against is the other side of --fail-slower; give both")
        positive = "budget_s target_ci steps blocks proof_steps batch_size accumulate threads"
        for name in (*positive.split(), "optimizer", "max_foreign", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{flag(name)} {value} must be greater than zero, and finite")
        if self.blocks is not None and self.blocks < MIN_BLOCKS:
            raise InputError(
                f"--blocks {self.blocks}: from fewer than {MIN_BLOCKS} no interval can be had"
            )
        if not self.ranks or min(self.ranks) < 1 or len(set(self.ranks)) < len(self.ranks):
            sizes = ",".join(map(str, self.ranks))
            raise InputError(f"--np {sizes} must be numbers of ranks, 1 or more, each once")
        if self.uneven == "join":
            raise InputError(
                "--uneven join: a comparison needs steps of equal size; give drop or pad"
            )
        for size in self.ranks:
            TrainConfig(**self.training(size)).check()
            self.hosts_of(size)

    def _check_commands(self) -> None:
        if self.names and len(self.names) != len(self.commands):
            raise InputError(
                f"{len(self.names)} --name for {len(self.commands)} commands; give each one"
            )
        if len(set(self.names)) < len(self.names):
            raise InputError(f"--name {', '.join(self.names)}: give each command another name")
        for text in self.commands:
            try:
                program = [*shlex.split(text), ""][0]
            except ValueError as error:
                raise InputError(f"the command {text!r} cannot be read: {error}") from None
            if shutil.which(program, path=own_environment()["PATH"]) is None:
                raise InputError(
                    f"the command {text!r} cannot be started: there is no program {program!r}; "
                    "write each command in quotes: hvdtrain compare 'python a.py' 'python b.py'"
                )

    def hosts_of(self, ranks: int) -> tuple[Host, ...]:
        """Return the hosts of a world size, with as many slots as ranks; none without --hosts.

        Raise InputError if they are too few.
        """
        return tuple(
            choose_slots(parse_host_list(self.hosts), ranks, None, None) if self.hosts else ()
        )

    def batch_of(self, ranks: int) -> int:
        """Return the micro-batch size of one rank at a world size.

        Weak scaling keeps it constant; strong scaling keeps the global batch of the smallest world
        size constant. Raise InputError if that does not divide by `ranks`.
        """
        if self.scaling == "weak" or len(self.ranks) == 1:
            return self.batch_size
        whole = self.batch_size * min(self.ranks)
        if whole % ranks:
            raise InputError(
                f"--scaling strong: a global batch of {self.batch_size} x {min(self.ranks)} ranks "
                f"= {whole} samples does not divide by {ranks} ranks"
            )
        return whole // ranks

    def threads_of(self, ranks: int) -> int | None:
        """Return the CPU threads per rank: as requested, or this host's cores divided by the most
        ranks of a host. None with --hosts alone: each rank divides the cores of its own host.
        """
        if self.threads or self.hosts:
            return self.threads
        return max(1, len(os.sched_getaffinity(0)) // self.ranks_of_a_host(ranks))

    def ranks_of_a_host(self, ranks: int) -> int:
        """Return the most ranks of a host, whatever the world size: threads depend on it, and are
        the same at all sizes.
        """
        sizes = (*self.ranks, ranks)
        slots = [host.slots for size in sizes for host in self.hosts_of(size)]
        return max(slots or sizes)

    def training(self, ranks: int, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the options of `hvdtrain train` that all arms of a world size share. `own`: those
        of METHOD_OPTIONS that one arm has for itself.
        """
        return {
            **{name: getattr(self, name) for name in _SHARED_WITH_TRAIN},
            "batch_size": self.batch_of(ranks),
            "threads": self.threads_of(ranks),
            "timeout": self.timeout_s,
            "epochs": 1_000_000_000,  # the comparison ends the training
            **(own or {}),
        }


def steps_in_sync(steps: int, config: TrainConfig) -> int:
    """Return the least number of steps, `steps` or more, after which all ranks have the same
    parameters: with local SGD, those up to an average.
    """
    alone = steps - config.local_warmup
    return steps + -alone % config.sync_every if config.sync_every and alone > 0 else steps


_FLAGS = {"ranks": "np", "budget_s": "budget", "timeout_s": "timeout"}


def flag(name: str) -> str:
    """Return the command-line option of a field."""
    return "--" + _FLAGS.get(name, name).replace("_", "-")
