"""A DDP script as PyTorch's tutorial has them: it spawns its ranks, which meet at a fixed port."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, world_size: int) -> None:
    """Train on one rank. Without an argument it is the environment that has the port."""
    # A server of each rank's own, as scripts with torch's RPC have besides their group.
    server = next(dist.rendezvous(f"tcp://127.0.0.1:{12356 + rank}", rank=0, world_size=1))
    assert server
    if url := sys.argv[1:]:
        dist.init_process_group("gloo", init_method=url[0], rank=rank, world_size=world_size)
    else:
        os.environ["MASTER_ADDR"] = "localhost"
        os.environ["MASTER_PORT"] = "12355"
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(100_000):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
