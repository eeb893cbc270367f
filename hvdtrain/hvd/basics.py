"""Start and stop this process's engine; answer rank, size and build queries.

The counterpart of `horovod.common.basics`. `basics`, at the end, is the one instance, and every
module of this package uses it.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain import transports
from hvdtrain.errors import LaunchError, PeerLost, WorldError, first_line
from hvdtrain.hvd import process_sets as sets
from hvdtrain.hvd.engine.engine import Engine
from hvdtrain.hvd.engine.operation import Operation
from hvdtrain.hvd.engine.settings import EXACT, Settings, announce, apply_log_level
from hvdtrain.hvd.engine.timeline import Timeline
from hvdtrain.hvd.exceptions import NOT_INITIALIZED, HorovodInternalError
from hvdtrain.hvd.gradients.channel import Channels
from hvdtrain.hvd.process_sets import ProcessSet
from hvdtrain.job import elastic_world
from hvdtrain.job.rendezvous import complete_world, open_store
from hvdtrain.job.world import World, detect, is_mpi, keep_launch_env, unused_allocation
from hvdtrain.liveness.failure import report_causes_first

_log = logging.getLogger("hvdtrain")
ProcessSets = Sequence[ProcessSet] | str | None
_NOT_ON_MPI = "Horovod MPI is not enabled; Please make sure it's installed and enabled."


class HorovodBasics:
    """Owner of the process-wide engine. `hvd.mpi_ops._basics` is the one instance."""

    Average, Sum, Adasum, Min, Max, Product = range(6)

    def __init__(self) -> None:
        self._engine: Engine | None = None
        # Kept until the process exits: rank 0 serves the store, and the next `init` reuses it.
        self._store: tuple[Any, Store] | None = None
        self.generation = 0  # number of engines started in this process
        self.process_sets: ProcessSets = None  # of the last `init`
        self._at_exit = False

    # Life cycle

    def init(self, comm: Any = None, process_sets: ProcessSets = None) -> None:
        """Connect to the other ranks and start the engine. Collective. A second call does nothing.

        `comm`: None, or all of the launcher's ranks, as a list or an mpi4py communicator.
        `process_sets`: sets to register, the same on all ranks, or "dynamic". Raises ValueError for
        other arguments, LaunchError and WorldError if the rendezvous fails.
        """
        if self._engine is None:
            self.process_sets = process_sets
            settings = Settings.from_env(os.environ)
            if settings.elastic and not elastic_world.is_elastic():
                raise LaunchError(
                    "HOROVOD_ELASTIC=1 is set, but this process was not started by hvdrun: start "
                    "elastic jobs with hvdrun, which takes the options of horovodrun"
                )
            if elastic_world.is_elastic() and comm in (None, []):
                self._start_elastic(settings, process_sets)
            else:
                self.start(settings, comm, process_sets)

    def _start_elastic(self, settings: Settings, process_sets: ProcessSets) -> None:
        """Start the engine in the next generation of the world, and in a later one if it loses a
        rank before all have met. Raises SystemExit(0) if this process has no rank in it any more.
        """
        keep_launch_env()
        # The first optimizer of a process imports for seconds, and the other ranks would wait.
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device="cpu"))], lr=0.1)
        deadline = time.monotonic() + settings.elastic_timeout_s
        while True:
            try:
                elastic_world.enter(settings.elastic_timeout_s)
            except elastic_world.RemovedFromJob as removed:
                _log.warning("elastic: %s; this process ends", removed)
                raise SystemExit(0) from None
            try:
                self.start(settings, None, process_sets)
                return
            except (WorldError, PeerLost, HorovodInternalError, dist.DistError) as error:
                self.shutdown()
                if time.monotonic() > deadline:
                    raise
                _log.warning("elastic: requesting the next world after: %s", first_line(error))

    def start(self, settings: Settings, comm: Any = None, process_sets: ProcessSets = None) -> None:
        """Do what `init` does, with the settings that the caller gives. Collective."""
        registered = sets.listed(process_sets)
        if process_sets == "dynamic":
            settings = replace(settings, dynamic_process_sets=True)
        if settings.gloo_iface:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", settings.gloo_iface)
        apply_log_level(settings)
        _check_comm(comm, detect())  # first: the ranks that are left out need not call `init`
        world = complete_world(detect(), settings.gloo_timeout_s)
        key = world, elastic_world.times_asked()  # rank 0 of another generation may have died
        if self._store is None or self._store[0] != key:
            self._store = key, open_store(world, settings.gloo_timeout_s, engine="compat")
        announce(settings, world.rank)
        if world.launcher == "none" and (unused := unused_allocation()):
            _log.warning(unused)
        self.generation += 1
        hello = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            # Containers may share a host name; MPI's launchers do not number the hosts.
            "host_id": socket.gethostname() + ("" if is_mpi(world) else f"#{world.cross_rank}"),
            "local_rank": world.local_rank,
            "local_size": world.local_size,
            "sets": [process_set.ranks for process_set in registered],
            "transport": settings.transport,
            "no_shm": transports.shm_unavailable(),
            "no_mpi": transports.mpi_unavailable(world),
            "exact": settings.exact_horovod,
            "is_new": self.generation == 1,
        }
        self._engine = Engine(world, PrefixStore("hvd", self._store[1]), settings, hello, Channels)
        if not self._at_exit:  # after the handlers of its transport, so that it runs before them
            self._at_exit = True
            report_causes_first()
            atexit.register(self.shutdown)
        try:
            if len({info["exact"] for info in self._engine.rank_infos}) > 1:
                raise ValueError(f"{EXACT} is set on some ranks only: set it on all or none")
            sets.begin(self._engine, registered)
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Stop the engine. Operations of other ranks that need this one raise HorovodInternalError.

        Safe to call twice, without `init`, and at the interpreter's exit.
        """
        engine, self._engine = self._engine, None
        sets.end()
        if engine is not None:
            engine.shutdown()

    def is_initialized(self) -> bool:
        """Return whether `init` has been called, and not `shutdown` since. Never raises."""
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        """The running engine. Raises HorovodInternalError before `init` and after `shutdown`."""
        if self._engine is None:
            raise HorovodInternalError(NOT_INITIALIZED)
        return self._engine

    @property
    def is_exact(self) -> bool:
        """Whether results must equal Horovod's in every bit. Raises ValueError before `init`."""
        return self._engine_or_raise().settings.exact_horovod

    @property
    def handles(self) -> dict[int, Operation]:
        """The operations that nobody has waited for yet, by handle."""
        return {} if self._engine is None else self._engine.handles

    # The world

    def rank(self) -> int:
        """Return this process's rank. Raises ValueError before `init`, as do the methods below."""
        return self._world.rank

    def size(self) -> int:
        """Return the number of processes."""
        return self._world.size

    def local_rank(self) -> int:
        """Return this process's rank on its host."""
        return self._world.local_rank

    def local_size(self) -> int:
        """Return the number of processes on this host."""
        return self._world.local_size

    def cross_rank(self) -> int:
        """Return this host's index among the hosts that have a process of this local rank."""
        hosts = self._peers_by_host()
        return hosts.index(self._engine_or_raise().rank_infos[self._world.rank]["host_id"])

    def cross_size(self) -> int:
        """Return the number of hosts that have a process of this local rank."""
        return len(self._peers_by_host())

    def is_homogeneous(self) -> bool:
        """Return whether every host has the same number of processes."""
        return len({info["local_size"] for info in self._engine_or_raise().rank_infos}) == 1

    def _peers_by_host(self) -> list[str]:
        """Return the hosts of the ranks with this local rank, in rank order."""
        infos, mine = self._engine_or_raise().rank_infos, self._world.local_rank
        return [info["host_id"] for info in infos if info["local_rank"] == mine]

    @property
    def _world(self) -> World:
        return self._engine_or_raise().world

    def _engine_or_raise(self) -> Engine:
        if self._engine is None:
            raise ValueError(NOT_INITIALIZED)
        return self._engine

    # Transports and build features

    def mpi_threads_supported(self) -> bool:
        """Raise ValueError: this engine has no MPI controller."""
        self._engine_or_raise()
        raise ValueError(_NOT_ON_MPI)

    def mpi_enabled(self) -> bool:
        """Return False: the engine has no MPI controller, even if mpirun started the processes, and
        uses neither IBM's DDL nor Intel's oneCCL.
        """
        return False

    mpi_built = ddl_built = ccl_built = mpi_enabled

    def gloo_enabled(self) -> bool:
        """Return True: Gloo, or a transport in its place, runs operations on CPU tensors."""
        return True

    def gloo_built(self) -> bool:
        """Return whether this torch has Gloo."""
        return dist.is_gloo_available()

    def nccl_built(self) -> int:
        """Return the version code of torch's NCCL, such as 22809; 0 if torch has none."""
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            return 0
        major, minor, patch = (*torch.cuda.nccl.version(), 0)[:3]  # type: ignore[no-untyped-call]
        return int(major) * 10000 + int(minor) * 100 + int(patch)

    def cuda_built(self) -> bool:
        """Return whether torch was built for CUDA."""
        return torch.version.cuda is not None

    def rocm_built(self) -> bool:
        """Return whether torch was built for ROCm."""
        return torch.version.hip is not None

    # The timeline

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Start to write a timeline in Chrome-trace JSON on rank 0.

        Raises ValueError before `init`, and if HOROVOD_TIMELINE was not set at `init`.
        """
        engine = self._engine_or_raise()
        if engine.settings.timeline is None:
            raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
        self.stop_timeline()
        if engine.world.rank == 0:
            engine.set_timeline(Timeline(file_path, mark_cycles))

    def stop_timeline(self) -> None:
        """Close the timeline, if one is open. Raises ValueError before `init`."""
        engine = self._engine_or_raise()
        engine.set_timeline(Timeline(None, False))


def _check_comm(comm: Any, world: World) -> None:
    """Raise ValueError unless `comm` stands for all ranks of the world, in their order."""
    if comm is None or comm == []:
        return
    if isinstance(comm, (list, tuple, range)) and all(isinstance(r, int) for r in comm):
        ranks = list(comm)
    elif hasattr(comm, "Get_rank") and hasattr(comm, "allgather"):
        ranks = comm.allgather(world.rank)
    else:
        raise ValueError(
            "Invalid type of argument comm. Expected list of rank integers or mpi4py.MPI.Comm "
            "object."
        )
    if ranks != list(range(world.size)):
        raise ValueError(
            f"hvd.init(comm={ranks}) does not list all {world.size} ranks in order; call "
            f"hvd.init(process_sets=[hvd.ProcessSet({ranks})]) on all ranks, and pass that "
            "process_set to the operations and to DistributedOptimizer"
        )


basics = HorovodBasics()
sets.set_up(basics)
