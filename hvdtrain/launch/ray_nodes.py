"""The nodes of a Ray cluster as the hosts of an elastic job: actors start its programs there.

Used by `ray`. An actor of Ray holds the resources of one rank, and runs what ssh would
run on another host: `supervisor`, with its stdin and output.

    launcher --- stdin (a pipe) ---> thread ---> actor on the node ---> supervisor ---> rank
             <-- stdout, stderr ---- threads <--

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hvdtrain.errors import InputError, first_line
from hvdtrain.launch.host_list import Host
from hvdtrain.launch.remote import Program, RemoteShell

_PIECE = 1 << 16  # of a rank's output, in bytes
_ENDED = 255  # as ssh: the exit code of a program whose actor has died


class _Actor:
    """Runs a program on its node. Its methods run at the same time."""

    def __init__(self, command: Sequence[str], num_gpus: int) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # Ray makes only the actor's own GPUs visible. A rank selects its GPU by its local rank.
        if num_gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(num_gpus)))
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe)

    def read(self, name: str) -> bytes:
        """Return what the program has written to "stdout" or "stderr" since; b"" at its end."""
        return os.read(getattr(self._process, name).fileno(), _PIECE)

    def write(self, data: bytes) -> None:
        """Write to the program's stdin; without data close it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._process.stdin.write(data)
            self._process.stdin.flush()
            if not data:
                self._process.stdin.close()

    def start(self) -> None:
        """Return once the actor has started."""

    def wait(self) -> int:
        """Return the program's exit code, once it has ended."""
        return self._process.wait()


class _Process:
    """A handle for a program that an actor runs on a node, with what launchers use of Popen."""

    def __init__(self, actor: Any, start_timeout_s: float) -> None:
        self._actor, self._code = actor, actor.wait.remote()
        self._start_timeout_s = start_timeout_s
        read, write = os.pipe()
        self.stdin: IO[bytes] | None = os.fdopen(write, "wb", 0)
        threading.Thread(target=self._send, args=(read,), daemon=True).start()
        self.stdout: IO[bytes] | None = self._receive("stdout")
        self.stderr: IO[bytes] | None = self._receive("stderr")

    def _send(self, stdin: int) -> None:
        with contextlib.suppress(RayError):
            data = b"."
            while data:
                data = os.read(stdin, _PIECE)
                ray.get(self._actor.write.remote(data))
        os.close(stdin)

    def _receive(self, name: str) -> IO[bytes]:
        def run() -> None:
            with contextlib.suppress(OSError):  # the launcher has ended
                try:
                    if name == "stderr":
                        self._check_start()
                    while data := ray.get(self._actor.read.remote(name)):
                        os.write(write, data)
                except (RayError, TimeoutError) as error:
                    if name == "stderr":  # as ssh says why
                        os.write(write, f"{first_line(error)}\n".encode())
            os.close(write)

        read, write = os.pipe()
        threading.Thread(target=run, daemon=True).start()
        return os.fdopen(read, "rb", 0)

    def _check_start(self) -> None:
        """Wait for the actor; end it, and raise TimeoutError, if Ray does not start it in time."""
        try:
            ray.get(self._actor.start.remote(), timeout=self._start_timeout_s)
        except GetTimeoutError:
            self.kill()
            raise TimeoutError(
                f"Ray has not started the actor of a rank within {self._start_timeout_s:g} s: are "
                "its CPUs and GPUs in use?"
            ) from None

    def poll(self) -> int | None:
        """Return the exit code; None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the program has ended. Raises TimeoutExpired."""
        if not ray.wait([self._code], timeout=timeout)[0]:
            raise subprocess.TimeoutExpired("the program on a node of Ray", timeout or 0)
        try:
            return int(ray.get(self._code))
        except RayError:
            return _ENDED

    def kill(self) -> None:
        """End the actor: the program's stdin closes, and so it ends."""
        ray.kill(self._actor)


@dataclass(frozen=True, kw_only=True)
class RayNodes(RemoteShell):
    """Starts programs on nodes of Ray instead of hosts."""

    resources: Mapping[str, float]
    """Of each rank, as Ray names them: "CPU" and "GPU"."""
    start_timeout_s: float
    """Seconds for an actor to start."""
    is_shared: ClassVar[bool] = False  # an actor has the resources of one rank
    _nodes: dict[str, tuple[str, int]] = field(default_factory=dict)
    """The id of each node and the number of its GPUs, by its name."""

    def hosts(self) -> list[Host]:
        """Return the nodes that are alive, with the number of ranks that fit there. A node is named
        by its address, and by its id if it shares that.
        """
        try:
            alive = [node for node in ray.nodes() if node["Alive"]]
        except RayError as error:  # while its head starts again
            raise InputError(f"Ray does not name its nodes: {first_line(error)}") from None
        shared = Counter(node["NodeManagerAddress"] for node in alive)
        found = []
        for node in alive:
            address, node_id = node["NodeManagerAddress"], node["NodeID"]
            name = address if shared[address] == 1 else f"{address}-{node_id[:8]}"
            has = {kind: int(node["Resources"].get(kind, 0)) for kind in self.resources}
            self._nodes[name] = node_id, has["GPU"] if self.resources["GPU"] else 0
            fits = [has[kind] // need for kind, need in self.resources.items() if need]
            slots = int(min(fits, default=has["CPU"]))
            found += [Host(name, slots)] if slots else []
        return sorted(found, key=lambda host: host.name)

    def start(self, host: str, command: Sequence[str], env: Mapping[str, str]) -> Program:
        """Start a program on a node, in the environment that Ray has there."""
        node_id, num_gpus = self._nodes[host]
        actor = ray.remote(_Actor).options(
            num_cpus=self.resources["CPU"],
            num_gpus=self.resources["GPU"],
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        return _Process(actor.remote(list(command), num_gpus), self.start_timeout_s)

    def address_for(self, host: str) -> str:
        """Return the address at which the programs on a node reach this process."""
        return str(ray.util.get_node_ip_address())
