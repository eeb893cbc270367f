"""Helpers that scripts import from `horovod.common.util`."""

from __future__ import annotations

import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.torch_version import TorchVersion

from hvdtrain.hvd.basics import basics

T = TypeVar("T")

EXTENSIONS = ["tensorflow", "torch", "mxnet"]
_HERE = "torch"  # the only framework that is supported


def get_ext_suffix() -> str:
    """Return the file name suffix of compiled modules, such as ".cpython-311-x.so"."""
    return sysconfig.get_config_var("EXT_SUFFIX") or ".so"


def get_extension_full_path(pkg_path: str, *args: str) -> str:
    """Return a compiled module's path: `args`, folders and a name, beside the file `pkg_path`."""
    *folders, name = args
    return os.path.join(os.path.dirname(pkg_path), *folders, name + get_ext_suffix())


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


def _query(query: Callable[[], T]) -> Callable[..., T]:
    """Return a query of `basics` in the form that it has in this module, with `verbose` unused."""

    def built(verbose: bool = False) -> T:
        return query()

    built.__doc__ = query.__doc__
    return built


mpi_built = _query(basics.mpi_built)
gloo_built = _query(basics.gloo_built)
nccl_built = _query(basics.nccl_built)
ddl_built = _query(basics.ddl_built)
ccl_built = _query(basics.ccl_built)


@contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Set environment variables inside a block, then restore them; None leaves one unchanged."""
    new = {name: value for name, value in kwargs.items() if value is not None}
    before = {name: os.environ.get(name) for name in new}
    os.environ.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741
    """Cut a sequence into `n` pieces whose lengths differ by one at most, longer ones first."""
    length, longer = divmod(len(l), n)
    ends = [(i + 1) * length + min(i + 1, longer) for i in range(n)]
    return [l[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def check_installed_version(
    name: str, version: str, exception: BaseException | None = None
) -> None:
    """Do nothing: without compiled code, any version of a framework fits."""


def is_iterable(x: object) -> bool:
    """Return whether `iter` accepts the object."""
    try:
        iter(x)  # type: ignore[call-overload]
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return whether `ver` >= `target`. Raises ValueError unless `target` is major.minor.patch."""
    if not (isinstance(ver, str) and isinstance(target, str)):
        raise ValueError(f"This function only accepts string arguments: {ver!r}, {target!r}")
    if target.count(".") != 2:
        raise ValueError(f"the target version must be major.minor.patch: {target}")
    return bool(TorchVersion(ver) >= target)
