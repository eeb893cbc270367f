"""Every public name of the installed Horovod is here, with the same signature; and in the manual.

What differs is listed at the top, with the reason. Horovod is not optional: without it these fail.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hvdtrain
import hvdtrain.hvd
from hvdtrain.hvd.alias import MODULES, VERSION
from hvdtrain.hvd.basics import basics

MANUAL = Path(hvdtrain.__file__).parents[1] / "docs" / "horovod-api.md"

# Not here. Names of Horovod's machinery, which nothing outside it can use.
LEFT_OUT = {
    "horovod.common.exceptions": {"get_version_mismatch_message"},  # there is no build to mismatch
    "horovod.common.process_sets": {"HorovodBasics"},  # imported there, and defined elsewhere
    "horovod.common.util": {  # for modules that are compiled, and queries, which `hvd` has
        "ccl_built",
        "check_installed_version",
        "ddl_built",
        "env",
        "get_ext_suffix",
        "get_extension_full_path",
        "gloo_built",
        "is_iterable",
        "is_version_greater_equal_than",
        "mpi_built",
        "nccl_built",
        "split_list",
    },
    "horovod.torch.mpi_ops": {
        "check_installed_version",
        # autograd functions of the operations, which have no state
        "HorovodAllgather",
        "HorovodAllreduce",
        "HorovodAlltoall",
        "HorovodBroadcast",
        "HorovodGroupedAllgather",
        "HorovodGroupedAllreduce",
        "HorovodGroupedReducescatter",
        "HorovodReducescatter",
        "handle_average_backwards_compatibility",
    },
}
# Parameters at the end, with defaults, that Horovod does not have.
MORE = {
    "DistributedOptimizer": ["shard"],
    "allgather_object": ["process_set"],
    "broadcast_parameters": ["process_set"],
    "broadcast_optimizer_state": ["process_set"],
}
# Where Horovod's own signature says nothing, or ours takes more than it.
OTHERWISE = {
    "horovod.common.basics.HorovodBasics": "()",  # there is no library to load
    "horovod.common.exceptions.HostsUpdatedInterrupt": "(skip_sync=False)",
    "horovod.common.util.gpu_available": "(ext_base_name, verbose=False)",
    "horovod.torch.mpi_ops.gpu_available": "(ext_base_name, verbose=False)",
    "horovod.common.elastic.WorkerNotificationManager.init": "(self)",  # reads the environment
    "horovod.torch.elastic.state.ModelStateHandler": "(value)",  # as of any handler
    "horovod.torch.elastic.state.OptimizerStateHandler": "(value)",
    "horovod.torch.elastic.state.SamplerStateHandler": "(value)",
    "optimizer.load_state_dict": "(self, state_dict)",  # (*args, **kwargs)
    "optimizer.zero_grad": "(self, set_to_none=True)",  # as torch has it
}
# Other defaults than Horovod's.
DEFAULTS = {("run", "num_proc"): None}  # all slots of `hosts`; 1, as in Horovod, without them
WORDS = {"identical", "stronger", "different", "refused"}


def defined(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public names that a module of Horovod's defines; in the two that scripts import from also
    those that it passes on.
    """
    passes_on = module.__name__ in ("horovod.torch", "horovod.torch.mpi_ops")
    for name, value in vars(module).items():
        home = getattr(value, "__module__", None) or (passes_on and module.__name__)
        if name.startswith("_") or isinstance(value, ModuleType) or name == "MPI":
            continue
        if home == module.__name__ or (passes_on and str(home).startswith("horovod.")):
            yield name, value


def bare(function: Any, name: str = "", without: Sequence[str] = ()) -> str:
    """A signature without annotations, and without these parameters. Defaults are compared as text:
    ours are other objects than Horovod's own.
    """
    parameters = []
    for p in inspect.signature(function).parameters.values():
        default = DEFAULTS.get((name, p.name), p.default)
        if isinstance(default, type) and default is not p.empty:
            default = default.__name__
        elif type(default).__name__ == "ProcessSet":
            default = default.process_set_id
        if p.name not in without:
            parameters.append(p.replace(annotation=p.empty, default=default))
    return str(inspect.Signature(parameters))


def differs(name: str, real: Any, ours: Any) -> list[str]:
    """What is wrong with the signature of ours."""
    last = name.rpartition(".")[2]
    more = MORE.get(last, [])
    expected = OTHERWISE.get(name) or bare(real, last)
    own = [*inspect.signature(ours).parameters.values()]
    at_the_end = [p.name for p in own[len(own) - len(more) :] if p.default is not p.empty]
    is_wrong = bare(ours, without=more) != expected or at_the_end != more
    return [f"{name}: {bare(ours)} instead of {expected}"] * is_wrong


def differences(name: str, real: Any, ours: Any) -> Iterator[str]:
    """What is wrong with ours, be it a function, a class with its methods, or a constant."""
    if not callable(real):
        if isinstance(real, (int, str, list)) and ours != real:
            yield f"{name} is {ours!r} instead of {real!r}"
        return
    with contextlib.suppress(ValueError):  # a builtin without a signature
        yield from differs(name, real, ours)
    if not isinstance(real, type):
        return
    for base in reversed([c for c in real.__mro__ if c.__module__.startswith("horovod.")]):
        for method, value in vars(base).items():
            if method.startswith("_") or not callable(getattr(real, method)):
                continue
            if not hasattr(ours, method):
                yield f"{name}.{method} is missing"
            elif isinstance(value, (staticmethod, classmethod)) or inspect.isfunction(value):
                yield from differs(f"{name}.{method}", getattr(real, method), getattr(ours, method))


@pytest.mark.parametrize("name", MODULES)
def test_every_name_with_its_signature(name: str) -> None:
    real, ours = importlib.import_module(name), importlib.import_module(MODULES[name])
    left_out = LEFT_OUT.get(name, set())
    names = dict(defined(real))
    missing = {n for n in names if not hasattr(ours, n)}
    assert missing - left_out == set()
    assert left_out - missing == set(), "these are here, or are not Horovod's"
    wrong: list[str] = []
    for n, value in names.items():
        if n in missing:
            continue
        if n in ("init", "shutdown"):  # wrappers that take anything
            value = getattr(importlib.import_module("horovod.torch.mpi_ops")._basics, n)
        wrong += differences(f"{name}.{n}", value, getattr(ours, n))
    assert wrong == []


@pytest.mark.parametrize("kind", ["_DistributedOptimizer", "_DistributedAdasumOptimizer"])
def test_the_wrapped_optimizers_methods(kind: str) -> None:
    real = getattr(importlib.import_module("horovod.torch.optimizer"), kind)
    ours = getattr(hvdtrain.hvd.optimizer, kind)
    for name, value in vars(real).items():
        if not name.startswith("_") and inspect.isfunction(value):
            assert differs(f"optimizer.{name}", value, getattr(ours, name)) == []


def test_what_is_no_function_of_a_module() -> None:
    real = importlib.import_module("horovod.common.elastic").notification_manager
    ours = importlib.import_module("hvdtrain.hvd.elastic.common").notification_manager
    names = {name for name in dir(real) if not name.startswith("_")}
    assert names - set(dir(ours)) == set()
    for name in ("register_listener", "remove_listener", "handle_hosts_updated"):
        assert differs(name, getattr(real, name), getattr(ours, name)) == []
    horovod = importlib.import_module("horovod")
    assert horovod.__version__ == VERSION
    assert differs("run", horovod.run, hvdtrain.run) == []
    assert hvdtrain.hvd.mpi_ops._basics is basics
    assert hvdtrain.hvd._MPI_LIB_AVAILABLE is True
    assert issubclass(hvdtrain.hvd.HorovodInternalError, RuntimeError)


def manual_rows() -> list[tuple[list[str], str, str]]:
    """The names, the word and the reason of every row of the manual's table of calls."""
    text = MANUAL.read_text().partition("## Every call")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (\w+) \|\s*(.*?)\s*\|$", text, re.MULTILINE)
    return [(re.findall(r"`([\w.]+)`", names), word, reason) for names, word, reason in rows]


def test_every_call_is_in_the_manual() -> None:
    rows = manual_rows()
    named = [name for names, _, _ in rows for name in names]
    assert {name for name in named if named.count(name) > 1} == set()
    assert {word for _, word, _ in rows} == WORDS
    assert [names for names, word, reason in rows if word != "identical" and not reason] == []
    torch_modules = ("", ".optimizer", ".elastic", ".elastic.state", ".elastic.sampler")
    expected: set[str] = set()
    for module in (
        *(f"horovod.torch{name}" for name in torch_modules),
        *("horovod.common.elastic", "horovod.common.exceptions"),
    ):
        expected |= {name for name, _ in defined(importlib.import_module(module))}
    expected -= LEFT_OUT["horovod.common.exceptions"]
    expected |= {f"Compression.{n}" for n in ("none", "fp16", "bf16")} | {"is_homogeneous"}
    expected = (expected - {"run", "Compression"}) | {"elastic.run", "horovod.run"}
    assert expected - set(named) == set()
    for name in named:  # and every name in the manual is there
        where = {"horovod": hvdtrain}.get(name.partition(".")[0], hvdtrain.hvd)
        if not found(where, name.removeprefix("horovod.")):
            pytest.fail(f"the manual has {name}, which is not here")


def found(where: Any, name: str) -> bool:
    homes = (where, *(importlib.import_module(m) for m in MODULES.values()))
    first, _, rest = name.partition(".")
    for home in homes:
        value = getattr(home, first, None)
        if value is not None and (not rest or hasattr(value, rest)):
            return True
    return first == "optimizer" and hasattr(hvdtrain.hvd.optimizer._DistributedOptimizer, rest)


def test_importing_starts_nothing() -> None:
    code = (
        "import sys, threading, hvdtrain.hvd as hvd\n"
        "assert threading.active_count() == 1\n"
        "assert not hvd.is_initialized()\n"
        "assert 'horovod' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_util() -> None:
    from hvdtrain.hvd import util

    real = importlib.import_module("horovod.common.util")
    for length in range(8):
        assert util.num_rank_is_power_2(length) == real.num_rank_is_power_2(length)
    util.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    with pytest.raises(ImportError):
        util.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", __file__, "mpi_lib")
    assert [util.extension_available(name) for name in ("mxnet", "torch")] == [False, True]


def test_a_loader_that_reads_ahead() -> None:
    from hvdtrain.hvd.data import AsyncDataLoaderMixin, BaseDataLoader

    class Counting(BaseDataLoader):
        def __init__(self, fails_at: int) -> None:
            self.fails_at = fails_at

        def __len__(self) -> int:
            return 5

        def _iterate(self) -> Iterator[int]:
            for i in range(5):
                if i == self.fails_at:
                    raise KeyError(i)
                yield i

        def _process_batch(self, batch: int) -> int:
            return batch * 10

    class Async(AsyncDataLoaderMixin, Counting):
        pass

    for size in (0, 1, 64):
        loader = Async(size, False, -1)
        assert [list(loader) for _ in range(3)] == [[0, 10, 20, 30, 40]] * 3
        loader.close_async_loader()
        loader.close_async_loader()
        assert size == 0 or not loader.thread.is_alive()
        failing = Async(size, False, 2)
        got = iter(failing)
        assert [next(got), next(got)] == [0, 10]
        with pytest.raises(KeyError):
            next(got)
        if size:
            with pytest.raises(RuntimeError, match="is closed or has failed"):
                list(failing)
