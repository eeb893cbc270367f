"""Connections between ranks: strangers, late and restarted ranks, and invalid messages."""

from __future__ import annotations

import queue
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from hvdtrain.errors import LaunchError, PeerLost, WorldError
from hvdtrain.hvd.engine.engine import connect_control
from hvdtrain.job import store_exchange
from hvdtrain.job.addresses import listen_addresses
from hvdtrain.job.store_exchange import await_ranks, exchange, open_prefix
from hvdtrain.job.world import World
from hvdtrain.liveness import peer_sockets
from hvdtrain.liveness.peers import ENDED, Peers

SIZES = struct.Struct("<II")


def world(rank: int, size: int = 3) -> World:
    return World(rank, size, rank, size, 0, 1, "torchrun", "a test")


def together(call: Callable[[int], Any], ranks: Sequence[int]) -> list[Any]:
    """Make a call for every rank at once; return results, or errors of lost ranks, in order."""

    def caught(rank: int) -> Any:
        try:
            return call(rank)
        except (WorldError, PeerLost) as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(caught, ranks))


def port_of(store: Store) -> int:
    """The port that rank 0 has published."""
    found = re.search(r", (\d{4,5})\b", store.get("listening/0").decode())
    assert found is not None
    return int(found[1])


def frame(text: bytes) -> bytes:
    return SIZES.pack(len(text), 0) + text


ATTACKS = {
    "a scalar": [frame(b"7")],
    "null": [frame(b"null")],
    "nested": [frame(b"[" * 100_000)],
    "huge": [SIZES.pack(1 << 31, 1 << 31) + b"x" * 100_000],
    "an object": [frame(b'{"a": 1}')],
    "silent": [b""] * 300,
    "slow": [b"x"] * 20,
    "http": [b"GET / HTTP/1.1\r\n\r\n"],
}


@contextmanager
def attacked(port: int, messages: Sequence[bytes]) -> Iterator[list[socket.socket]]:
    """Connections of strangers, who stay."""
    with ExitStack() as stack:
        sockets = []
        for message in messages:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            with suppress(OSError):  # closed meanwhile
                sock.sendall(message)
            sockets.append(sock)
        yield sockets


@pytest.mark.parametrize("attack", ATTACKS)
def test_strangers_keep_no_rank_from_connecting(attack: str) -> None:
    store = HashStore()

    def meet(rank: int) -> Any:
        if rank:
            store.wait(["attacked"])
        peers = Peers(
            store, rank, 3, {"rank": rank}, ["127.0.0.1"], 100
        )  # each may hold it for 10 s
        try:
            return [member["rank"] for member in peers.members]
        finally:
            peers.close()

    with ThreadPoolExecutor(1) as pool:
        met = pool.submit(together, meet, [0, 1, 2])
        store.wait(["listening/0"])
        with attacked(port_of(store), ATTACKS[attack]):
            store.set("attacked", "1")
            assert met.result() == [[0, 1, 2]] * 3


def test_a_server_that_does_not_know_the_secret_is_left() -> None:
    for reflects in (False, True):
        with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
            place = server.getsockname()[:2]
            client = pool.submit(peer_sockets.connect, place, b"session", 1, 60.0)
            stranger, _ = server.accept()
            with stranger:
                stranger.sendall(bytes(32))
                greeting = stranger.recv(68, socket.MSG_WAITALL)
                stranger.sendall(greeting[-32:] if reflects else bytes(32))
                with pytest.raises(ConnectionRefusedError):
                    client.result()


def test_the_port_of_one_host_is_on_its_loopback() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        addresses = listen_addresses(world(0))
        alone = pool.submit(together, lambda r: Peers(store, r, 3, {}, addresses, 1), [0])
        store.wait(["listening/0"])
        port = port_of(store)
        with open("/proc/net/tcp") as v4, open("/proc/net/tcp6") as v6:
            local = [line.split()[1] for line in (*v4, *v6) if line.split()[3] == "0A"]
        (address,) = [a.partition(":")[0] for a in local if a.endswith(f":{port:04X}")]
        assert address == "0100007F"
        (error,) = alone.result()
    assert "waiting for ranks 1, 2 (2 of 3 ranks missing)" in str(error)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (frame(b"7"), "a JSON int"),
        (frame(b"[" * 100_000), "too deeply nested"),
        (frame(b'{"a"'), "Expecting"),
        (SIZES.pack(1 << 31, 0), "2147483648 bytes"),
        (b"", ENDED),
    ],
)
def test_a_rank_that_sends_no_message_is_lost(message: bytes, why: str) -> None:
    """It alone: the other goes on."""
    store = HashStore()
    zero, one, two = together(lambda r: connect_control(world(r), store, {}, 20)[0], [0, 1, 2])
    lost: list[tuple[int, str]] = []
    gone, heard = threading.Event(), threading.Event()

    def on_lost(rank: int, reason: str) -> None:
        lost.append((rank, reason))
        gone.set()

    zero.start(lambda *_: heard.set(), on_lost)
    try:
        sock = one._peers[0].sock
        sock.sendall(message)
        if not message:
            sock.shutdown(socket.SHUT_WR)
        assert gone.wait(60)
        ((rank, reason),) = lost
        assert rank == 1
        assert why in reason
        two.send(0, ["op"])
        assert heard.wait(60)
    finally:
        for control in (zero, one, two):
            control.close()


def test_a_rank_that_is_silent_for_too_long_is_lost() -> None:
    store = HashStore()
    zero, one = together(lambda r: connect_control(world(r, 2), store, {}, 20, 1.5)[0], [0, 1])
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    zero.start(lambda *_: None, lambda _, why: reasons.put(why))
    try:
        assert reasons.get(timeout=60) == "has not answered for 1.5 s: it is stopped or hangs"
    finally:
        zero.close()
        one.close()


# A start that fails on some ranks only


def met(connect: Callable[[int], tuple[Any, Store]], ranks: Sequence[int]) -> list[Any]:
    """Connect these ranks at once; check that all have the same prefix."""

    def meet(rank: int) -> str:
        control, prefixed = connect(rank)
        prefixed.set(f"seen/{rank}", "1")
        prefixed.wait([f"seen/{r}" for r in range(3)])
        if control is not None:
            control.close()
        return "met"

    return together(meet, ranks)


@pytest.mark.parametrize("of", ["controls", "stores"])
@pytest.mark.parametrize("late", [0, 2])
def test_a_start_after_one_that_failed_on_some(of: str, late: int) -> None:
    store, timeout_s = HashStore(), 0.0

    def connect(rank: int) -> tuple[Any, Store]:
        if of == "controls":
            return connect_control(world(rank), store, {}, timeout_s)
        return None, await_ranks(store, world(rank), timeout_s)

    others = [rank for rank in range(3) if rank != late]
    for _ in range(2):
        timeout_s = 0.5
        for error in met(connect, others):
            assert isinstance(error, WorldError), error
        timeout_s = 20
        assert met(connect, [0, 1, 2]) == ["met"] * 3


class Counted(HashStore):
    """Counts the values that are set."""

    def __init__(self) -> None:
        super().__init__()
        self.num_set = threading.Semaphore(0)

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        self.num_set.release()


@pytest.mark.parametrize("late", [0, 2])
def test_a_group_made_again_in_the_same_store(late: int) -> None:
    """As by `init_process_group` after `destroy_process_group`; one rank is late each time."""

    store = Counted()

    def meet(rank: int) -> list[list[int]]:
        for _ in range(2 * (rank == late)):  # the others have come
            assert store.num_set.acquire(timeout=60)
        prefixed = open_prefix(store, rank, 3, 20)
        return exchange(prefixed, "name", rank, 3, [number, rank], 20)

    for number in range(3):
        store.num_set = threading.Semaphore(0)
        assert together(meet, range(3)) == [[[number, rank] for rank in range(3)]] * 3


# Values through the store


class LastMoment(HashStore):
    """Another rank says its part just after a wait for it has timed out."""

    def wait(self, *args: Any) -> None:
        try:
            super().wait(*args)
        finally:
            for rank in range(2):
                self.set(f"name/{rank}", f"[{rank}]")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_comes_at_the_last_moment_has_come(rank: int) -> None:
    assert exchange(LastMoment(), "name", rank, 2, [rank], 0.1) == [[0], [1]]


def test_two_processes_of_one_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    for _ in range(2):
        store_exchange._check_unique(store, world(1))
    monkeypatch.setattr(store_exchange, "_PROCESS_ID", "another")
    store_exchange._check_unique(store, world(2))
    with pytest.raises(LaunchError, match="two processes say that they are rank 1"):
        store_exchange._check_unique(store, world(1))


@pytest.mark.parametrize(("rank", "missing"), [(0, "1, 2"), (1, "0, 2")])
def test_a_rank_that_does_not_come_is_named(rank: int, missing: str) -> None:
    text = rf"timed out after 0.1 s waiting for ranks {missing} \(2 of 3"
    with pytest.raises(PeerLost, match=text):
        exchange(HashStore(), "name", rank, 3, [rank], 0.1)


def test_a_rank_that_comes_after_rank_0_has_given_up_does_not_wait() -> None:
    store = HashStore()
    with pytest.raises(PeerLost):
        exchange(store, "name", 0, 2, [0], 0.1)
    with pytest.raises(PeerLost, match=r"timed out after 0.1 s waiting for rank 1 \(1 of 2"):
        exchange(store, "name", 1, 2, [1], 100)


def test_values_that_are_too_long_for_one() -> None:
    """torch's store drops the connection of one of 8 MiB."""
    server = TCPStore("127.0.0.1", 0, is_master=True)
    text = "x" * (5 << 20)

    def call(rank: int) -> list[str]:
        store = server if rank == 0 else TCPStore("127.0.0.1", server.port)
        return exchange(store, "name", rank, 2, text, 60)

    assert together(call, range(2)) == [[text] * 2] * 2
