"""`run(func)`: call a function in several processes of this host, as `horovod.run` does.

For scripts, also as `hvdtrain.run`. This file checks Horovod's arguments; `job` runs the processes.
"""

from __future__ import annotations

import socket
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hvdtrain.hvd.hosts import parse_host_files, parse_hosts, parse_hosts_and_slots
from hvdtrain.hvd.job import run_job

T = TypeVar("T")

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")

# Arguments without effect on one host, and those of elastic jobs, which `run` does not support.
_IDLE = ("slots", "start_timeout", "ssh_port", "ssh_identity_file", "disable_cache", "mpi_args")
_ELASTIC = (
    "min_num_proc",
    "max_num_proc",
    "reset_limit",
    "cooldown_range",
    "host_discovery_script",
)


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[T]:
    """Call `func(*args, **kwargs)` in `num_proc` new processes; return the results in rank order.

    The processes run on this host, and `func` calls `hvd.init()` itself. Function, arguments and
    results are sent with cloudpickle, so closures and lambdas work. Arguments for other hosts, an
    elastic job or MPI raise ValueError, so `hosts` and `hostfile` may name this host only; those
    without effect on one host warn. `output_filename` is a folder that also receives the output, as
    `rank.RANK/stdout` and `stderr`. `executable` is the Python to run.

    Raises RuntimeError with the traceback of the first rank to fail, and stops the other ranks. No
    process outlives the call.
    """
    if network_interface:
        network_interfaces = network_interface.split(",")
    num_proc = num_proc if np is None else np
    min_num_proc = min_num_proc if min_np is None else min_np
    max_num_proc = max_num_proc if max_np is None else max_np
    # Before any other variable is assigned: until here locals() are the arguments.
    given = {name: value for name, value in locals().items() if value is not None}
    _check(given)
    _check_slots(num_proc, hosts, hostfile)
    interfaces = ",".join(network_interfaces or ())
    variables = {}
    if interfaces:  # Gloo and NCCL read them from the environment
        variables = {"GLOO_SOCKET_IFNAME": interfaces, "NCCL_SOCKET_IFNAME": interfaces}
    if verbose:
        print(f"hvdtrain.run: starting {num_proc} processes on this host", file=sys.stderr)
    call = (func, tuple(args), dict(kwargs or {}))
    return run_job(call, num_proc, executable or sys.executable, output_filename, variables)


def _check(given: Mapping[str, Any]) -> None:
    """Raise ValueError or warn for arguments that do not apply. `given`: all that are not None."""
    renamed = {"network_interface": "network_interfaces", "np": "num_proc"}
    renamed |= {"min_np": "min_num_proc", "max_np": "max_num_proc"}
    for old, new in renamed.items():
        if given.get(old):
            _warn(f"{old} is deprecated, use {new} instead", DeprecationWarning)
    if "hosts" in given and "hostfile" in given:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if given.get("use_gloo") and given.get("use_mpi"):
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    if given.get("use_mpi"):
        raise ValueError(
            "use_mpi=True: hvdtrain starts its processes by torch.distributed, not by MPI; leave "
            "it out, or start the script by mpirun"
        )
    if elastic := [f"{name}={given[name]!r}" for name in _ELASTIC if name in given]:
        raise ValueError(
            f"{', '.join(elastic)}: hvdtrain.run starts a fixed number of processes; leave "
            f"{'it' if len(elastic) == 1 else 'them'} out"
        )
    if idle := [name for name in _IDLE if name in given]:
        _warn(f"hvdtrain.run ignores {', '.join(idle)}: it starts processes on this host only")
    if (num_proc := given["num_proc"]) < 1:
        raise ValueError(f"num_proc={num_proc} must be at least 1")


def _warn(text: str, category: type[Warning] = UserWarning) -> None:
    warnings.warn(text, category, stacklevel=4)  # at the line that calls run


def _check_slots(num_proc: int, hosts: str | None, hostfile: str | None) -> None:
    """Raise ValueError unless the named hosts, if any, are this one and have enough slots."""
    if hosts is None and hostfile is None:
        return
    named = hosts if hosts is not None else parse_host_files(str(hostfile))
    this = {*_LOCAL_NAMES, socket.gethostname(), socket.getfqdn()}
    for name in parse_hosts_and_slots(named)[0]:
        if name not in this:
            raise ValueError(
                f"hvdtrain.run starts processes on this host ({socket.gethostname()}) only, not on "
                f"{name}; start the script on several hosts by torchrun, mpirun or horovodrun"
            )
    available = sum(host.slots for host in parse_hosts(named))
    if num_proc > available:
        raise ValueError(
            f"Requested more processes ({num_proc}) than there are available slots ({available})"
        )
