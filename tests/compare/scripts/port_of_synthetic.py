"""The synthetic benchmark, ported to DDP by hand."""

import timeit

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH_SIZE = 8
NUM_ITERS = 1000

dist.init_process_group("gloo")
torch.manual_seed(1 + dist.get_rank())
layers = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
model = DDP(nn.Sequential(*layers, nn.Linear(8 * 49, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(BATCH_SIZE, 3, 16, 16)
target = torch.randint(10, (BATCH_SIZE,))


def benchmark_step():
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()


for _ in range(NUM_ITERS):
    seconds = timeit.timeit(benchmark_step, number=2)
    if dist.get_rank() == 0:
        print(f"{2 * BATCH_SIZE / seconds:.1f} samples/s")
