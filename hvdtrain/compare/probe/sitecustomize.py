"""Loads the probe in a process that imports torch.optim: see the package.

It is found through PYTHONPATH, runs the `sitecustomize` that it hides, gives a rank its share of
the cores before any library starts threads, and a script's fixed port way to the command's own.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
# Rank and number of ranks on this host, as launchers tell them.
_LOCAL = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),  # of srun's ranks; a job has others, too
)


def run_hidden() -> None:
    """Run the next `sitecustomize` of the path, if there is one, as Python would have."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _FOLDER]
    this = sys.modules.pop("sitecustomize", None)
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if this is not None:
            sys.modules["sitecustomize"] = this


def take_share(what: str) -> None:
    """Give a rank its share of the host's cores, whatever its launcher has set: bind it to them
    ("b" in `what`), and let it have as many threads ("t").
    """
    for rank, size in _LOCAL:
        given = os.environ.get(size, "").partition("(")[0]  # Slurm's 4(x2): two hosts with 4
        if rank in os.environ and given.isdigit():
            at, ranks = int(os.environ[rank]), int(given)
            cores = load("../../system/cores")
            of_host = cores.of_host()
            if "t" in what:
                os.environ["OMP_NUM_THREADS"] = str(max(1, len(of_host) // ranks))
            if "b" in what:
                os.sched_setaffinity(0, cores.share_of_cores(at, ranks, of_host))
            return


def start_probe(_: ModuleType) -> None:
    """Load the probe, which takes the steps of the optimizers."""
    load("hvdtrain_probe").start()


def use_own_port(rendezvous: Any) -> None:
    """Make ranks meet at ports of the command's own, whatever their script says (MASTER_PORT =
    '12355', tcp://127.0.0.1:23456): a comparison starts a script several times at once. Each port
    of a script becomes another one, for some scripts have several. Not the ranks of torchrun, whose
    agent listens already.
    """
    create, shift = rendezvous._create_c10d_store, int(_GIVEN[2])

    def at_own_port(host: str, port: int, *others: Any) -> Any:
        return create(host, 1024 + (port + shift) % 64_512, *others)  # no privileged port

    if "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:
        rendezvous._create_c10d_store = at_own_port


HOOKS = {"torch.optim.optimizer": start_probe, "torch.distributed.rendezvous": use_own_port}


class Finder:
    """Runs a function of `HOOKS` right after its module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the module's own spec, with a loader that calls the function afterwards."""
        if name not in HOOKS:
            return None
        hook = HOOKS.pop(name)
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_hook(module: ModuleType) -> None:
            run(module)
            hook(module)

        vars(spec.loader)["exec_module"] = run_and_hook
        return spec


def load(name: str) -> Any:
    """Import a module by its path from this folder, without the package that it is in."""
    where = os.path.join(_FOLDER, f"{name}.py")
    name = f"hvdtrain_probe.{os.path.basename(name)}"
    spec = importlib.util.spec_from_file_location(name, where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


run_hidden()
_GIVEN = os.environ.get("HVDTRAIN_PROBE", "").split(" ", 3)
if len(_GIVEN) > 1:
    take_share(_GIVEN[1])
    sys.meta_path.insert(0, Finder())
