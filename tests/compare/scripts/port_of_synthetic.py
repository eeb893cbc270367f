"""The synthetic benchmark, ported to DDP by hand."""

import argparse
import os
import timeit

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-warmup-batches", type=int, default=3)
parser.add_argument("--num-batches-per-iter", type=int, default=5)
parser.add_argument("--num-iters", type=int, default=1000)
args = parser.parse_args()


class Block(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.down = nn.Conv2d(before, after, 1, stride=2, bias=False)

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.down(x))


class ResNet(nn.Module):
    def __init__(self, num_classes=1000):
        super().__init__()
        self.layers = nn.Sequential(Block(3, 8), Block(8, 16))
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        return self.fc(self.layers(x).mean((2, 3)))


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(int(os.environ["RANK"]))
model = DDP(ResNet())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * world_size)
data = torch.randn(args.batch_size, 3, 32, 32)
target = torch.LongTensor(args.batch_size).random_() % 1000


def benchmark_step():
    optimizer.zero_grad()
    F.cross_entropy(model(data), target).backward()
    optimizer.step()


timeit.timeit(benchmark_step, number=args.num_warmup_batches)
for x in range(args.num_iters):
    time = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    if rank == 0:
        print(f"Iter #{x}: {args.batch_size * args.num_batches_per_iter / time:.1f} img/sec")
