"""Call a function on the ranks of a job that `hvdtrain.launch` starts, as `hvdrun` does a command.

Used by `runner.run`. Ranks get the call from a server of the calling process, and its address and
secret through the stdin of their supervisors:

    rank                                     calling process
    GET call                            ->
                                        <-   function, arguments, keywords
    PUT result/RANK or error/RANK       ->   the pickled result, or the traceback
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle

from hvdtrain.hvd.alias import install, installed
from hvdtrain.job import elastic_world
from hvdtrain.launch.elastic import ElasticJob, ElasticOptions
from hvdtrain.launch.launcher import Job, JobStopped, RankFailed
from hvdtrain.launch.remote import is_this_host, master_address
from hvdtrain.launch.value_server import ValueServer

_SERVER = "HVDTRAIN_CALL_SERVER"
"""The variable with the address, port and secret of the calling process's server, as JSON."""
_TRANSFER_S = 600.0


def run_job(
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    job: Job,
    elastic: ElasticOptions | None = None,
) -> list[Any]:
    """Make the call (function, arguments, keywords) on every rank; return the results by rank.

    `job.command` is the Python to run. See `hvdtrain.hvd.runner.run`.
    """
    data = _dumps(call, "the function and its arguments")
    names = [host.name for host in job.hosts if not is_this_host(host.name)]
    address = "127.0.0.1"
    if elastic is not None:
        address = ""  # which hosts there are is not known yet
    elif names:
        address = master_address(["localhost", *names])
    server = ValueServer(address)
    try:
        server.values["call"] = data
        place = json.dumps([address, str(server.port), server.secret])
        command = [*job.command, "-c", _start_text()]
        job = replace(job, command=command, env={**job.env, _SERVER: place})
        try:
            if elastic is None:
                job.run()
            else:
                ElasticJob(job, elastic).run()
        except RankFailed as failure:
            raise RuntimeError(_failure(failure, server)) from None
        except JobStopped as error:
            os.kill(os.getpid(), error.exit_code - 128)
            raise RuntimeError(f"the ranks were {error}") from None  # if our handler returns
        return _results(server, None if elastic else sum(host.slots for host in job.hosts))
    finally:
        server.stop()


def _results(server: ValueServer, size: int | None) -> list[Any]:
    """Return the results by rank: of `size` ranks, or of those that an elastic job had at last."""
    received = {int(p[7:]): value for p, value in server.values.items() if p[:7] == "result/"}
    if size is None:
        size = max(received, default=0) + 1
    if missing := [rank for rank in range(size) if rank not in received]:
        raise RuntimeError(f"rank {missing[0]} ended without returning from the function")
    return [cloudpickle.loads(received[rank]) for rank in range(size)]


def _failure(failure: RankFailed, server: ValueServer) -> str:
    """Return which rank failed first, and its exit code, signal or traceback."""
    errors = [path for path in server.values if path.startswith("error/")]
    # A rank that was killed has raised no error, but those that have lost it have.
    if failure.is_killed or not errors:
        return str(failure)
    return f"rank {errors[0][6:]} failed:\n{server.values[errors[0]].decode()}"


def _start_text() -> str:
    """Return a rank's `python -c` program: it takes over our sys.path, then calls `_rank_main`."""
    paths = [os.path.abspath(path) for path in sys.path]
    return (
        f"import sys; sys.path[:] = {json.dumps(paths)}; "
        f"from hvdtrain.hvd.job import _rank_main; _rank_main({installed()})"
    )


def _rank_main(alias: bool) -> None:
    """Run one rank: get the call, make it, and put its result or error."""
    address, port, secret = json.loads(os.environ.pop(_SERVER))
    server = address or os.environ[elastic_world.ADDRESS[0]], port, secret
    sys.argv = [""]
    what = "result"
    try:
        if alias:
            install()
        data = elastic_world.request("call", timeout_s=_TRANSFER_S, server=server)
        func, args, kwargs = cloudpickle.loads(data)
        value = _dumps(func(*args, **kwargs), "the result")
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise
        trace = error.__traceback__
        if trace and trace.tb_next:  # without the frame of this file: it begins at the user's
            error.__traceback__ = trace.tb_next
        what, value = "error", "".join(traceback.format_exception(error)).encode()
    variable = "HOROVOD_RANK" if elastic_world.is_elastic() else "RANK"
    path = f"{what}/{os.environ[variable]}"
    elastic_world.request(path, value, timeout_s=_TRANSFER_S, server=server)
    if what == "error":
        sys.exit(1)


def _dumps(value: object, what: str) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise ValueError(f"{what} cannot be pickled: {error}") from error
