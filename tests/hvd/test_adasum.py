"""Adasum of four ranks, as threads of one process on real Gloo groups: pools have two or three.

Gloo aborts the process of ranks that do not fit each other, so they have one of their own.
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import HashStore, ProcessGroupGloo  # type: ignore[attr-defined]

from hvdtrain.hvd.engine.adasum import combine, reduce_
from hvdtrain.hvd.engine.batch import Batch
from tests.forkserver import warm
from tests.launching import run, succeed

LIMIT_S = 20


def main() -> None:
    """First with the neighbour, then each pair with the other pair; each tensor for itself."""
    torch.manual_seed(0)
    inputs, sizes, store = [torch.randn(5) for _ in range(4)], [2, 3], HashStore()
    results: dict[int, Tensor] = {}

    def work(rank: int) -> None:
        group = ProcessGroupGloo(store, rank, 4, timedelta(seconds=LIMIT_S))
        flat = inputs[rank].clone()
        batch = Batch(group, [0, 1, 2, 3], rank, [], [], [], lambda pending: pending.wait())
        reduce_(flat, sizes, batch)
        results[rank] = flat

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    assert sorted(results) == [0, 1, 2, 3], "a rank failed, or waits for one that is no partner"
    parts = [torch.split(tensor, sizes) for tensor in inputs]
    expected = torch.cat(
        [combine(combine(a, b), combine(c, d)) for a, b, c, d in zip(*parts, strict=True)]
    )
    for rank, found in results.items():
        assert torch.equal(found, expected), rank


def test_four_ranks_combine_in_pairs() -> None:
    succeed(run(warm([sys.executable, "-m", "tests.hvd.test_adasum"]), timeout=100))


if __name__ == "__main__":
    main()
