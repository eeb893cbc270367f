"""Messages from one rank to another, and objects."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from tests.transports.collectives.table import Dist, case, rank_and_size, same, values


@case()
def receive_from_any_and_by_tag(dist: Dist) -> None:
    rank, n = rank_and_size(dist)
    if rank > 0:
        works = [dist.isend(values(rank + tag, 50), 0, tag=tag) for tag in (1, 2, 3)]
        for work in works:
            work.wait()
        return
    for tag in (3, 1):
        sources = []
        for _ in range(1, n):
            t = torch.zeros(50)
            sources.append(dist.recv(t, tag=tag))
            same(t, values(sources[-1] + tag, 50))
        assert sorted(sources) == list(range(1, n))
    for source in range(1, n):
        t = torch.zeros(50)
        dist.irecv(t, source, tag=2).wait(timeout=timedelta(seconds=60))
        same(t, values(source + 2, 50))


@case()
def a_ring_in_one_batch(dist: Dist) -> None:
    rank, n = rank_and_size(dist)
    for count in (10, 300_000):
        t = torch.zeros(count)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, values(rank, count), (rank + 1) % n),
                dist.P2POp(dist.irecv, t, (rank - 1) % n),
            ]
        )
        for work in works:
            work.wait()
        same(t, values((rank - 1) % n, count))


@case()
def objects(dist: Dist) -> None:
    rank, n = rank_and_size(dist)
    everyone: list[Any] = [None] * n
    texts = ["x" * 1000 * r for r in range(n)]
    dist.all_gather_object(everyone, texts[rank])
    assert everyone == texts
    for root in range(n):
        collected: list[Any] | None = [None] * n if rank == root else None
        dist.gather_object(rank, collected, root)
        assert rank != root or collected == list(range(n))
        told = [f"from {rank}", None if rank != root else 7]
        dist.broadcast_object_list(told, root)
        assert told == [f"from {root}", 7]
        part: list[Any] = [None]
        dist.scatter_object_list(part, texts, root)
        assert part == texts[rank : rank + 1]
    if rank == 0:
        dist.send_object_list(texts, 1)
    if rank == 1:
        dist.recv_object_list(everyone, 0)
        assert everyone == texts
