"""The table of checks of `hvdtrain doctor`, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hvdtrain.doctor import limits, network, remains, software
from hvdtrain.doctor.finding import Finding
from hvdtrain.errors import one_line

Check = Callable[[int], Finding]
"""A check. Its argument: the ranks that are to run on this host."""


def _without_ranks(check: Callable[[str], Finding], name: str) -> Check:
    return lambda ranks: check(name)


CHECKS: dict[str, Check] = {
    "torch": software.torch_itself,
    "launch variables": software.launch_variables,
    **{
        name: _without_ranks(software.launcher, name)
        for name in ("torchrun", "mpirun", "horovodrun", "srun", "ssh")
    },
    "horovod": software.horovod,
    "mpi": software.mpi,
    **{name: _without_ranks(software.transport, name) for name in ("gloo", "shm", "nccl")},
    "gpu": software.gpu,
    limits.SHM: limits.shared_memory,
    "open files": limits.open_files,
    "cores": limits.cores,
    "threads": limits.threads,
    "host name": network.host_name,
    "interface": network.interface,
    "interface variables": network.interface_variables,
    "left behind": remains.remains,
}


def run_checks(ranks: int) -> Iterator[Finding]:
    """Yield the finding of each check, for `ranks` ranks on this host. Not collective.

    A check that raises counts as a failure; without torch the other checks are left out.
    """
    for name, check in CHECKS.items():
        try:
            found = replace(check(ranks), name=name)
        except Exception as error:
            text = f"the check itself failed: {type(error).__name__}: {one_line(error)}"
            found = Finding("failure", text, name=name)
        yield found
        if name == "torch" and not found.works:
            return
