"""One c10d store, whatever the launcher.

With MASTER_ADDR and MASTER_PORT in the environment (torchrun always sets them) the store is there.
Without them rank 0 binds a port that the system picks, and then publishes where it is: over MPI
under mpirun, over the launcher's key-value store under horovodrun. Under srun, which has no such
channel, the port follows from the job's id. The store carries a token of the job, so that two jobs
on one host never take each other's.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
    TCPStore,
    rendezvous,
)

from hvdtrain.errors import BackendUnavailable, LaunchError, WorldError, WorldMismatch
from hvdtrain.world import World, first_slurm_host

_TOKEN = "hvdtrain/token"
_MESSAGE_BYTES = 1024  # what rank 0 publishes: addresses, port, token
_SLURM_PORTS = range(20000, 28000)
_SLURM_TRIES = 8


def open_store(world: World, timeout_s: float) -> Store:
    """Meet all ranks in one store. Collective: every rank calls, and leaves once all have come.

    The store answers for `timeout_s` seconds before it gives up, and has a name space of its own
    for every call, so that a process may open one after another. Raises WorldError naming the
    missing ranks, LaunchError for two processes of one rank.
    """
    deadline = time.monotonic() + timeout_s
    if _has_address(world):
        store = _at_address(world, timeout_s)
    else:
        store = _MEETINGS[world.launcher](world, deadline)
    store.set_timeout(timedelta(seconds=timeout_s))
    return _await_all(store, world, deadline)


def load_mpi(world: World) -> Any:
    """Import `mpi4py.MPI`, which joins MPI, and check that it sees this world. Collective under
    mpirun.

    Raises BackendUnavailable without mpi4py, WorldMismatch where its MPI library is not the
    launcher's.
    """
    try:
        mpi = import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailable(
            f"mpi4py cannot be used under {world.launcher}'s mpirun ({error}); install it with "
            f"pip install 'hvdtrain[mpi]', or set MASTER_ADDR and MASTER_PORT"
        ) from None
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    if (rank, size) != (world.rank, world.size):
        library = mpi.Get_library_version().splitlines()[0].split(",")[0]
        raise WorldMismatch(
            f"{world.launcher} started rank {world.rank} of {world.size}, but mpi4py, on "
            f"{library}, sees rank {rank} of {size}; use the mpirun that belongs to that library"
        )
    return mpi


# The address is given


def _has_address(world: World) -> bool:
    names = ("MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if os.environ.get(name)]
    if len(given) == 1 and world.size > 1:
        missing = next(name for name in names if name not in given)
        raise LaunchError(
            f"{given[0]}={os.environ[given[0]]} is set without {missing}; set or unset both"
        )
    return len(given) == 2 and world.launcher != "none"


def _at_address(world: World, timeout_s: float) -> Store:
    url = f"env://?rank={world.rank}&world_size={world.size}"
    try:
        store, _, _ = next(rendezvous(url, timeout=timedelta(seconds=timeout_s)))
    except (dist.DistError, ValueError, OSError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        what = "serve" if world.rank == 0 else "reach"
        raise WorldError(
            f"{world} could not {what} the store at MASTER_ADDR:MASTER_PORT={where}: "
            f"{_first_line(error)}"
        ) from None
    return store  # type: ignore[no-any-return]


# Rank 0 binds, then publishes


def _alone(world: World, deadline: float) -> Store:
    return _serve(0, deadline)


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
        if world.rank == 0:
            _http(urllib.request.Request(url, data=message, method="PUT"))
            return message
        for _ in _until(deadline):
            answer = _http(urllib.request.Request(url))
            if answer:
                return answer
        raise WorldError(
            f"{world} waited in vain for rank 0 at horovodrun's store {address}:{port}"
        )

    return _publish(world, deadline, put_or_poll)


def _publish(world: World, deadline: float, exchange: Callable[[bytes], bytes]) -> Store:
    """Serve on rank 0 and connect on the others; `exchange` carries rank 0's message to all."""
    if world.rank == 0:
        store = _serve(0, deadline)
        token = uuid.uuid4().hex
        store.set(_TOKEN, token)
        message = json.dumps([_own_addresses(world), store.port, token]).encode()
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
        except dist.DistNetworkError:
            continue  # taken: the others look at the next one too, and tell by the token
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
        first, _, last = reserved.split(",")[0].partition("-")
        return list(range(int(first), int(last or first) + 1))
    digest = int.from_bytes(hashlib.sha256(token.encode()).digest()[:4], "big")
    start = digest % (len(_SLURM_PORTS) - _SLURM_TRIES)
    return list(_SLURM_PORTS[start : start + _SLURM_TRIES])


_MEETINGS: dict[str, Callable[[World, float], Store]] = {
    "none": _alone,
    "openmpi": _over_mpi,
    "mpich": _over_mpi,
    "mvapich": _over_mpi,
    "horovodrun": _over_horovodrun,
    "srun": _over_slurm,
}


# Parts


def _await_all(store: Store, world: World, deadline: float) -> Store:
    """Wait until every rank has signed in, each once, and return this meeting's own name space."""
    me = f"{socket.gethostname()}:{os.getpid()}"
    other = store.compare_set(f"hvdtrain/who/{world.rank}", "", me).decode()
    if other != me:
        raise LaunchError(
            f"two processes say that they are rank {world.rank}: {other} and {me} ({world.source})"
        )
    meeting = store.add(f"hvdtrain/meetings/{world.rank}", 1)
    store = PrefixStore(f"hvdtrain/{meeting}", store)
    store.set(f"joined/{world.rank}", "1")
    keys = [f"joined/{rank}" for rank in range(world.size)]
    try:
        store.wait(keys, timedelta(seconds=max(0.1, deadline - time.monotonic())))
    except dist.DistError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        raise WorldError(
            f"{world} waited in vain for {len(missing)} of {world.size} ranks: {', '.join(missing)}"
        ) from None
    return store


def _serve(port: int, deadline: float) -> TCPStore:
    timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    return TCPStore("localhost", port, is_master=True, timeout=timeout, wait_for_workers=False)


def _connect(world: World, places: list[tuple[str, int]], token: str, deadline: float) -> TCPStore:
    """Try the places in turn until one is a store with this job's token."""
    why = "nothing listens there"
    for _ in _until(deadline, pause_s=0.1):
        for host, port in places:
            try:
                socket.create_connection((host, port), timeout=2).close()
                store = TCPStore(host, port, timeout=timedelta(seconds=5), wait_for_workers=False)
                if store.get(_TOKEN).decode() == token:
                    return store
                why = f"{host}:{port} belongs to another job"
            except (OSError, dist.DistError) as error:
                why = _first_line(error)
    tried = ", ".join(f"{host}:{port}" for host, port in places)
    raise WorldError(f"{world} could not reach rank 0's store at {tried}: {why}")


def _own_addresses(world: World) -> list[str]:
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
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # No packet is sent: this asks the kernel which own address a route outward has.
            # 192.0.2.1 is reserved for documentation (RFC 5737).
            probe.connect(("192.0.2.1", 9))
            addresses.append(probe.getsockname()[0])
        except OSError:
            pass
    # Debian maps a host's own name to 127.0.1.1, which means another host there.
    return [a for a in dict.fromkeys(addresses) if not a.startswith("127.") and a != "::1"]


def _until(deadline: float, pause_s: float = 0.01) -> Iterator[None]:
    """Yield at once, then after every pause, until the deadline has passed."""
    yield
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        yield


def _http(request: urllib.request.Request) -> bytes:
    """The answer's body; empty where the key is not there yet."""
    # The store is the launcher's own: a proxy from the environment must not come between.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        error.close()
        return b""
    except OSError:
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
