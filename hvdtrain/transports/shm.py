"""The transport `shm`: collectives in the shared memory of a host, with a channel between hosts.

`hvdtrain.transports.open_shm` makes process groups of it whose channels are Gloo's, `open_mpi`
those of the transport `mpi4py`, with MPI's. An all-reduce divides the elements among
the ranks of a host. Between two barriers each rank adds up its share over the buffers of all local
ranks, in rank order, and writes the sum to all of them, a cache-sized block at a time. So it reads
and writes as many bytes as its tensor has, which is the lower bound for tensors that are in shared
memory already (see `shm_buffers`); others are copied through a staging area. With several hosts
each share is also reduced across hosts before it is written, so that every rank does its part of
the traffic: see `hosts`. The other operations follow the same scheme: what a host's ranks have in
common crosses the network once, in equal shares by all of them, and is published in the host's
shared memory.

Every operation begins with a comparison of call signatures:

    each rank:      write the call, and the buffer of its tensor, to its slot;  local barrier
    several hosts:  local rank 0 exchanges digests of the calls;  local barrier
    each rank:      read all calls; raise Mismatch if they mismatch

A small tensor is copied into the staging area before the barrier, so an all_reduce, all_gather or
broadcast of it on one host needs no other wait. In an all_reduce the last rank to arrive adds up
all elements, and the others read the sum, which is fastest with more ranks than cores; of two ranks
each adds up for itself.

    operation                                  one host        several hosts
    all_reduce, reduce, broadcast, barrier     shared memory   shared memory, channels between
    reduce_scatter, all_gather                 shared memory   the same, if all hosts have as many
                                                               ranks; else all_reduce, a channel
    all_to_all, gather, scatter                shared memory   a channel
    send, recv, sparse tensors                 Gloo            Gloo
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import memmove
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import Store  # type: ignore[attr-defined]

from hvdtrain.transports.heartbeat import HeartbeatTable
from hvdtrain.transports.host_channel import GlooChannel, open_gloo_channel
from hvdtrain.transports.hosts import SUM_BYTES, SUM_OFFSET, Hosts, OpenChannel
from hvdtrain.transports.page import LAST, MATCHED
from hvdtrain.transports.shm_buffers import SharedBuffers
from hvdtrain.transports.shm_calls import Call, CallSlots, SmallCall, small_call
from hvdtrain.transports.shm_sync import (
    HEADER_BYTES,
    STAGING_BYTES,
    HostBarrier,
    LivenessCheck,
    group_by_host,
)
from hvdtrain.transports.transport import (
    SUM,
    SUMMED_WITHOUT_CAST,
    Combiner,
    Mismatch,
    as_bytes,
    flatten,
    mismatch,
    share_bounds,
)

_ADDED_BYTES = 2 << 20  # the most bytes of all ranks' small tensors, which one rank adds up
_SMALL_BYTES = 64 << 10  # of one rank's, however many there are
_MOST_VIEWS = 1000  # the most entries of the cache of views of the staging areas


class Shm:
    """One rank of a group in shared memory: collectives on CPU tensors, one at a time, in one order
    on all ranks. Making one is collective.

    Operations are collective and block; tensors are contiguous and one-dimensional. `signature` is
    the call in words: if the ranks' signatures differ, all ranks raise Mismatch. They raise
    PeerLost if a rank has exited, or does not arrive within the group's timeout.

    `everyone` is a Gloo group over the same ranks. With several hosts the ranks with the same local
    rank are connected by `open_channel`. Raises PeerLost if a rank does not join in time.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout_s: float,
        everyone: GlooChannel,
        name: str = "shm",
        open_channel: OpenChannel = open_gloo_channel,
    ) -> None:
        self.name = name
        self.rank = rank
        self.size = size
        self.small_bytes = max(_ADDED_BYTES // size, _SMALL_BYTES)
        """A tensor of at most so many bytes is reduced without `prepare`."""
        self._sequence = 0
        total = HEADER_BYTES + 2 * STAGING_BYTES + HeartbeatTable.size_bytes(size)
        ranks, by_rank, in_c = group_by_host(store, rank, size, total, timeout_s)
        local_ranks, memories = list(by_rank), list(by_rank.values())
        self.local_rank = local_ranks.index(rank)
        self._barrier = HostBarrier(memories, self.local_rank, local_ranks, timeout_s, in_c)
        table = memories[0].memory[HEADER_BYTES + 2 * STAGING_BYTES :]
        self.hosts = Hosts(store, ranks, self._barrier, everyone, table, open_channel)
        self.wait_for = self.hosts.wait_for
        self._combine = Combiner().combine
        self.buffers = SharedBuffers()
        self.allocate = self.buffers.allocate
        self.prepare = self.buffers.prepare
        self._slots = CallSlots(memories, self.local_rank, self.buffers)
        self._staging_areas = [torch.split(memory.staging, STAGING_BYTES) for memory in memories]
        self._addresses = [[a.data_ptr() for a in areas] for areas in self._staging_areas]
        self._staged = _cached_views(self._staging_areas)
        self._is_pair = len(memories) == 2 and not in_c
        self._is_one_host = len(ranks) == 1

    @property
    def timeout_s(self) -> float:
        """How long an operation waits for a late rank, in seconds; may be set at any time."""
        return self._barrier.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._barrier.timeout_s = seconds
        self.hosts.set_timeout(seconds)

    def close(self, failed: bool) -> None:
        """Release everything. Twice is safe.

        `failed`: an operation has failed or still runs, so nothing may wait for the peers. Not
        collective, except over MPI between hosts unless `failed`.
        """
        was_closed = self._barrier.closed
        self._barrier.leave(failed)
        self.hosts.close(not (failed or was_closed or self._barrier.has_given_up))
        self._barrier.close()
        self.buffers.close()

    # Operations

    def barrier(self, signature: str) -> None:
        """Wait for all ranks."""
        self._compare_calls(signature)

    def all_reduce(self, signature: str, t: Tensor, op: str, divisor: int = 1) -> None:
        """Reduce `t` over all ranks in place, then divide it by `divisor`.

        In rank order on a host, and in the order of the hosts. Halves are summed in float32, and a
        host's sum of them is rounded once more. `divisor` is 1 for integers.
        """
        if self._is_one_host and t.nbytes <= self.small_bytes:
            self.all_reduce_small(small_call(signature, t.dtype, t.nbytes, op, divisor), t)
            return
        if not self._is_one_host and t.nbytes <= SUM_BYTES:
            self._compare_calls(signature, staged=t, reduction=(op, divisor))
            result = self._addresses[0][self._sequence % 2] + SUM_OFFSET
            memmove(t.data_ptr(), result, t.nbytes)
            increment_version(t)
            return
        if buffers := self._compare_calls(signature, t):
            self._reduce_shared(signature, buffers, op, divisor)
            self._barrier.wait(signature)
            return
        for piece in torch.split(t, STAGING_BYTES // t.element_size()):
            staged = self._exchange(signature, piece)
            self._reduce_shared(signature, staged, op, divisor)
            self._barrier.wait(signature)
            piece.copy_(staged[self.local_rank])

    def all_reduce_small(self, call: SmallCall, t: Tensor) -> None:
        """Do `all_reduce` for a contiguous tensor of at most `small_bytes`, in any shape.

        On one host the last rank to arrive reduces it; two ranks that use semaphores each do it.
        """
        if not self._is_one_host:
            self.all_reduce(call.signature, flatten(t), call.op, call.divisor)
            return
        page = self._barrier.page
        if page is None or call.reduction is None or self.buffers.has_freed():
            self._compare_calls(call.signature, None, t, partial(self._reduce_staged, call, t))
            if self._is_pair:
                self._combine(self._all_staged(t), call.op, call.divisor, [flatten(t)])
                return
        else:
            self._sequence = number = self._sequence + 1
            outcome = self._barrier.meet(
                call.signature, page.reduce, number, call.reduction, t.data_ptr()
            )
            if outcome == LAST:
                self._slots.publish(number, False, partial(self._reduce_staged, call, t))
                page.release()
            if outcome != MATCHED:
                self._read_calls(call.signature)
        memmove(t.data_ptr(), self._addresses[0][self._sequence % 2], call.num_bytes)
        increment_version(t)

    def _reduce_staged(self, call: SmallCall, t: Tensor) -> None:
        """Reduce what all ranks have staged, as much as `t`, into the first rank's staging area."""
        if call.adds_plainly:
            # The same bits as torch's, in half the time.
            total, *others = self._staged(self._sequence % 2, t.nbytes, t.dtype)[1]
            with np.errstate(all="ignore"):
                for other in others:
                    np.add(total, other, total)
            return
        staged = self._all_staged(t)
        self._combine(staged, call.op, call.divisor, staged[:1])

    def _reduce_shared(self, signature: str, buffers: list[Tensor], op: str, divisor: int) -> None:
        """Reduce this rank's share of the local ranks' buffers, and write it to all of them."""
        hosts = self.hosts
        if self.local_rank >= hosts.num_owners:
            return
        begin, end = share_bounds(buffers[0].numel(), hosts.num_owners, self.local_rank)
        mine = [b[begin:end] for b in buffers]
        if self._is_one_host:
            self._combine(mine, op, divisor, mine)
        elif begin < end:  # else it is empty on every host, so no partner waits
            hosts.all_reduce(signature, mine, op, divisor)

    def reduce_scatter(
        self, signature: str, out: Tensor, t: Tensor, op: str, divisor: int = 1
    ) -> None:
        """Reduce `t` over all ranks, divide by `divisor`, and write this rank's part to `out`."""
        if not self.hosts.are_equal:
            everything = t.clone()
            self.all_reduce(signature, everything, op, divisor)
            out.copy_(everything.view(self.size, -1)[self.rank])
            return
        buffers, rows = self._compare_calls(signature, t), t.view(self.size, -1)
        columns = STAGING_BYTES // self.size // t.element_size()

        def reduce(begin: int) -> Iterator[Any]:
            part, into = slice(begin, begin + columns), out[begin : begin + columns]
            if buffers:
                parts = [b.view(self.size, -1)[:, part] for b in buffers]
            else:
                staged = self._exchange(signature, rows[:, part])
                parts = [b.view(self.size, -1) for b in staged]
            if self._is_one_host:
                self._combine([part[self.rank] for part in parts], op, divisor, [into])
            else:
                yield from self.hosts.reduce_scatter(parts, op, divisor, into)

        self.hosts.run(signature, map(reduce, range(0, out.numel(), columns)))
        if buffers:
            self._barrier.wait(signature)

    def broadcast(self, signature: str, data: Tensor, root: int) -> None:
        """Overwrite `data` with the root's bytes, in place."""
        if self._is_one_host and data.numel() <= self.small_bytes:
            self._compare_calls(signature, staged=data if self.rank == root else None)
            if self.rank != root:
                data.copy_(self._all_staged(data)[root])
            return
        self._compare_calls(signature)
        from_here, num_owners = root in self._barrier.ranks, self.hosts.num_owners
        root_host = next(i for i, host in enumerate(self.hosts.ranks) if root in host)
        for piece in torch.split(data, STAGING_BYTES):
            whole = self._next_staging()[: piece.numel()]
            staged = self._all_staged(piece)
            if from_here:
                whole = staged[self._barrier.ranks.index(root)]
                if self.rank == root:
                    whole.copy_(piece)
                self._barrier.wait(signature)
            if (channel := self.hosts.channel) is not None:
                begin, end = share_bounds(piece.numel(), num_owners, self.local_rank)
                if begin < end:  # else it is empty on every host, so no partner waits
                    self.wait_for(signature, channel.broadcast(whole[begin:end], root_host))
            if not from_here:
                self._barrier.wait(signature)
                for owner, theirs in enumerate(staged[:num_owners]):
                    begin, end = share_bounds(piece.numel(), num_owners, owner)
                    piece[begin:end].copy_(theirs[begin:end])
            elif self.rank != root:
                piece.copy_(whole)

    def all_gather(self, signature: str, out: Tensor, data: Tensor) -> None:
        """Concatenate every rank's `data`, all of one size, into `out`, in rank order."""
        if not self.hosts.are_equal:
            self._compare_calls(signature)
            self.wait_for(signature, self.hosts.everyone.all_gather(out, data))
            return
        rows, num_hosts = out.view(self.size, -1), len(self.hosts.ranks)
        if self._is_one_host and data.numel() <= self.small_bytes:
            self._compare_calls(signature, staged=data)
            for row, theirs in zip(rows, self._all_staged(data), strict=True):
                row.copy_(theirs)
            return
        self._compare_calls(signature)
        columns = STAGING_BYTES // num_hosts
        for begin in range(0, data.numel(), columns):
            piece = data[begin : begin + columns]
            mine = self._next_staging()[: num_hosts * piece.numel()]
            if self._is_one_host:
                mine.copy_(piece)
            else:
                self.wait_for(signature, self.hosts.channel.all_gather(mine, piece))
            self._barrier.wait(signature)
            for i, theirs in enumerate(self._all_staged(mine)):
                for host, row in zip(self.hosts.ranks, theirs.view(num_hosts, -1), strict=True):
                    rows[host[i], begin : begin + columns].copy_(row)

    def all_to_all(self, signature: str, outs: Sequence[Tensor], datas: Sequence[Tensor]) -> None:
        """Send the bytes `datas[r]` to each rank r, and receive `outs[r]` from it."""
        received, sent = ([t.numel() for t in tensors] for tensors in (outs, datas))
        mine = torch.tensor(sent + received, device="cpu")
        table = torch.empty(self.size * mine.numel(), dtype=mine.dtype, device="cpu")
        self.all_gather(signature, as_bytes(table), as_bytes(mine))
        splits = table.view(self.size, 2, self.size).tolist()
        wrong, largest = [], 0
        for a, (row, _) in enumerate(splits):
            for b, size in enumerate(row):
                if size != (expected := splits[b][1][a]):
                    wrong.append(
                        f"rank {a} sends {size} bytes to rank {b}, which expects {expected}"
                    )
                if a != b:  # a rank's own part is not staged
                    largest = max(largest, size)
        if wrong:
            raise Mismatch(f"{signature}: {'; '.join(wrong)}")
        if not self._is_one_host:
            out = torch.empty(sum(received), dtype=torch.uint8, device="cpu")
            data = torch.cat(list(datas))
            work = self.hosts.everyone.all_to_all(out, data, received, sent)
            self.wait_for(signature, work)
            for into, part in zip(outs, torch.split(out, received), strict=True):
                into.copy_(part)
            return
        outs[self.rank].copy_(datas[self.rank])
        cell = STAGING_BYTES // self.size  # of each receiver, the next rank's first
        for begin in range(0, largest, cell):
            mine = self._next_staging()
            for k in range(1, self.size):
                part = datas[(self.rank + k) % self.size][begin : begin + cell]
                mine[k * cell :][: part.numel()].copy_(part)
            self._barrier.wait(signature)
            staged = self._all_staged(mine)
            for k in range(1, self.size):
                part = outs[self.rank - k][begin : begin + cell]
                part.copy_(staged[self.rank - k][k * cell :][: part.numel()])

    def _next_staging(self) -> Tensor:
        """Return this rank's staging area for the next exchange. Two areas alternate."""
        self._sequence += 1
        area: Tensor = self._staging_areas[self.local_rank][self._sequence % 2]
        return area

    def _exchange(self, signature: str, t: Tensor) -> list[Tensor]:
        """Return what each local rank gives here, flat, in its staging area."""
        self._next_staging()[: t.nbytes].view(t.dtype).view(t.shape).copy_(t)
        self._barrier.wait(signature)
        return self._all_staged(t)

    def _all_staged(self, t: Tensor) -> list[Tensor]:
        """Return what the local ranks have put into their current staging areas, as much as `t`."""
        views, _ = self._staged(self._sequence % 2, t.nbytes, t.dtype)
        return views  # type: ignore[no-any-return]

    # The comparison of calls

    def _compare_calls(
        self,
        signature: str,
        t: Tensor | None = None,
        staged: Tensor | None = None,
        on_match: Callable[[], object] | None = None,
        reduction: tuple[str, int] = (SUM, 1),
    ) -> list[Tensor]:
        """Wait for all ranks and compare their calls.

        `staged` is a contiguous tensor to copy into the staging area before. If the calls are the
        same, the last rank to arrive calls `on_match` before the others go on; not if there are two
        ranks that use semaphores. On several hosts they reduce `staged` by the operation and
        divisor of `reduction`.
        Return `t` of each rank of this host if it is in shared memory on all ranks of all hosts,
        else nothing. Raises Mismatch on all ranks if they called different collectives.
        """
        sequence = self._sequence = self._sequence + 1
        if staged is not None:
            memmove(
                self._addresses[self.local_rank][sequence % 2], staged.data_ptr(), staged.nbytes
            )
        slots = self._slots
        slots.write(sequence, signature, t)
        if self._is_pair:
            self._barrier.wait(signature)
            is_match = slots.compare(sequence)
        else:
            self._barrier.wait(
                signature, lambda: slots.publish(sequence, slots.compare(sequence), on_match)
            )
            is_match = slots.comparison_flag[0] > 0
        if self._is_one_host and is_match:
            return []
        return self._read_calls(signature, t, staged, reduction)

    def _read_calls(
        self,
        signature: str,
        t: Tensor | None = None,
        staged: Tensor | None = None,
        reduction: tuple[str, int] = (SUM, 1),
    ) -> list[Tensor]:
        """Read all local ranks' calls, and compare them on all hosts: see `_compare_calls`."""
        written = self._slots.read_all(self._sequence)
        shared = all(call.buffer for call in written)
        texts = (call.signature for call in written)
        calls = dict(zip(self._barrier.ranks, texts, strict=True))
        if not self._is_one_host:
            small = [] if staged is None else self._all_staged(staged)
            self._sequence += 1
            area = self._staging_areas[0][self._sequence % 2]
            calls, shared = self.hosts.compare(signature, calls, shared, area, small, *reduction)
        if len(set(calls.values())) > 1:
            raise mismatch({r: call.decode(errors="replace") for r, call in calls.items()})
        return self._map_buffers(signature, written, t) if shared and t is not None else []

    def _map_buffers(self, signature: str, calls: list[Call], t: Tensor) -> list[Tensor]:
        """Return the same tensor of every rank of this host, as views of their shared memory."""
        buffers = []
        for i, (call, memory) in enumerate(zip(calls, self._barrier.memories, strict=True)):
            if i == self.local_rank:
                buffers.append(t)
                continue
            try:
                whole = self.buffers.map_peer(
                    i, memory.pid, call.buffer, call.fd, call.buffer_bytes
                )
            except RuntimeError as error:  # most likely the peer has exited
                self.hosts.await_cause(LivenessCheck(self._barrier, signature))
                why = f"has memory that cannot be mapped: {error}"
                raise self._barrier.give_up(signature, [self._barrier.ranks[i]], why) from error
            buffers.append(whole[call.offset : call.offset + t.nbytes].view(t.dtype))
        return buffers


def _cached_views(areas: list[tuple[Tensor, ...]]) -> Any:
    """Return a function that returns the begin of each rank's area, as tensors and, if they can be
    added up so, as NumPy arrays. Its results are kept.
    """

    @lru_cache(_MOST_VIEWS)
    def staged(number: int, num_bytes: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Any]]:
        # A view made in inference mode could not be written outside that mode.
        with torch.inference_mode(False):
            views = [area[number][:num_bytes].view(dtype) for area in areas]
        return views, [v.numpy() for v in views if dtype in SUMMED_WITHOUT_CAST]

    return staged
