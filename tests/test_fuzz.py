"""Random bytes to whatever reads a connection or a checkpoint: an error, or nothing, but no harm.

10 to 50 examples of each in `make test`, 2,000 to 10,000 in `make test-all`.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hvdtrain.errors import CheckpointError
from hvdtrain.job import job_secret
from hvdtrain.job.world import World
from hvdtrain.liveness import peer_sockets
from hvdtrain.liveness.hang_watch import HangWatch
from hvdtrain.liveness.monitor import Monitor, RankProgress
from hvdtrain.liveness.peer_sockets import Connection, InvalidMessage, encode
from hvdtrain.training import checkpoint
from hvdtrain.transports.heartbeat import HERE, Heartbeat, HeartbeatTable, RankStatus
from tests.test_peers import SIZES, frame

pytestmark = pytest.mark.timeout(900)
SLOW = [pytest.mark.exhaustive, pytest.mark.slow]
COUNTS = pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=SLOW)])
ALONE = World(0, 1, 0, 1, 0, 1, "torchrun", "a test")


def fuzz(count: int, check: Callable[..., None], *values: st.SearchStrategy[Any]) -> None:
    found = settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    found(given(*values)(check))()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
BYTES = st.binary(max_size=80)
TEXTS = st.sampled_from(
    [*b'7 null {} [] [1e999] ["\xff"]'.split(), b"[" * 100_000, b"[" + b"9" * 9999 + b"]"]
)


MESSAGES = st.tuples(st.lists(JSON, min_size=1, max_size=4), BYTES)
GARBAGE = st.one_of(
    BYTES,
    st.builds(frame, BYTES | TEXTS, BYTES),
    st.builds(
        lambda sizes, rest: SIZES.pack(*sizes) + rest,
        st.tuples(*[st.integers(0, 2**32 - 1)] * 2),
        BYTES,
    ),
)


@COUNTS
def test_frames(count: int) -> None:
    """Messages before the garbage arrive; garbage is no message, or an error. However cut."""

    def check(messages: list[Any], garbage: bytes, cuts: list[int]) -> None:
        data = b"".join(encode(*message) for message in messages) + garbage
        ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.setblocking(False)
            connection, read = Connection(1, ours), []
            with suppress(InvalidMessage):
                for begin, end in zip([0, *ends], ends, strict=False):
                    if end > begin:
                        theirs.sendall(data[begin:end])
                        assert connection.read()
                        for message in connection.frames():
                            read.append(message)
        wanted = [(json.loads(json.dumps(header)), payload) for header, payload in messages]
        assert repr(read[: len(wanted)]) == repr(wanted)
        assert all(isinstance(header, list) and header for header, _ in read)

    fuzz(count, check, st.lists(MESSAGES, max_size=3), GARBAGE, st.lists(st.integers(0, 999)))


@COUNTS
def test_greetings(count: int) -> None:
    """Nothing but the proof of the secret and an expected rank is let in."""
    nonces, rank1 = (bytes(range(32)), bytes(range(32, 64))), struct.pack("<I", 1)
    proof = job_secret.tag("connection", b"client", b"session", rank1, *nonces)
    right = rank1 + nonces[1] + proof

    def check(greeting: bytes, place: int, flip: int) -> None:
        changed = bytearray(right)
        changed[place % len(right)] ^= flip
        with socket.create_server(("127.0.0.1", 0)) as server:
            for sent in (greeting, bytes(changed), right):
                with socket.create_connection(server.getsockname()) as theirs:
                    ours, _ = server.accept()
                    with ours:
                        theirs.sendall(sent)
                        theirs.shutdown(socket.SHUT_WR)
                        rank = peer_sockets._authenticate(ours, b"session", nonces[0], {1})
                        assert rank == (1 if sent == right else None), sent

    fuzz(count // 3, check, BYTES, st.integers(0, 67), st.integers(0, 255))


@COUNTS
def test_rows_of_a_heartbeat(count: int) -> None:
    """A host's rows have their size, or its connection is dropped; no other host's row changes."""
    table = HeartbeatTable(memoryview(bytearray(HeartbeatTable.size_bytes(3))), [[0], [1, 2]], 0)
    alone = HeartbeatTable(memoryview(bytearray(HeartbeatTable.size_bytes(1))), [[0]], 0)
    leader = Heartbeat(HashStore(), alone, "127.0.0.1", lambda: [RankStatus(1, HERE)], 5)
    leader.close()
    leader._table = table

    def check(rows: bytes) -> None:
        before = table.read(0)[0]
        with pytest.raises(InvalidMessage) if len(rows) != 64 else nullcontext():
            leader._on_rows(1, ["alive"], rows)
        assert table.read(0)[0] == before
        assert table.remote_status().keys() <= {1, 2}

    fuzz(count, check, BYTES | st.binary(min_size=64, max_size=64))


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@COUNTS
def test_messages_of_the_monitor_and_the_hang_watch(count: int) -> None:
    """A rank that waits gets a verdict, whatever another one has sent."""
    kinds = st.sampled_from(["alive", "state", "verdict", "x"])
    header = st.tuples(kinds | JSON, st.lists(JSON, max_size=4)).map(lambda h: [h[0], *h[1]])
    payload = BYTES | JSON.map(lambda value: json.dumps(value).encode())

    def check(sent: list[tuple[list[Any], bytes]]) -> None:
        monitor = Monitor(ALONE, HashStore(), ["host"], RankProgress(3), 5)
        try:
            watch = HangWatch(monitor)
            for header, payload in sent:
                with suppress(InvalidMessage):
                    watch._receive(0, header, payload)
                with suppress(InvalidMessage):
                    monitor._on_message(1, header, payload)
            assert watch.explain(RuntimeError("a test"))
        finally:
            monitor.close()

    fuzz(count // 5, check, st.lists(st.tuples(header, payload), max_size=3))


def parts(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.arange(8.0) + step}, "trainer": {"step": step, "names": ["a"]}}


@COUNTS
def test_a_damaged_checkpoint(tmp_path: Path, count: int) -> None:
    """What resumes is one of the two checkpoints that were saved, with its own values."""
    for step in (1, 2):
        checkpoint.save(tmp_path, step, parts(step), {})
    files = sorted(checkpoint.path_of(tmp_path, 2).iterdir())
    original = {file: file.read_bytes() for file in files}

    def check(file: Path, at: float, flip: int, how: str) -> None:
        data = bytearray(original[file])
        place = int(at * len(data))
        if how == "flip":
            data[place] ^= flip
        elif how == "cut":
            del data[place:]
        else:
            data[place:place] = bytes([flip])
        file.write_bytes(data)
        try:
            path, skipped = checkpoint.newest(tmp_path)
            assert path is not None
            step = checkpoint.step_of(path)
            assert (step == 2) == (not skipped)
            # But for whitespace around it, which the marker may have
            texts = {part.decode("latin-1").strip() for part in (data, original[file])}
            assert step == 1 or len(texts) == 1, (file, how, place)
            for name, value in parts(step).items():
                assert repr(checkpoint.load(path, name)) == repr(value)
            with suppress(CheckpointError):  # without the hashes: some value, or this error
                checkpoint.load_file(file)
        finally:
            file.write_bytes(original[file])

    places = st.floats(0, 1, exclude_max=True)
    hows = st.sampled_from(["flip", "cut", "insert"])
    fuzz(count, check, st.sampled_from(files), places, st.integers(1, 255), hows)
