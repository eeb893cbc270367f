"""The synthetic benchmark, ported to DDP by hand."""

import argparse
import timeit

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-iters", type=int, default=3)
args = parser.parse_args()


dist.init_process_group("gloo")
torch.manual_seed(1 + dist.get_rank())
layers = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
model = DDP(nn.Sequential(*layers, nn.Linear(8 * 49, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(args.batch_size, 3, 16, 16)
target = torch.randint(10, (args.batch_size,))


def benchmark_step():
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()


for _ in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=2)
    if dist.get_rank() == 0:
        print(f"{2 * args.batch_size / seconds:.1f} samples/s")
