"""One task of Spark's barrier stage: it runs a rank in a process of its own.

Used by `hvdtrain.hvd.spark`, which has the diagram. Imports no torch: Spark's workers stay small.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from pyspark import BarrierTaskContext

from hvdtrain.job import elastic_world
from hvdtrain.system.processes import end_with_parent

_PIECE = 1 << 16  # of a rank's output, in bytes


@dataclass(frozen=True)
class SparkTask:
    """What every task runs. All are equal: a task finds its rank when it starts."""

    program: str
    """For `python -c`, after sys.path has been set to that of Spark's worker."""
    server: tuple[str, str, str]
    """The address, port and secret of the driver's server."""
    variables: Mapping[str, str]
    executable: str | None

    def run(self) -> None:
        """Run the rank to its end, and report what it prints and its exit code. Collective."""
        context = BarrierTaskContext.get()
        variables = _place(context)
        rank = variables["RANK"]
        place = json.dumps([socket.gethostname(), context.partitionId()])
        self._put(f"place/{rank}", place.encode())
        path = json.dumps([os.path.abspath(folder) for folder in sys.path])
        process = subprocess.Popen(
            [
                self.executable or sys.executable,
                "-c",
                f"import sys; sys.path[:] = {path}; {self.program}",
            ],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **variables, **self.variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        relays = [
            threading.Thread(target=self._relay, args=(stream, f"output/{rank}/{name}"))
            for stream, name in ((process.stdout, "stdout"), (process.stderr, "stderr"))
        ]
        for relay in relays:
            relay.start()
        code = process.wait()
        for relay in relays:
            relay.join()
        if code:
            self._put(f"exit/{rank}", str(code).encode())

    def _relay(self, stream: IO[bytes] | None, path: str) -> None:
        assert stream is not None
        while piece := os.read(stream.fileno(), _PIECE):
            with contextlib.suppress(
                OSError
            ):  # the driver is late or has ended: read on all the same
                self._put(path, piece)

    def _put(self, path: str, value: bytes) -> None:
        elastic_world.request(path, value, server=self.server)


def _place(context: BarrierTaskContext) -> dict[str, str]:
    """Return the environment variables of this task's rank: ranks are numbered host by host.

    The GPUs of a rank are those of all tasks on its host, so that they can reach each other.
    Collective.
    """
    hosts = [info.address.rpartition(":")[0] for info in context.getTaskInfos()]
    order = sorted(range(len(hosts)), key=lambda task: (hosts.index(hosts[task]), task))
    own = context.partitionId()
    gpus = context.resources().get("gpu")
    with socket.socket() as probe:
        probe.bind(("", 0))
        mine = [probe.getsockname()[1], [] if gpus is None else list(gpus.addresses)]
        tasks = [json.loads(text) for text in context.allGather(json.dumps(mine))]
    first = order[0]
    variables = {
        "RANK": str(order.index(own)),
        "WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": hosts[first],
        "MASTER_PORT": str(tasks[first][0]),
    }
    on_host: Sequence[int] = [task for task in order if hosts[task] == hosts[own]]
    if visible := [gpu for task in on_host for gpu in tasks[task][1]]:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    return variables
