"""Which launcher starts each backend over each transport.

`hvdtrain compare` and `hvdtrain doctor` start them by these names. Imports no torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

from hvdtrain.errors import InputError
from hvdtrain.horovod_build import horovod_problem
from hvdtrain.launch.host_list import Host
from hvdtrain.launch.real_launchers import INSTALL_COMMANDS, LAUNCHERS, command_line
from hvdtrain.system.commands import own_environment

_C10D = {"gloo": "torchrun", "shm": "torchrun", "mpi": "mpirun", "nccl": "torchrun"}
# Backend: {transport, or Horovod's controller: its launcher}.
LAUNCHER_OF: dict[str, dict[str, str]] = {
    "ddp": _C10D,
    "compat": _C10D,
    "horovod": {"mpi": "mpirun", "gloo": "horovodrun"},
}
NCCL = "nccl"


@dataclass(frozen=True)
class NamedEngine:
    """A backend over a transport, or under a Horovod controller, with its launcher."""

    backend: str
    transport: str
    launcher: str
    ranks: int
    hosts: tuple[Host, ...] = ()
    """The hosts of the ranks, which are then started over ssh; none for this host."""

    @property
    def name(self) -> str:
        """Return "backend/transport"."""
        return f"{self.backend}/{self.transport}"

    @property
    def c10d_transport(self) -> str:
        """The transport; empty if `transport` is Horovod's controller."""
        return self.transport if LAUNCHER_OF.get(self.backend, _C10D) is _C10D else ""

    def command(self, script: Sequence[str]) -> list[str]:
        """Return the command line that starts the ranks; each runs `script`."""
        return command_line(self.launcher, script, self.ranks, self.hosts)

    def unavailable_reason(self) -> str | None:
        """Return what this machine lacks to start the engine, with the fix, or None."""
        program = LAUNCHERS[self.launcher][0]
        if shutil.which(program, path=own_environment()["PATH"]) is None:
            return f"{program} is not on the PATH; {INSTALL_COMMANDS[program]}"
        if self.launcher == "mpirun" and find_spec("mpi4py") is None:
            return "mpi4py is missing; pip install mpi4py"
        return horovod_problem(version("torch")) if self.backend == "horovod" else None


def parse(name: str, ranks: int, cuda: bool, hosts: tuple[Host, ...] = ()) -> NamedEngine:
    """Return the engine that "backend/transport", "backend" or "module:Class/transport" names.

    Raise InputError, which lists the valid names, for an unknown one.
    """
    backend, _, transport = name.rpartition("/") if "/" in name else (name, "", "")
    transports = _C10D if ":" in backend else LAUNCHER_OF.get(backend)
    if transports is None:
        raise InputError(
            f"unknown arm {name!r}: backends are {', '.join(LAUNCHER_OF)} and module:Class; "
            f"an arm is backend/transport, such as ddp/gloo"
        )
    if not transport:
        # What `--transport auto` takes under this launcher; for Horovod, its MPI controller.
        on_cpu = "gloo" if 1 < len(hosts) == ranks and backend != "horovod" else "shm"
        wanted = (NCCL, "mpi") if cuda else (on_cpu, "mpi")
        transport = next(transport for transport in wanted if transport in transports)
    if transport not in transports:
        raise InputError(
            f"unknown arm {name!r}: {backend} has the transports {', '.join(transports)}"
        )
    return NamedEngine(backend, transport, transports[transport], ranks, hosts)
