"""The options of a comparison, resolved and validated.

The command line makes them; `comparison` and `arm_pool` read them. Imports no torch.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.errors import InputError
from hvdtrain.training.config import TrainConfig

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
# With 5 blocks even their whole range contains the median with a probability of only 1 - 2/2**5 =
# 93.75 %, less than the 95 % that an interval needs.
MIN_BLOCKS = 6
# Options that mean the same to `hvdtrain train`.
_SHARED_WITH_TRAIN = (
    "task set accumulate precision device lr clip_norm buffers unused_parameters uneven workers "
    "seed".split()
)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """The resolved options; `check` validates them."""

    task: str = "digits"
    set: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (2,)
    scaling: Literal["weak", "strong"] = "weak"
    arms: tuple[str, ...] = ()
    """Empty: the usual arms that this machine can run."""
    baseline: str | None = None
    budget_s: float = 180.0
    target_ci: float = 0.02
    """Stop when the interval of every arm's ratio extends at most this far to either side."""
    blocks: int | None = None
    """Exactly this many blocks, in place of `budget_s` and `target_ci`."""
    steps: int | None = None
    """Steps per arm and block; by default those that take the slowest arm a quarter of a second."""
    proof_steps: int = 10
    max_foreign: float = 0.5
    """Drop blocks in which other processes took more than this share of all cores."""
    batch_size: int = 32
    accumulate: int = 1
    precision: str = "fp32"
    device: str = "auto"
    lr: float | None = None
    clip_norm: float = math.inf
    buffers: str = "broadcast"
    unused_parameters: str = "error"
    uneven: str = "drop"
    workers: int = 0
    threads: int | None = None
    pin: bool = True
    """Bind each rank to its own share of the cores. Unbound, a rank that wakes up may share a core
    with another for a while, which tripled the noise of a block on two cores.
    """
    seed: int = 0
    timeout_s: float = 300.0
    output: str | None = None

    def check(self) -> None:
        """Raise InputError for invalid values."""
        positive = "budget_s target_ci steps blocks proof_steps batch_size accumulate threads"
        for name in (*positive.split(), "max_foreign", "timeout_s"):
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
        for size in self.ranks:
            TrainConfig(**self.training(size)).check()

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

    def threads_of(self, ranks: int) -> int:
        """Return the CPU threads per rank: as requested, or cores divided by the largest world."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // max(self.ranks + (ranks,)))

    def training(self, ranks: int) -> dict[str, Any]:
        """Return the options of `hvdtrain train` that all arms of a world size share."""
        return {
            **{name: getattr(self, name) for name in _SHARED_WITH_TRAIN},
            "batch_size": self.batch_of(ranks),
            "threads": self.threads_of(ranks),
            "timeout": self.timeout_s,
            "epochs": 1_000_000_000,  # the comparison ends the training
        }


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


_FLAGS = {"ranks": "np", "budget_s": "budget", "timeout_s": "timeout"}


def flag(name: str) -> str:
    """Return the command-line option of a field."""
    return "--" + _FLAGS.get(name, name).replace("_", "-")
