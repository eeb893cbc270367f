"""One rank of a job that another user attacks, and that user's programs.

`python -m tests.launch.stranger MODE FOLDER`. The files in FOLDER are the events. An attack that
succeeds leaves a file there whose name ends with the user of the job.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hvdtrain import hvd
from hvdtrain.job import rendezvous
from hvdtrain.job.world import detect
from hvdtrain.liveness.peers import Peers

JOB = int(os.environ.get("TEST_USER", 12345 + 2 * (os.getpid() % 20000)))
STRANGER = JOB + 1
"""The users, of this test alone: the stranger finds a job by the user of its ports."""


class Evil:
    """Its pickle runs a command, as the user who reads it."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {FOLDER}/executed-$(id -u)",)


def wait_for(name: str) -> None:
    """Wait for a file."""
    while not (FOLDER / name).exists():
        time.sleep(0.02)


def objects() -> None:
    """Exchange objects with the other rank; rank 1 comes late. A stranger sends what is evil."""
    world = detect()
    if os.geteuid() == JOB and world.rank == 1:
        (FOLDER / "late").touch()
        wait_for("attacked")
    hvd.init()
    print("met", len(hvd.allgather_object(world.rank if os.geteuid() == JOB else Evil())))


def join() -> None:
    """Find the store of the job among the ports of its user, and join as rank 1."""
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(find_store("hvdtrain/arrived/0"))}
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update({**place, **ranks, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    objects()


def connections() -> None:
    """Connect to the other rank, which is late."""
    world = detect()
    store = rendezvous.open_store(world, 60)
    if world.rank == 1:
        wait_for("attacked")
    Peers(store, world.rank, world.size, None, ["127.0.0.1"], 60)
    print("met")


def redirect() -> None:
    """Connect as rank 1 with what the store says; then let rank 1 connect here."""
    port = find_store("hvdtrain/arrived/1")
    store = TCPStore("localhost", port, wait_for_workers=False)
    while not (keys := [key for key in store.list_keys() if key.endswith("listening/0")]):
        time.sleep(0.05)
    text = store.get(keys[0]).decode(errors="replace")
    [(host, listening), *_], secret = json.loads(text[text.index("[[") :])
    with socket.create_connection((host, listening), 5) as sock:
        sock.sendall(bytes.fromhex(secret)[:16] + (1).to_bytes(4, "little"))
        sock.settimeout(3)
        try:
            if sock.recv(64).startswith(bytes.fromhex(secret)[16:] or b"none"):
                (FOLDER / f"connected-{JOB}").touch()
        except OSError:
            pass
    with socket.create_server(("127.0.0.1", 0)) as server:
        store.set(keys[0], json.dumps([[server.getsockname()], "00" * 32]))
        (FOLDER / "attacked").touch()
        server.settimeout(20)
        try:
            sock, _ = server.accept()
            sock.sendall(bytes(16))
            (FOLDER / f"redirected-{JOB}").touch()
        except OSError:
            pass


def find_store(key: str) -> int:
    """Return the port of a store with this key that the job's user serves."""
    while True:
        for port in listening_ports(JOB):
            try:
                if rendezvous._connect_once("localhost", port).check([key]):
                    return port
            except (OSError, RuntimeError):
                continue
        time.sleep(0.1)


def listening_ports(user: int) -> list[int]:
    """Return the ports on which a user's processes listen: everyone can see them."""
    files = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for text in files for line in text.splitlines()[1:]]
    listening = (line for line in lines if line[3] == "0A" and line[7] == str(user))
    return sorted({int(line[1].rpartition(":")[2], 16) for line in listening})


if __name__ == "__main__":
    FOLDER = Path(sys.argv[2])
    {f.__name__: f for f in (objects, join, connections, redirect)}[sys.argv[1]]()
