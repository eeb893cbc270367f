"""One rank of a world of some of the launcher's ranks: see test_sub_worlds.py."""

from __future__ import annotations

import json

import torch

import hvdtrain.hvd as hvd
from hvdtrain.job.world import detect


def main() -> None:
    launched = detect()
    mine = next(part for part in ([2, 0], [1]) if launched.rank in part)
    for life in range(2):
        hvd.init(comm=mine)
        assert (hvd.rank(), hvd.size()) == (mine.index(launched.rank), len(mine))
        assert hvd.allgather(torch.tensor([launched.rank])).tolist() == mine
        total = hvd.allreduce(torch.full((100_000,), float(launched.rank + life)), op=hvd.Sum)
        assert set(total.tolist()) == {float(sum(mine) + life * len(mine))}
        hvd.shutdown()
    if launched.rank != 1:  # so that the ranks have not started equally often
        hvd.init(comm=[2, 0])
        hvd.shutdown()
    hvd.init()
    assert hvd.allgather(torch.tensor([launched.rank])).tolist() == [0, 1, 2]
    print(json.dumps({"rank": launched.rank, "part": mine}))


if __name__ == "__main__":
    main()
