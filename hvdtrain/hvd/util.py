"""Helpers that scripts import from `horovod.common.util`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_HERE = "torch"  # the only framework that is supported


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless the extension is PyTorch's, such as "horovod.torch".

    Nothing is compiled, so no file is searched for.
    """
    if ext_name.rpartition(".")[2] != _HERE:
        raise ImportError(f"Extension {ext_name} has not been built: hvdtrain is for PyTorch only")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether "tensorflow", "torch" or "mxnet" is supported: only "torch" is."""
    available = ext_base_name == _HERE
    if verbose:
        print(f"Extension {ext_base_name} {'was' if available else 'was NOT'} built.")
    return available


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether the framework is torch and finds a GPU, without initialising CUDA."""
    return extension_available(ext_base_name, verbose) and torch.cuda.device_count() > 0


def get_average_backwards_compatibility_fun(
    reduce_ops: Any,
) -> Callable[[Any, bool | None], Any]:
    """Return a function of `op` and the deprecated `average` that returns the reduction.

    It raises ValueError if both are given, and warns if `average` is.
    """

    def choose(op: Any, average: bool | None) -> Any:
        if op is not None and average is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
        if average is not None:
            warnings.warn(
                "Parameter `average` has been replaced with `op` and will be removed in v1.0",
                DeprecationWarning,
                stacklevel=3,  # the caller of the operation that has these parameters
            )
            return reduce_ops.Average if average else reduce_ops.Sum
        return reduce_ops.Average if op is None else op

    return choose


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two, as Adasum requires."""
    return num_rank > 0 and num_rank.bit_count() == 1
