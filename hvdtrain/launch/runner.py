"""`run(func)`: call a function on the ranks of a new job, as `horovod.run` does.

For scripts, also as `hvdtrain.run`. This file turns Horovod's arguments into those of `hvdrun`;
`function_call` makes the calls.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.errors import InputError
from hvdtrain.launch.elastic import ElasticOptions
from hvdtrain.launch.event_loop import Job
from hvdtrain.launch.function_call import run_job
from hvdtrain.launch.host_list import Host, choose_slots, parse_host_list, read_host_file
from hvdtrain.launch.remote import RemoteShell, environment

T = TypeVar("T")

# Arguments without effect.
_IDLE = ("disable_cache", "mpi_args")
# Older names.
_RENAMED = {
    "network_interface": "network_interfaces",
    "np": "num_proc",
    "min_np": "min_num_proc",
    "max_np": "max_num_proc",
}
# Those that only an elastic job has.
_ELASTIC = ("max_num_proc", "slots", "reset_limit", "cooldown_range")


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
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
    """Call `func(*args, **kwargs)` on `num_proc` ranks; return the results in rank order.

    `func` calls `hvd.init()` itself. Function, arguments and results are sent with cloudpickle, so
    closures and lambdas work. The ranks start as with `hvdrun`: on this host, or over ssh on
    `hosts` ("a:4,b:4"), where they fill all slots unless `num_proc` is given. With
    `host_discovery_script` or `min_num_proc` the job is elastic, `func` uses `hvd.elastic.run`, and
    the results are those of the ranks at the end. `start_timeout` is in seconds. `output_filename`
    is a folder that also receives the output, as `rank.RANK/stdout` and `stderr`; `executable` is
    the Python to run.

    Raises RuntimeError with the traceback of the first rank to fail, and stops the other ranks;
    WorldError if a host is lost, LaunchError if a host does not start, and ValueError for
    arguments that cannot be used. No process outlives the call.
    """
    num_proc = num_proc if np is None else np
    min_num_proc = min_num_proc if min_np is None else min_np
    max_num_proc = max_num_proc if max_np is None else max_np
    # Before any other variable is assigned: until here locals() are the arguments.
    given = {name: value for name, value in locals().items() if value is not None}
    is_elastic = _check(given)
    try:
        if hosts is not None:
            named = parse_host_list(hosts)
        elif hostfile is not None:
            named = read_host_file(hostfile)
        else:
            named = [Host("localhost", num_proc or max_num_proc or min_num_proc or 1)]
        elastic: ElasticOptions | None = None
        if not is_elastic:
            named = choose_slots(named, num_proc)
        else:
            shortest_s, longest_s = map(float, cooldown_range or ElasticOptions.cooldown_s)
            elastic = ElasticOptions(
                hosts=host_discovery_script or (lambda: named),
                min_np=min_num_proc or num_proc or 1,
                max_np=max_num_proc,
                first_np=num_proc,
                slots=slots or 1,
                reset_limit=reset_limit,
                cooldown_s=(shortest_s, longest_s),
            )
        env = environment((), network_interface or ",".join(network_interfaces or ()))
        timeout_s = start_timeout or Job.start_timeout_s
        if not start_timeout and (text := env.get("HOROVOD_START_TIMEOUT")):
            if not text.isdecimal():
                raise InputError(f"HOROVOD_START_TIMEOUT={text!r} is not a number of seconds")
            timeout_s = float(text)
        job = Job(
            hosts=named,
            command=[executable or sys.executable],
            env={"PYTHONUNBUFFERED": "1", **env},
            remote=RemoteShell("ssh", ssh_port, ssh_identity_file, int(timeout_s) or 1),
            start_timeout_s=timeout_s,
            output=Path(output_filename).absolute() if output_filename else None,
            verbose=bool(verbose),
        )
        return run_job((func, tuple(args), dict(kwargs or {})), job, elastic)
    except InputError as error:
        raise ValueError(str(error)) from None


def _check(given: Mapping[str, Any]) -> bool:
    """Raise ValueError or warn for arguments that do not apply; return whether the job is elastic.

    `given`: all that are not None.
    """
    for old, new in _RENAMED.items():
        if given.get(old):
            # At the line that calls run.
            warnings.warn(
                f"{old} is deprecated, use {new} instead", DeprecationWarning, stacklevel=3
            )
    if "hosts" in given and "hostfile" in given:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if given.get("use_gloo") and given.get("use_mpi"):
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    if given.get("use_mpi"):
        raise ValueError(
            "use_mpi=True: hvdtrain connects its ranks with torch.distributed, not with MPI; leave "
            "it out, or start the script with mpirun"
        )
    is_elastic = "min_num_proc" in given or "host_discovery_script" in given
    idle = [f"{name}={given[name]!r}" for name in _ELASTIC if name in given]
    if idle and not is_elastic:
        raise ValueError(
            f"{', '.join(idle)}: for elastic jobs only; also give min_num_proc or "
            "host_discovery_script"
        )
    if ignored := [name for name in _IDLE if name in given]:
        warnings.warn(f"hvdtrain.run ignores {', '.join(ignored)}", stacklevel=3)
    if len(given.get("cooldown_range", (0, 0))) != 2:
        raise ValueError(
            f"cooldown_range={given['cooldown_range']!r}: give the least and the most, in seconds"
        )
    for name in ("num_proc", "min_num_proc", "max_num_proc"):
        if (value := given.get(name, 1)) < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    return is_elastic
