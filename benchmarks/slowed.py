"""A DDP script as anybody's, with steps that are longer on purpose; for `comparisons.py`.

torchrun --nproc-per-node 2 benchmarks/slowed.py 0.1      # by a tenth
"""

from __future__ import annotations

import sys
import time
from collections import deque
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvdtrain import transports


def main() -> None:
    share = float(sys.argv[1])
    transports.register()
    dist.init_process_group("shm")
    torch.manual_seed(0)
    layers = [nn.Linear(320, 320) for _ in range(5)]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(320, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    plain: deque[float] = deque([0.0], maxlen=50)
    while True:
        inputs = torch.randn(32, 320, generator=draw)
        labels = torch.randint(0, 10, (32,), generator=draw)
        since = time.perf_counter()
        optimizer.zero_grad()
        loss: torch.Tensor = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        now = time.perf_counter()
        plain.append(now - since)
        # Not a share of this step: one after a pause would be longer by seconds.
        until = now + share * median(plain)
        while time.perf_counter() < until:
            pass
        optimizer.step()


if __name__ == "__main__":
    main()
