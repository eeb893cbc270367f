"""Call a function on the ranks of a job, as `hvdrun` runs a command on them.

Used by `runner`, `ray` and `spark`. Ranks get the call from a server of the calling process, whose
address and secret they have through the stdin of their supervisors:

    rank                                     calling process
    GET call                            ->
                                        <-   function, arguments, keywords
    PUT result/RANK,                    ->   the pickled result,
    or error/GENERATION/RANK,                or the traceback; the generation is 0 unless the job
    or lost/GENERATION/RANK                  is elastic. Lost: the rank lost a peer.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import cloudpickle

from hvdtrain.errors import WorldError
from hvdtrain.hvd.alias import install, installed
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.job import elastic_world
from hvdtrain.launch.elastic import ElasticJob, ElasticOptions
from hvdtrain.launch.event_loop import Job, JobStopped, RankFailed
from hvdtrain.launch.launcher import run
from hvdtrain.launch.remote import own_address
from hvdtrain.launch.value_server import SERVER, TRANSFER_S, ValueServer

LOST_A_PEER = (WorldError, HorovodInternalError)
"""The errors of a rank that another rank may have caused."""
Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, arguments and keywords."""


class CallServer(ValueServer):
    """Serves a call (function, arguments, keywords) to ranks; keeps their results and errors."""

    def __init__(self, call: Call, address: str = "") -> None:
        data = _dumps(call, "the function and its arguments")
        super().__init__(address)
        self.values["call"] = data

    def variable(self, address: str) -> dict[str, str]:
        """Return the environment variable for ranks that reach this server at `address`."""
        return {SERVER: json.dumps([address, str(self.port), self.secret])}

    def results(self, size: int | None) -> list[Any]:
        """Return the results in rank order: of `size` ranks, or, if it is None, of all ranks of an
        elastic job's last generation. Raises RuntimeError if one is missing.
        """
        received = {int(rank): value for rank, value in self.below("result").items()}
        if size is None:
            size = max(received, default=0) + 1
        for rank in range(size):
            if rank not in received:
                raise RuntimeError(f"rank {rank} ended without returning from the function")
        return [cloudpickle.loads(received[rank]) for rank in range(size)]

    def error_of(self, rank: int | None) -> str:
        """Return the traceback of the first rank that raised for another reason than a lost peer,
        else that of `rank`; "" if there is none. Of an elastic job's errors those count that were
        raised in the generation in which `rank` failed last.
        """
        failed = [name.split("/") for kind in ("error", "lost") for name in self.below(kind)]
        last = max((int(generation) for generation, own in failed if own == str(rank)), default=0)
        causes = self.below(f"error/{last}")
        first = next(iter(causes), str(rank))
        text = causes.get(first) or self.values.get(f"lost/{last}/{rank}", b"")
        return f"rank {first} failed:\n{text.decode()}" if text else ""


def run_job(call: Call, job: Job, elastic: ElasticOptions | None = None) -> list[Any]:
    """Make a call on every rank; return the results by rank.

    `job.command` is the Python to run. See `runner.run`.
    """
    # Which hosts an elastic job has is not known yet: its ranks know where their launcher is.
    address = "" if elastic else own_address([host.name for host in job.hosts])
    server = CallServer(call, address)
    try:
        # The ranks take over our sys.path, before their own.
        paths = list(map(os.path.abspath, sys.path))
        path = f"import sys; sys.path[:] = dict.fromkeys([*{json.dumps(paths)}, *sys.path]); "
        job = replace(
            job,
            command=[*job.command, "-c", path + rank_main()],
            env={**job.env, **server.variable(address)},
        )
        if elastic is None:
            run(job)
        else:
            ElasticJob(job, elastic).run()
        return server.results(None if elastic else sum(host.slots for host in job.hosts))
    except RankFailed as failure:
        # A rank that was killed has raised no error, but those that have lost it have.
        text = "" if failure.is_killed else server.error_of(failure.rank)
        raise RuntimeError(text or str(failure)) from None
    except JobStopped as stopped:
        os.kill(os.getpid(), stopped.exit_code - 128)
        raise RuntimeError(f"the ranks were {stopped}") from None  # if our handler returns
    finally:
        server.stop()


def rank_main() -> str:
    """Return the Python statements of a rank: install the alias `horovod`, if this process has it,
    then make the call.
    """
    return f"from hvdtrain.launch.function_call import make_call; make_call({installed()})"


def make_call(alias: bool) -> None:
    """Run one rank: get the call, make it, and put its result or error."""
    address, port, secret = json.loads(os.environ.pop(SERVER))
    server = address or os.environ[elastic_world.ADDRESS[0]], port, secret
    sys.argv = [""]
    what = "result"
    try:
        if alias:
            install()
        data = elastic_world.request("call", timeout_s=TRANSFER_S, server=server)
        func, args, kwargs = cloudpickle.loads(data)
        value = _dumps(func(*args, **kwargs), "the result")
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise
        trace = error.__traceback__
        if trace and trace.tb_next:  # without the frame of this file: it begins at the user's
            error.__traceback__ = trace.tb_next
        what = "lost" if isinstance(error, LOST_A_PEER) else "error"
        generation = os.environ.get(elastic_world.GENERATION) if elastic_world.is_elastic() else ""
        what += f"/{generation or 0}"
        value = "".join(traceback.format_exception(error)).encode()
    rank = os.environ["HOROVOD_RANK" if elastic_world.is_elastic() else "RANK"]
    elastic_world.request(f"{what}/{rank}", value, timeout_s=TRANSFER_S, server=server)
    if what != "result":
        sys.exit(1)


def _dumps(value: object, what: str) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise ValueError(f"{what} cannot be pickled: {error}") from error
