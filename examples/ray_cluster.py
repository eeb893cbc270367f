"""Elastic jobs on a Ray cluster: this program names its nodes to hvdrun, and runs commands there.

    hvdrun --min-np 2 --host-discovery-script "python examples/ray_cluster.py hosts" \\
        --rsh "python examples/ray_cluster.py exec {host}" python train.py

Run it on a node of the cluster; train.py uses `hvd.elastic.run`, and every node has it, and Python,
at the same path. On its own node hvdrun starts ranks by itself, beside Ray. To each other node it
runs one `exec`, which does what ssh would do:

    hvdrun --- stdin --> exec -- write() --> actor on the node --- stdin --> command
           <- stdout --       <-- read() ---                   <-- stdout --
           <- stderr --       <-- read() ---                   <-- stderr --

The actor takes the CPUs and GPUs of its node: Ray starts nothing else there, and the GPUs are
visible. When stdin closes, the actor closes the command's stdin, and a command of hvdrun then ends.
When `exec` is killed, Ray ends the actor and the command.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

PIECE = 1 << 16  # of a pipe, in bytes
START_S = 60.0  # for an actor to start


def live_nodes() -> dict[str, dict[str, Any]]:
    """Return the live nodes by name: the address, and the node's id if others have that address."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    shared = Counter(node["NodeManagerAddress"] for node in alive)
    names = {}
    for node in alive:
        address, node_id = node["NodeManagerAddress"], node["NodeID"]
        names[address if shared[address] == 1 else f"{address}-{node_id[:8]}"] = node
    return names


class Command:
    """The actor: a running command. Its methods are called at the same time."""

    def __init__(self, command: list[str]) -> None:
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray sets it to all CPUs of the actor
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)

    def write(self, data: bytes) -> None:
        """Write to the command's stdin; without data close it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # the command has ended
            self.process.stdin.write(data)
            self.process.stdin.flush()
            if not data:
                self.process.stdin.close()

    def read(self, name: str) -> bytes:
        """Return a piece of "stdout" or "stderr"; b"" at its end."""
        return os.read(getattr(self.process, name).fileno(), PIECE)

    def wait(self) -> int:
        """Return the exit code, once the command has ended; 128 + N if signal N has killed it."""
        code = self.process.wait()
        return code if code >= 0 else 128 - code


def execute(host: str, command: list[str]) -> int:
    """Run a command on a node with our stdin, stdout and stderr; return its exit code."""
    node = live_nodes().get(host)
    if node is None:
        sys.exit(f"Ray has no live node {host}: see `{sys.argv[0]} hosts`")
    whole = {f"num_{kind.lower()}s": node["Resources"].get(kind, 0) for kind in ("CPU", "GPU")}
    pinned = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    options = {"scheduling_strategy": pinned, "max_concurrency": 8, **whole}
    actor = ray.remote(Command).options(**options).remote(command)

    def send_stdin() -> None:
        data = b"."
        with contextlib.suppress(RayError):
            while data:
                data = os.read(0, PIECE)
                ray.get(actor.write.remote(data))

    def print_from(name: str) -> None:
        output = getattr(sys, name).buffer
        while data := ray.get(actor.read.remote(name)):
            output.write(data)
            output.flush()

    try:
        if not ray.wait([actor.__ray_ready__.remote()], timeout=START_S)[0]:
            sys.exit(f"{host}: no actor after {START_S:g} s; are the node's CPUs and GPUs in use?")
        threading.Thread(target=send_stdin, daemon=True).start()  # it may block for ever
        with ThreadPoolExecutor() as readers:
            list(readers.map(print_from, ("stdout", "stderr")))
            return int(ray.get(actor.wait.remote()))
    except RayError as error:
        sys.exit(f"{host}: {str(error).splitlines()[0]}")
    except OSError as error:  # `exec ... | head`
        ray.kill(actor)
        sys.exit(f"cannot print: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    hosts = commands.add_parser("hosts", help="print a line address:slots for each live node")
    hosts.add_argument("--gpu", dest="slot", action="store_const", const="GPU", default="CPU")
    on_host = commands.add_parser("exec", help="run a command on a node, as ssh does")
    on_host.add_argument("host")
    on_host.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    if given.what == "exec":
        sys.exit(execute(given.host, given.command))
    for name, node in sorted(live_nodes().items()):
        slots = int(node["Resources"].get(given.slot, 0))
        print(f"[{name}]:{slots}" if ":" in name else f"{name}:{slots}")


if __name__ == "__main__":
    main()
