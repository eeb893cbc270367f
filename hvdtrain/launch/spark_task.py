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
from functools import partial
from itertools import groupby

from pyspark import BarrierTaskContext

from hvdtrain.job import elastic_world
from hvdtrain.launch.event_loop import MARK
from hvdtrain.launch.output import LineReader
from hvdtrain.launch.placement import Place, free_port, number_ranks
from hvdtrain.launch.value_server import SERVER


def run_rank(program: str, shared: Mapping[str, str], executable: str | None) -> None:
    """Run a rank to its end, and report what it prints and its exit code. Collective.

    All tasks have the same arguments: a task finds its rank here. `program` is for `python -c`,
    with the sys.path of Spark's worker; `shared` has the variables of all ranks.
    """
    context = BarrierTaskContext.get()
    variables = _place(context)
    rank = variables["RANK"]
    put = partial(elastic_world.request, server=json.loads(shared[SERVER]))
    place = json.dumps([socket.gethostname(), context.partitionId()])
    put(f"place/{rank}", place.encode())
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
    assert process.stdout is not None
    start = {
        "start": int(rank),
        "command": [executable or sys.executable, "-c", program],
        "env": {"PYTHONUNBUFFERED": "1", **variables, **shared},
        "defaults": {},
    }
    process.stdin.write(f"{json.dumps(start)}\n".encode())
    process.stdin.flush()
    # Send the rank's lines and its exit code, else the supervisor's, until the supervisor ends.
    reader, is_open = LineReader(), True
    while is_open:
        lines, is_open = reader.read(process.stdout.fileno())
        marked = [MARK.fullmatch(line) for line in lines]
        for kind, matches in groupby(filter(None, marked), key=lambda match: match[2].decode()):
            texts = [match[4] + b"\n" * (match[3] == b":") for match in matches]
            # Or the supervisor was killed: its other process ends the rank.
            if kind in ("exit", "supervisor"):
                process.stdin.close()
                put(f"exit/{rank}", texts[0].strip() or b"%d" % -signal.SIGKILL)
            # Keep reading if the driver does not answer, or the rank would block.
            elif kind in ("stdout", "stderr"):
                with contextlib.suppress(OSError):
                    put(f"output/{rank}/{kind}", b"".join(texts))
    code = process.wait()
    if not process.stdin.closed:
        put(f"exit/{rank}", b"%d" % code)


def _place(context: BarrierTaskContext) -> dict[str, str]:
    """Return the environment variables of this task's rank. Collective."""
    own = context.partitionId()
    host = context.getTaskInfos()[own].address.rpartition(":")[0]
    gpus = context.resources().get("gpu")
    mine = Place(host, host, free_port(), [] if gpus is None else list(gpus.addresses))
    places = [Place(*json.loads(text)) for text in context.allGather(json.dumps(mine))]
    order, variables = number_ranks(places)
    return variables[order.index(own)]
