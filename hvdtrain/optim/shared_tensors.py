"""Tensors in memory that the ranks of one host share. Used by `sharded_optimizer`.

`HostMemory.allocate` returns the same tensors on all ranks of a host. Ranks share memory if they
have the same `Group.host`, which is the same PID namespace of the same host by default. Every call
is collective over all ranks of all hosts, so that a problem on one host is an error on every rank.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from hvdtrain.errors import InputError, WorldMismatch
from hvdtrain.job.addresses import host_identity
from hvdtrain.transports.shm_sync import SharedMapping, create_memfd, map_peer

_ALIGN_BYTES = 64
_HEADER_BYTES = 64  # a secret: a peer that reads it has mapped the right file


@dataclass(frozen=True)
class Group:
    """The ranks that train together. Both functions are collective, over these ranks."""

    rank: int
    size: int
    all_gather_object: Callable[[Any], list[Any]]
    all_sum: Callable[[Tensor], Tensor]
    host: str = field(default_factory=lambda: host_identity("net", "pid"))
    """Equal on the ranks that share memory."""


def refuse(why: str) -> NoReturn:
    """Raise InputError on this rank; every other rank of the group raises it, too."""
    text = f"--shard-optimizer: {why}, or leave --shard-optimizer out"
    raise InputError(text, on_all_ranks=True)


class HostMemory:
    """The ranks of this rank's host, and the memory that they share."""

    def __init__(self, group: Group) -> None:
        """Find the ranks of this host. Collective. Raises InputError if they cannot share memory,
        on all ranks.
        """
        self._group = group
        hosts = group.all_gather_object(group.host)
        self.ranks = [rank for rank, host in enumerate(hosts) if host == group.host]
        """The ranks of this host; the first of them is its leader, which creates the memory."""
        self.rank, self.size = self.ranks.index(group.rank), len(self.ranks)
        self.sizes = list(Counter(hosts).values())
        """The number of ranks on each host, in the order of their first ranks."""
        self._map(0)  # refuse now what cannot be mapped, not in the first step

    def allocate(self, like: list[Tensor]) -> tuple[list[Tensor], Tensor, list[int]]:
        """Return zeroed tensors in shared memory, without gaps, with the strides of these if
        possible; all its words of 16 bits; and the tensors' places in bytes. Collective. Each has a
        storage of its own, so that torch.save writes no other.
        """
        like = [torch.empty_like(t, device="meta") for t in like]
        everyone = self._group.all_gather_object([(t.shape, t.stride(), t.dtype) for t in like])
        for rank, other in enumerate(everyone):
            if other != everyone[0]:
                raise WorldMismatch(
                    f"--shard-optimizer: rank {rank} has other shapes or dtypes of parameters than "
                    "rank 0; build the same model and parameter groups on all ranks",
                    on_all_ranks=True,
                )
        places, total = [], 0
        for t in like:
            places.append(_HEADER_BYTES + total)
            total += -(-max(t.nbytes, 1) // _ALIGN_BYTES) * _ALIGN_BYTES
        mapping = self._map(total)
        tensors = [
            torch.frombuffer(
                mapping.map, dtype=t.dtype, count=max(t.numel(), 1), offset=place
            ).as_strided(t.shape, t.stride())
            for t, place in zip(like, places, strict=True)
        ]
        return tensors, mapping.bytes.view(torch.int16), places

    def _map(self, num_bytes: int) -> SharedMapping:
        """Return zeroed memory of this host's ranks, behind a header. Collective.

        The leader makes an anonymous file, and the others map it by its descriptor: see `shm_sync`.
        Raises InputError, on all ranks, if one of them cannot.
        """
        total, fd = _HEADER_BYTES + num_bytes, -1
        mapping: SharedMapping | None = None
        secret, problem = secrets.token_bytes(16), ""
        rank, leader, all_gather = self._group.rank, self.ranks[0], self._group.all_gather_object
        try:
            if rank == leader:
                try:
                    fd = create_memfd(total)
                    mapping = SharedMapping(fd, total)
                    mapping.map[:16] = secret
                except OSError as error:
                    memory = f"{total >> 20} MiB of shared memory"
                    problem = f"rank {rank} cannot have {memory}: {error.strerror}; free memory"
            pid, theirs, secret = all_gather((os.getpid(), fd, secret))[leader]
            if rank != leader and theirs >= 0:
                try:
                    mapping = map_peer(pid, theirs, total)
                except (OSError, ValueError):
                    mapping = None
                if mapping is None or mapping.map[:16] != secret:
                    problem = (
                        f"rank {rank} cannot map the memory of rank {leader} on the same host; "
                        "start both as the same user"
                    )
            if problems := list(filter(None, all_gather(problem))):
                refuse(problems[0])
        finally:
            if fd >= 0:
                os.close(fd)
        assert mapping is not None
        return mapping


class Samples:
    """Four elements of each parameter, of each its last 16 bits, which have sign and exponent; in
    the words of the memory that holds them.
    """

    def __init__(self, words: Tensor, places: list[int], parameters: list[Tensor]) -> None:
        self._words, self._parameters = words, parameters
        self._at = torch.tensor(
            [
                # Of the first, ..., the last element.
                (place + (k * max(p.numel() - 1, 0) // 3 + 1) * p.itemsize - 2) // 2
                for p, place in zip(parameters, places, strict=True)
                for k in range(4)
            ]
        )
        self.take()

    def take(self) -> None:
        """Remember the words."""
        self._known = self._words[self._at]

    def changed(self) -> Tensor | None:
        """Return a parameter of which a word has changed since, if there is one."""
        is_other = self._words[self._at] != self._known
        return self._parameters[int(is_other.nonzero()[0]) // 4] if is_other.any() else None


def flat(t: Tensor) -> Tensor:
    """Return the elements of a tensor without gaps, in the order of its memory, as a view."""
    return t.as_strided((t.numel(),), (1,), t.storage_offset())


def bits(t: Tensor) -> Tensor:
    """Return the bytes of a tensor, in the order of its elements."""
    return t.detach().contiguous().view(-1).view(torch.uint8)
