"""Messages between the ranks of the backend `ps`, and its collectives.

Every rank is connected to every other one (`hvdtrain.liveness.peers`), and no process group is
used: when a worker ends, the others go on. A collective goes through rank 0:

    rank r    ["collect", number], value            ->  rank 0
    rank 0    ["collected", number], all values     ->  every rank, once all living ranks have sent

One thread per process receives all messages. It holds `changed`, a condition, while it handles one;
the thread that trains waits on it.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from hvdtrain.errors import PeerLost
from hvdtrain.job.world import World
from hvdtrain.liveness.failure import print_stderr
from hvdtrain.liveness.peers import Peers
from hvdtrain.system.trees import map_tree

T = TypeVar("T")
Handler = Callable[[int, list[Any], bytes], None]

_PART_BYTES = 64 << 20  # `Peers` refuses a message of over 256 MiB


class Messages:
    """This rank's connections to all other ranks. The constructor is collective.

    Raises PeerLost naming the ranks that did not arrive, DistError if the store is lost.
    """

    def __init__(self, world: World, store: Store, addresses: list[str], timeout_s: float) -> None:
        self.rank = world.rank
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.live = set(range(world.size))
        """The ranks that have not ended."""
        self.lost: dict[int, str] = {}
        """Why each lost rank counts as lost."""
        self.handlers: dict[str, Handler] = {
            "collect": self._on_collect,
            "collected": self._on_collected,
            "bye": self._on_bye,
            "failed": lambda rank, header, payload: self._fail(header[1]),
        }
        """By the first item of a header: `handler(sender, header, payload)`, called in the thread
        of these messages while it holds `changed`.
        """
        self.inbox: dict[tuple[Any, ...], bytes] = {}
        """The payloads without a handler, by the items of the header and the sender."""
        self.tolerates_loss: Callable[[int], bool] = lambda rank: False
        """Whether the job goes on without a rank that ends."""
        self.on_lost: Callable[[int], None] = lambda rank: None
        self._failure: str | None = None
        self._finished: set[int] = set()  # ranks that have said goodbye
        self._parts: dict[int, bytearray] = {}
        self._send_lock = threading.RLock()
        self._number = 0
        self._collecting: dict[int, dict[int, bytes]] = {}  # on rank 0, by number and rank
        self._collected: dict[int, list[bytes]] = {}
        self._peers = Peers(
            store,
            world.rank,
            world.size,
            None,
            addresses,
            timeout_s,
            is_mesh=True,
            limit_s=timeout_s,
            thread_name="hvdtrain-ps",
        )
        threads = torch.get_num_threads()
        self._peers.start(
            self._receive,
            self._lose,
            # Each thread has a limit of its own, which is by default the number of cores.
            on_start=lambda: torch.set_num_threads(threads),
            on_failure=self._fail_by,
        )

    def send(self, rank: int, header: list[Any], payload: bytes = b"") -> None:
        """Send a message, in any thread. A lost rank is skipped."""
        with self._send_lock:  # so that the parts of two messages do not mix
            for begin in range(0, len(payload) - _PART_BYTES, _PART_BYTES):
                self._peers.send(rank, ["part"], payload[begin : begin + _PART_BYTES])
            last = (len(payload) - 1) // _PART_BYTES * _PART_BYTES if payload else 0
            self._peers.send(rank, header, payload[last:])

    def wait(self, ready: Callable[[], T | None], missing: Callable[[], str]) -> T:
        """Return what `ready` returns once that is not None. It is called while `changed` is held.

        Raises PeerLost if the job has failed, and after the timeout, with what is `missing`.
        """
        deadline = time.monotonic() + self.timeout_s
        with self.changed:
            while True:
                if self._failure is not None:
                    raise PeerLost(self._failure)
                if (found := ready()) is not None:
                    return found
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                self.changed.wait(left_s)
            why = f"rank {self.rank} timed out after {self.timeout_s:g} s waiting for {missing()}"
        for rank in sorted(self.live - {self.rank}):
            self.send(rank, ["failed", why])
        raise PeerLost(why)

    def collect(self, value: bytes) -> list[bytes]:
        """Return the values of all living ranks, in rank order. Collective."""
        number = self._number
        self._number += 1
        self.send(0, ["collect", number], value)

        def missing() -> str:
            if self.rank > 0:
                return "rank 0's answer in a collective"
            late = self.live - self._collecting.get(number, {}).keys()
            return f"rank {', '.join(map(str, sorted(late)))} in a collective"

        return self.wait(lambda: self._collected.pop(number, None), missing)

    def close(self, failed: bool) -> None:
        """Close all connections. Collective unless `failed`; twice is safe."""
        try:
            if not failed and self._failure is None:
                self.collect(b"")
                self._shut_down_gracefully()
        finally:
            self._peers.close()

    def _shut_down_gracefully(self) -> None:
        """Send "bye" to the other ranks, and wait for theirs, before the sockets are closed.

        Closing a socket with unread data makes the kernel drop what was sent before.
        """
        for rank in sorted(self.live - {self.rank}):
            self.send(rank, ["bye"])
        with suppress(PeerLost):
            self.wait(
                lambda: True if self.live <= {*self._finished, self.rank} else None,
                lambda: "the shutdown of the other ranks",
            )

    # In the thread of the messages

    def _receive(self, rank: int, header: list[Any], payload: bytes) -> None:
        if header[0] == "part":
            self._parts.setdefault(rank, bytearray()).extend(payload)
            return
        parts = self._parts.pop(rank, None)
        with self.changed:
            if parts is not None:
                payload = bytes(parts + payload)
            if (handler := self.handlers.get(header[0])) is not None:
                handler(rank, header, payload)
            else:
                key = (*header, rank)
                self.inbox[key] = payload
            self.changed.notify_all()

    def _lose(self, rank: int, why: str) -> None:
        with self.changed:
            if rank in self._finished:
                return
            self.live.discard(rank)
            self.lost[rank] = why
            if not self.tolerates_loss(rank):
                self._fail(f"rank {rank} {why}")
            elif self.rank == 0:
                left = ", ".join(map(str, sorted(self.live)))
                print_stderr(f"WARNING: rank {rank} {why}; the others go on without it: {left}")
            self.on_lost(rank)
            self._finish_collectives()
            self.changed.notify_all()

    def _fail(self, why: str) -> None:
        with self.changed:
            self._failure = self._failure or why
            self.changed.notify_all()

    def _fail_by(self, error: BaseException) -> None:
        self._fail(f"the messages of rank {self.rank} ended: {type(error).__name__}: {error}")

    def _on_bye(self, rank: int, header: list[Any], payload: bytes) -> None:
        self._finished.add(rank)

    def _on_collect(self, rank: int, header: list[Any], payload: bytes) -> None:
        self._collecting.setdefault(header[1], {})[rank] = payload
        self._finish_collectives()

    def _finish_collectives(self) -> None:
        """On rank 0: answer the collectives for which all living ranks have sent their values."""
        for number, values in list(self._collecting.items()):
            if self.live <= values.keys():
                del self._collecting[number]
                ordered = [values[rank] for rank in sorted(self.live)]
                header = ["collected", number, [len(value) for value in ordered]]
                for rank in sorted(self.live):
                    self.send(rank, header, b"".join(ordered))

    def _on_collected(self, rank: int, header: list[Any], payload: bytes) -> None:
        values, begin = [], 0
        for size in header[2]:
            values.append(payload[begin : begin + size])
            begin += size
        self._collected[header[1]] = values


def encode(tree: Any) -> bytes:
    """Return a nested structure with tensors, as bytes."""
    return pickle.dumps(map_tree(_encode_tensor, Tensor, tree, keep_dict_types=True), protocol=5)


def decode(data: bytes) -> Any:
    """Return what `encode` was given, with the tensors on the CPU. A pickle: the
    connection of its sender has proved the job's secret."""
    return map_tree(_decode_tensor, _Encoded, pickle.loads(data), keep_dict_types=True)


class _Encoded(tuple[Any, ...]):
    """A tensor: its layout, dtype and shape, and the bytes of its parts as NumPy arrays, whose
    pickle is a copy of memory (that of a tensor is a file).
    """

    __slots__ = ()


def _encode_tensor(t: Tensor) -> _Encoded:
    t = t.detach().cpu()
    if t.is_sparse:
        t = t.coalesce()
        parts = tuple(_encode_tensor(part) for part in (t.indices(), t.values()))
        return _Encoded(("sparse", t.dtype, tuple(t.shape), parts))
    data = t.contiguous().reshape(-1).view(torch.uint8).numpy()
    return _Encoded(("dense", t.dtype, tuple(t.shape), data))


def _decode_tensor(encoded: _Encoded) -> Tensor:
    layout, dtype, shape, data = encoded
    if layout == "sparse":
        indices, values = map(_decode_tensor, data)
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)
    return torch.from_numpy(data).view(dtype).reshape(shape)
