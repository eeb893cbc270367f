"""The hosts of a group of `shm`, and what the ranks of each send to the other hosts.

`shm` uses it. The ranks with the same local rank on all hosts own the same share of a tensor, and
have a channel. It only moves bytes: they add up what they receive in the order of the hosts, so
that the result does not depend on the channel. A host's sum crosses the network in the tensor's
dtype. Of a share of n bytes each rank sends, with H hosts,

    two hosts, or a small share:   its host's sum to the others                      (H - 1) n
    else, an all_to_all:           to each other host its part of the host's sum     (H - 1) / H n
          an all_to_all:           its part of the result to the others              (H - 1) / H n

Large shares are reduced in pieces: while one is on the network, the next is added up on the host.
All hosts start the same operations in the same order, as Gloo and MPI match them by it.

Every collective begins with a message of one size, in which the hosts compare the calls of their
ranks. A small all_reduce needs no other: the message has room for the host's sum.

    each rank:      write its call to its slot, and copy its small tensor to staging;  local barrier
    local rank 0:   send digest and sum to the other hosts;  publish the result;  local barrier
    each rank:      read the result, or exchange the calls, and raise Mismatch
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain.errors import PeerLost, first_line
from hvdtrain.transports.heartbeat import Heartbeat, HeartbeatTable
from hvdtrain.transports.host_channel import GlooChannel, open_gloo_channel
from hvdtrain.transports.shm_calls import TEXT_BYTES
from hvdtrain.transports.shm_sync import CHECK_S, HostBarrier, LivenessCheck
from hvdtrain.transports.transport import HALVES, Combiner, as_bytes, ends_within

OpenChannel = Callable[[Store, int, int, float], Any]
"""Opens a channel, given a store of its own, rank, number of ranks, and seconds. Collective."""

_MESSAGE_BYTES = 2048  # what the hosts exchange before every collective
SUM_OFFSET = 64  # of the sum in it, and of the result that is published on the host
SUM_BYTES = _MESSAGE_BYTES - SUM_OFFSET
"""The most bytes of a tensor whose sum is exchanged with the calls."""
# Of a piece of a share: an eighth, within these limits. A message of several MB in each direction
# takes up to twice the time on 1 Gbit/s, as TCP's acknowledgements wait behind the data.
_LEAST_BYTES, _MOST_BYTES = 256 << 10, 1 << 20
_WHOLE_BYTES = 64 << 10  # the most bytes of all hosts' sums that each host receives whole
_CAUSE_S = 4.0  # how long after a failure of a channel to look for the lost rank


class Hosts:
    """The hosts of a group, as one rank sees them, and its connections. Making one is collective.

    `ranks` are the group's by host, `everyone` is a Gloo group over all of them, and `memory` is
    where the heartbeat writes. Raises PeerLost if a rank does not join in time.
    """

    def __init__(
        self,
        store: Store,
        ranks: list[list[int]],
        barrier: HostBarrier,
        everyone: GlooChannel,
        memory: memoryview,
        open_channel: OpenChannel,
    ) -> None:
        self.ranks = ranks
        # Local ranks below this number own a share. Each needs a partner on every host, so there
        # are as many as the smallest host has ranks.
        self.num_owners = min(map(len, ranks))
        self.are_equal = len(set(map(len, ranks))) == 1
        self.everyone: Any = everyone
        self.channel: Any = None
        """That of the ranks with this local rank, if they own a share and there are more hosts."""
        self._gloo = everyone  # of what goes by Gloo whatever the channel is
        self._barrier = barrier
        self._own = ranks.index(barrier.ranks)
        self._rank, self._size = barrier.ranks[barrier.local_rank], sum(map(len, ranks))
        self._combine = Combiner().combine
        self._heartbeat: Heartbeat | None = None
        if len(ranks) > 1:
            self._connect(store, memory, open_channel)

    def _connect(self, store: Store, memory: memoryview, open_channel: OpenChannel) -> None:
        """Open the channels, and start the heartbeat."""
        barrier, timeout_s = self._barrier, self._barrier.timeout_s
        if open_channel is not open_gloo_channel:
            prefix = PrefixStore("everyone", store)
            self.everyone = open_channel(prefix, self._rank, self._size, timeout_s)
        table = barrier.heartbeats = HeartbeatTable(memory, self.ranks, self._own)
        if barrier.local_rank >= self.num_owners:
            return
        prefix = PrefixStore(f"across/{barrier.local_rank}", store)
        self.channel = open_channel(prefix, self._own, len(self.ranks), timeout_s)
        if barrier.local_rank == 0:
            address, status = self._gloo.connections.address(), barrier.local_status
            self._heartbeat = Heartbeat(store, table, address, status, timeout_s)

    @property
    def _channels(self) -> list[Any]:
        channels = dict.fromkeys((self._gloo, self.everyone, self.channel))
        return [channel for channel in channels if channel is not None]

    def set_timeout(self, seconds: float) -> None:
        """Set how long an operation of a channel waits by itself. Not collective."""
        for channel in self._channels:
            channel.set_timeout(timedelta(seconds=seconds))

    def close(self, is_last: bool) -> None:
        """Send a last heartbeat, and close its connections. Twice is safe.

        `is_last`: also release what the channels hold, which is collective over MPI.
        """
        if self._heartbeat is not None:
            self._heartbeat.close()
        for channel in self._channels if is_last else ():
            channel.close()

    # Reductions

    def all_reduce(self, signature: str, shares: list[Tensor], op: str, divisor: int) -> None:
        """Reduce the share that this rank owns, over the local ranks' buffers and all hosts.

        `shares` are the buffers' parts; the result is written to all of them.
        """
        num_bytes = min(max(shares[0].nbytes // 8, _LEAST_BYTES), _MOST_BYTES)
        count = num_bytes // shares[0].element_size()
        pieces = zip(*(torch.split(share, count) for share in shares), strict=True)
        self.run(signature, (self._all_reduce(piece, op, divisor) for piece in pieces))

    def _all_reduce(self, buffers: Sequence[Tensor], op: str, divisor: int) -> Iterator[Any]:
        """Reduce one piece. Yields each operation of the channel, and goes on when it is done."""
        num_hosts, total = len(self.ranks), buffers[0]
        count = total.numel()
        before, after = self._divisors(total.dtype, divisor)
        if len(buffers) > 1 or before > 1:
            total = torch.empty_like(total)
            self._combine(buffers, op, before, [total])
        if num_hosts == 2 or num_hosts * total.nbytes <= _WHOLE_BYTES:
            work, totals = self._send_to_others(total, [count] * num_hosts)
            yield work
            self._combine(totals, op, after, list(buffers))
            return
        bounds = [count * k // num_hosts for k in range(num_hosts + 1)]
        counts = [end - begin for begin, end in pairwise(bounds)]
        part = torch.empty(counts[self._own], dtype=total.dtype, device="cpu")
        yield from self._reduce_scatter(total, counts, op, after, part)
        work, parts = self._send_to_others(part, counts)
        yield work
        for buffer in buffers:
            torch.cat(parts, out=buffer)

    def _divisors(self, dtype: torch.dtype, divisor: int) -> tuple[float, float]:
        """Return by what to divide a host's sum, and the sum over the hosts.

        A host's sum of halves is divided before it is rounded to one, for it could overflow, and by
        no more than its ranks, for a small one would vanish.
        """
        before = max(map(len, self.ranks)) if divisor > 1 and dtype in HALVES else 1
        return before, divisor / before

    def reduce_scatter(
        self, rows: list[Tensor], op: str, divisor: int, out: Tensor
    ) -> Iterator[Any]:
        """Reduce the part of this rank into `out`: a piece for `run`.

        `rows` are the local ranks' buffers with a row for each rank of the group.
        """
        counts, local_rank = [out.numel()] * len(self.ranks), self._barrier.local_rank
        before, after = self._divisors(out.dtype, divisor)
        totals = torch.empty(sum(counts), dtype=out.dtype, device="cpu")
        for ranks, total in zip(self.ranks, torch.split(totals, counts), strict=True):
            self._combine([row[ranks[local_rank]] for row in rows], op, before, [total])
        yield from self._reduce_scatter(totals, counts, op, after, out)

    def _reduce_scatter(
        self, total: Tensor, counts: list[int], op: str, divisor: float, out: Tensor
    ) -> Iterator[Any]:
        """Send each host its elements of `total`, and combine those of this host into `out`."""
        work, totals = self._exchange(total, counts, [out.numel()] * len(counts))
        yield work
        self._combine(totals, op, divisor, [out])

    def _send_to_others(self, own: Tensor, counts: list[int]) -> tuple[Any, list[Tensor]]:
        """Send `own` to every other host, which send as many elements as `counts` says.

        Return the operation, and the tensors of all hosts in their order.
        """
        sent, received = [own.numel()] * len(counts), counts.copy()
        sent[self._own] = received[self._own] = 0
        copies = own if len(counts) == 2 else own.repeat(len(counts) - 1)
        work, tensors = self._exchange(copies, sent, received)
        tensors[self._own] = own
        return work, tensors

    def _exchange(
        self, t: Tensor, sent: list[int], received: list[int]
    ) -> tuple[Any, list[Tensor]]:
        """Send so many elements to each host, and receive as many. Return operation and tensors."""
        out = torch.empty(sum(received), dtype=t.dtype, device="cpu")
        into, of = ([n * t.element_size() for n in counts] for counts in (received, sent))
        work = self.channel.all_to_all(as_bytes(out), as_bytes(t), into, of)
        return work, list(torch.split(out, received))

    def run(self, signature: str, pieces: Iterable[Iterator[Any]]) -> None:
        """Run operations in pieces, each of which yields what it waits for. Raises PeerLost.

        A piece begins before the one before it goes on: so the network and this host are both
        busy. The last two rounds begin none.
        """
        running: list[tuple[Iterator[Any], Any]] = []
        for piece in chain(pieces, [iter(())] * 2):
            before, running = running, []
            for steps, work in [(piece, None), *before]:
                if work is not None:
                    self.wait_for(signature, work)
                if (work := next(steps, None)) is not None:
                    running.append((steps, work))

    # The comparison of calls

    def compare(
        self,
        signature: str,
        calls: dict[int, bytes],
        shared: bool,
        area: Tensor,
        staged: list[Tensor],
        op: str = "",
        divisor: int = 1,
    ) -> tuple[dict[int, bytes], bool]:
        """Compare the calls of this host's ranks, and `shared`, with the other hosts'.

        Return the calls of all ranks, and whether `shared` is true on all hosts. `staged` are the
        local ranks' tensors of a small all_reduce, or nothing: its result is left in `area`, which
        belongs to local rank 0, at SUM_OFFSET. A host sends a digest of its ranks' different calls.
        Only if there are several, so that an error is raised, the ranks also exchange the texts.
        """
        different = sorted(set(calls.values()))
        if self._barrier.local_rank == 0:
            # Of one size whatever the hosts call, as Gloo ends the process if sizes differ.
            row = bytearray(_MESSAGE_BYTES)
            row[:33] = bytes([shared]) + hashlib.sha256(repr(different).encode()).digest()
            own = torch.frombuffer(row, dtype=torch.uint8)
            before, after = self._divisors(staged[0].dtype, divisor) if staged else (1, 1)
            if staged and len(different) == 1:
                self._combine(staged, op, before, [_sum_in(own, staged[0])])
            work, rows = self._send_to_others(own, [len(row)] * len(self.ranks))
            self.wait_for(signature, work)
            heads = [bytes(row[:33].numpy()) for row in rows]
            is_match = len({head[1:] for head in heads}) == len(different) == 1
            if staged and is_match:
                sums = [_sum_in(row, staged[0]) for row in rows]
                self._combine(sums, op, after, [_sum_in(area, staged[0])])
            area.numpy()[:2] = is_match, all(head[0] for head in heads)
        self._barrier.wait(signature)
        is_match, shared = map(bool, area[:2].tolist())
        if is_match:
            return dict.fromkeys(chain(*self.ranks), different[0]), shared
        text = bytearray(calls[self._rank].ljust(TEXT_BYTES))
        texts = torch.empty(self._size, TEXT_BYTES, dtype=torch.uint8, device="cpu")
        own = torch.frombuffer(text, dtype=torch.uint8)
        self.wait_for(signature, self.everyone.all_gather(texts.view(-1), own))
        return {r: bytes(row).rstrip() for r, row in enumerate(texts.numpy())}, shared

    # Waiting for a channel

    def wait_for(self, signature: str, work: Any) -> None:
        """Wait for an operation of Gloo or a channel, with liveness checks. Raises PeerLost.

        Alone they report a lost rank late, and without its number.
        """
        liveness = LivenessCheck(self._barrier, signature)
        try:
            while not ends_within(work, CHECK_S):
                liveness.check()
        except RuntimeError as error:  # or PeerLost
            for channel in self._channels:  # what is pending fails here and on the peers
                channel.shut_down()
            if isinstance(error, PeerLost):
                raise
            self.await_cause(liveness)
            why = f"was lost between hosts: {first_line(error)}"
            raise self._barrier.give_up(signature, [], why) from error

    @staticmethod
    def await_cause(liveness: LivenessCheck) -> None:
        """Raise PeerLost as soon as the exit of a rank is known; return after `_CAUSE_S`.

        An exit becomes known a moment after the rank's connections and memory have disappeared.
        """
        deadline = time.monotonic() + _CAUSE_S
        while time.monotonic() < deadline:
            liveness.check()
            time.sleep(CHECK_S / 4)


def _sum_in(message: Tensor, t: Tensor) -> Tensor:
    """Return the place of the sum of tensors like `t` in a message, or where it is published."""
    return message[SUM_OFFSET:][: t.nbytes].view(t.dtype)
