"""The options of every backend. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from hvdtrain.errors import InputError
from hvdtrain.system.variables import flag, one_of, positive, read_variable

Buffers = Literal["broadcast", "average", "local"]
Unused = Literal["error", "zero"]
Compression = Literal["none", "fp16", "bf16", "powersgd"]


def _option(name: str, default: Any, parse: Callable[[str], Any] = str) -> Any:
    """Return a field whose default is HVDTRAIN_<name>; `default` if that is unset or empty."""

    def read() -> Any:
        try:
            return read_variable(os.environ, f"HVDTRAIN_{name}", parse, default)
        except ValueError as error:
            raise InputError(str(error)) from None

    return field(default_factory=read)


@dataclass(frozen=True)
class BackendOptions:
    """Options of every backend. They must be equal on all ranks.

    What is left out has the value of its variable, HVDTRAIN_TRANSPORT and so on, if that is set, as
    for the options of `hvdtrain train`. Raises InputError for a variable that cannot be read.
    """

    device: str = _option("DEVICE", "auto", one_of("auto", "cpu", "cuda"))
    """`auto`, `cpu` or `cuda`; auto is CUDA if this host has a GPU for each of its ranks."""
    transport: str = _option("TRANSPORT", "auto")
    timeout_s: float = _option("TIMEOUT", 300.0, positive)
    """Seconds that a rank waits for its peers, in a rendezvous or in a collective."""
    bucket_mib: float = _option("BUCKET_MIB", 25.0, positive)
    buffers: Buffers = _option("BUFFERS", "broadcast", one_of(*get_args(Buffers)))
    """How BatchNorm statistics and other buffers are synchronised after every step: broadcast from
    rank 0, averaged (floating-point buffers; the others are broadcast), or left local.
    """
    unused_parameters: Unused = _option("UNUSED_PARAMETERS", "error", one_of(*get_args(Unused)))
    """How a parameter without a gradient is treated: an error that names it, or a gradient of zeros
    (so that weight decay and momentum apply).
    """
    compression: Compression = _option("COMPRESSION", "none", one_of(*get_args(Compression)))
    """How gradients are sent: as they are, in half precision, or as PowerSGD's low-rank factors.
    `hvdtrain.training.methods` has the table of the backends that can.
    """
    shard_optimizer: bool = _option("SHARD_OPTIMIZER", False, flag)
    """Whether the ranks of a host share one copy of the parameters, and each steps a part of them:
    see `hvdtrain.optim.sharded_optimizer`.
    """
