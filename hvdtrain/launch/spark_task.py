"""One task of Spark's barrier stage: it runs a rank in a process of its own.

Used by `spark`, which has the diagram. Imports no torch: Spark's workers stay small.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from pyspark import BarrierTaskContext

from hvdtrain.job import elastic_world
from hvdtrain.launch.event_loop import MARK
from hvdtrain.launch.output import LineReader
from hvdtrain.launch.placement import Place, free_port, number_ranks


@dataclass(frozen=True)
class SparkTask:
    """What every task runs. All are equal: a task finds its rank when it starts."""

    program: str
    """For `python -c`, with the sys.path of Spark's worker."""
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
        # It ends all that the rank has started, also when Spark kills this task: its stdin closes.
        process = subprocess.Popen(
            [sys.executable, "-m", "hvdtrain.launch.supervisor"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Spark kills the process group of a task
        )
        assert process.stdin is not None
        start = {
            "start": int(rank),
            "command": [self.executable or sys.executable, "-c", self.program],
            "env": {"PYTHONUNBUFFERED": "1", **variables, **self.variables},
            "defaults": {},
        }
        process.stdin.write(f"{json.dumps(start)}\n".encode())
        process.stdin.flush()
        self._relay(process, rank)

    def _relay(self, process: subprocess.Popen[bytes], rank: str) -> None:
        """Send the rank's lines and its exit code, else the supervisor's, to the driver, until the
        supervisor ends; close its stdin once the rank has ended.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        reader, is_open, has_exit_code = LineReader(), True, False
        while is_open:
            lines, is_open = reader.read(process.stdout.fileno())
            marked = [MARK.fullmatch(line) for line in lines]
            for kind, matches in groupby(filter(None, marked), key=lambda match: match[2].decode()):
                texts = [match[4] + b"\n" * (match[3] == b":") for match in matches]
                # Or the supervisor was killed: its other process ends the rank.
                if kind in ("exit", "supervisor"):
                    process.stdin.close()
                    self._put(f"exit/{rank}", texts[0].strip() or b"%d" % -signal.SIGKILL)
                    has_exit_code = True
                # Keep reading if the driver does not answer, or the rank would block.
                elif kind in ("stdout", "stderr"):
                    with contextlib.suppress(OSError):
                        self._put(f"output/{rank}/{kind}", b"".join(texts))
        code = process.wait()
        if not has_exit_code:
            self._put(f"exit/{rank}", b"%d" % code)

    def _put(self, path: str, value: bytes) -> None:
        elastic_world.request(path, value, server=self.server)


def _place(context: BarrierTaskContext) -> dict[str, str]:
    """Return the environment variables of this task's rank. Collective."""
    own = context.partitionId()
    host = context.getTaskInfos()[own].address.rpartition(":")[0]
    gpus = context.resources().get("gpu")
    mine = Place(host, host, free_port(), [] if gpus is None else list(gpus.addresses))
    places = [Place(*json.loads(text)) for text in context.allGather(json.dumps(mine))]
    order, variables = number_ranks(places)
    return variables[order.index(own)]
