"""Live ranks for interleaved measurements.

Every arm is started once, by its own real launcher, and serves calls on a Unix socket. While one
arm works the others' ranks are stopped (SIGSTOP): idle ranks of some arms poll, and would take time
from the one that is measured.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import bootstrap

START_S, CALL_S = 120.0, 300.0
LAUNCHERS = {
    "torchrun": "torchrun --nproc-per-node {n}",
    "mpirun": "mpirun -np {n} {python}",  # binds each of two ranks to a core
    "mpirun unbound": "mpirun --bind-to none -np {n} {python}",  # as Horovod's manual has it
    "horovodrun-gloo": "horovodrun -np {n} --gloo {python}",
}


@dataclass
class Arm:
    """The ranks of one arm, which stand still but for a `call`, in which all do the same."""

    name: str
    connections: list[Connection] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)

    def call(self, *what: object) -> list[Any]:
        """Send a call to every rank and return their answers in rank order."""
        self._signal(signal.SIGCONT)
        for connection in self.connections:
            connection.send_bytes(pickle.dumps(what))
        deadline = time.monotonic() + CALL_S
        answers = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} of {self.name} did not answer {what}")
            answers.append(pickle.loads(connection.recv_bytes()))
        self._signal(signal.SIGSTOP)
        return answers

    def end(self) -> None:
        """Let the ranks end as a program does."""
        self._signal(signal.SIGCONT)
        for connection in self.connections:
            connection.send_bytes(pickle.dumps(None))

    def _signal(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)


@contextlib.contextmanager
def arms(
    script: str, names: dict[str, tuple[str, dict[str, str]]], ranks: int
) -> Iterator[dict[str, Arm]]:
    """Start `script SOCKET NAME` for each name, under its launcher and with its own variables; end
    them all at the end.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    started: list[subprocess.Popen[bytes]] = []
    live: dict[str, Arm] = {}
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/log", "w+b") as log:
        try:
            for name, (launcher, own) in names.items():
                address = f"{folder}/{len(live)}"
                with Listener(address, "AF_UNIX", backlog=ranks) as listener:
                    line = LAUNCHERS[launcher].format(n=ranks, python=sys.executable).split()
                    command = [*line, script, address, name]
                    started.append(
                        subprocess.Popen(
                            command,
                            env={**env, **own},
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                        )
                    )
                    live[name] = _meet(name, listener, ranks, started[-1])
            yield live
            for arm in live.values():
                arm.end()
        except BaseException:
            log.seek(0)
            print(log.read().decode(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            for process in started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20 if sys.exc_info()[0] is None else 0.1)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait()
            for pid in (pid for arm in live.values() for pid in arm.pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _meet(name: str, listener: Listener, ranks: int, process: subprocess.Popen[bytes]) -> Arm:
    arm = Arm(name)
    by_rank: dict[int, tuple[int, Connection]] = {}
    socket = listener._listener._socket  # type: ignore[attr-defined]
    socket.settimeout(1)
    deadline = time.monotonic() + START_S
    while len(by_rank) < ranks:
        try:
            connection = listener.accept()
        except TimeoutError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise TimeoutError(f"arm {name} did not start") from None
            continue
        rank, pid = pickle.loads(connection.recv_bytes())
        by_rank[rank] = (pid, connection)
    for rank in range(ranks):
        arm.pids.append(by_rank[rank][0])
        arm.connections.append(by_rank[rank][1])
    arm._signal(signal.SIGSTOP)
    return arm


def serve(address: str, rank: int, calls: dict[str, Callable[..., Any]]) -> None:
    """Answer calls until the driver ends. In the ranks."""
    with Client(address, "AF_UNIX") as connection:
        connection.send_bytes(pickle.dumps((rank, os.getpid())))
        while (call := pickle.loads(connection.recv_bytes())) is not None:
            name, *arguments = call
            connection.send_bytes(pickle.dumps(calls[name](*arguments)))


def machine() -> dict[str, Any]:
    """Where and when: what every result is stored with."""
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def interval(ratios: list[float]) -> dict[str, float]:
    """The median of paired ratios, and its 95 % bootstrap interval over blocks."""
    found = bootstrap((np.array(ratios),), np.median, n_resamples=5000, rng=0).confidence_interval
    return {"median": float(np.median(ratios)), "low": float(found.low), "high": float(found.high)}
