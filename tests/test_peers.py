"""Connections between ranks: strangers, late and restarted ranks, and invalid messages."""

from __future__ import annotations

import json
import queue
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

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


def frame(text: bytes, payload: bytes = b"") -> bytes:
    return SIZES.pack(len(text), len(payload)) + text + payload


# What strangers send, who do not know the secret
ATTACKS = {
    "a message": [frame(b"7")],
    "huge": [SIZES.pack(1 << 31, 1 << 31) + b"x" * 100_000],
    "silent": [b""] * 300,
    "slow": [b"x"] * 20,
}


@pytest.mark.parametrize("messages", ATTACKS.values(), ids=ATTACKS)
def test_strangers_keep_no_rank_from_connecting(messages: list[bytes]) -> None:
    store = HashStore()

    def meet(rank: int) -> Any:
        if rank:
            store.wait(["attacked"])
        # A stranger may hold it for 10 s.
        with closing(Peers(store, rank, 3, rank, ["127.0.0.1"], 100)) as peers:
            return peers.members

    with ThreadPoolExecutor(1) as pool, ExitStack() as strangers:
        met = pool.submit(together, meet, [0, 1, 2])
        store.wait(["listening/0"])
        ((place,), _) = json.loads(store.get("listening/0"))
        for message in messages:
            stranger = strangers.enter_context(socket.create_connection(tuple(place), 5))
            with suppress(OSError):  # closed meanwhile
                stranger.sendall(message)
        store.set("attacked", "1")
        assert met.result() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("reflects", [False, True])
def test_a_server_that_does_not_know_the_secret_is_left(reflects: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        client = pool.submit(peer_sockets.connect, server.getsockname(), b"session", 1, 60.0)
        stranger, _ = server.accept()
        with stranger:
            stranger.sendall(bytes(32))
            greeting = stranger.recv(68, socket.MSG_WAITALL)
            stranger.sendall(greeting[-32:] if reflects else bytes(32))
            with pytest.raises(ConnectionRefusedError):
                client.result()


def test_one_host_listens_on_its_loopback_and_names_ranks_that_do_not_connect() -> None:
    store = HashStore()
    with pytest.raises(PeerLost, match=r"waiting for ranks 1, 2 \(2 of 3 ranks missing\)"):
        Peers(store, 0, 3, {}, listen_addresses(world(0)), 0.1)
    assert store.get("listening/0").startswith(b'[[["127.0.0.1", ')


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
    """Rank 1 sends it to rank 0, and ends. Rank 2 goes on."""
    store = HashStore()
    zero, one, two = together(lambda r: Peers(store, r, 3, {}, ["127.0.0.1"], 20), range(3))
    events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    zero.start(
        lambda rank, header, _: events.put((rank, header)),
        lambda rank, reason: events.put((rank, reason)),
    )
    with closing(zero), closing(one), closing(two):
        sock = one._peers[0].sock
        sock.setblocking(True)
        with suppress(OSError):  # dropped meanwhile
            sock.sendall(message)
            sock.shutdown(socket.SHUT_WR)
        rank, reason = events.get(timeout=60)
        assert rank == 1
        assert why in reason
        two.send(0, ["after", "it"])
        assert events.get(timeout=60) == (2, ["after", "it"])


def test_a_rank_that_is_silent_for_too_long_is_lost() -> None:
    store = HashStore()
    zero, one = together(lambda r: connect_control(world(r, 2), store, {}, 20, 1.5)[0], [0, 1])
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
    zero.start(lambda *_: None, lambda _, why: reasons.put(why))
    with closing(zero), closing(one):
        assert reasons.get(timeout=60) == "has not answered for 1.5 s: it is stopped or hangs"


# A start that fails on some ranks only


@pytest.mark.parametrize("late", [0, 2])
def test_a_start_after_one_that_failed_on_some(late: int) -> None:
    store, timeout_s = HashStore(), 0.0

    def meet(rank: int) -> str:
        control, prefixed = connect_control(world(rank), store, {}, timeout_s)
        with closing(control):
            prefixed.set(f"seen/{rank}", "1")
            prefixed.wait([f"seen/{r}" for r in range(3)])  # all have the same prefix
        return "met"

    for _ in range(2):
        timeout_s = 0.5
        for error in together(meet, [2 - late, 1]):
            assert isinstance(error, WorldError), error
        timeout_s = 20
        assert together(meet, range(3)) == ["met"] * 3


@pytest.mark.parametrize("late", [0, 2])
def test_a_group_made_again_in_the_same_store(late: int) -> None:
    """As by `init_process_group` after `destroy_process_group`; one rank is late each time."""
    store = HashStore()

    def meet(rank: int) -> list[list[int]]:
        time.sleep(0.2 * (rank == late))
        prefixed = open_prefix(store, rank, 3, 20)
        return exchange(prefixed, "name", rank, 3, [number, rank], 20)

    for number in range(3):
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
    for rank, process, said in (
        (1, "one", "waiting for rank"),
        (1, "one", "waiting for rank"),
        (2, "another", "waiting for rank"),
        (1, "another", "two processes claim to be rank 1: "),
    ):
        monkeypatch.setattr(store_exchange, "_PROCESS_ID", process)
        with pytest.raises((WorldError, LaunchError), match=said):
            await_ranks(store, world(rank), 0.1, time.monotonic() + 0.1)


def test_a_rank_that_does_not_come_is_named() -> None:
    """The last row: rank 1 comes after rank 0 has given up, and does not wait."""
    store = HashStore()
    for rank, own_store, timeout_s, missing in (
        (1, HashStore(), 0.1, "0, 2"),
        (0, store, 0.1, "1, 2"),
        (1, store, 100, "1, 2"),
    ):
        said = rf"timed out after 0.1 s waiting for ranks {missing} \(2 of 3"
        with pytest.raises(PeerLost, match=said):
            exchange(own_store, "name", rank, 3, [rank], timeout_s)


def test_values_that_are_too_long_for_one() -> None:
    """torch's store drops the connection of one of 8 MiB."""
    server = TCPStore("127.0.0.1", 0, is_master=True)
    text = "x" * (5 << 20)

    def call(rank: int) -> list[str]:
        store = server if rank == 0 else TCPStore("127.0.0.1", server.port)
        return exchange(store, "name", rank, 2, text, 60)

    assert together(call, range(2)) == [[text] * 2] * 2
