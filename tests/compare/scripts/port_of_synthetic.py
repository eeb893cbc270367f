"""The synthetic benchmark, ported to DDP by hand."""

import argparse
import os
import timeit

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import ResNet
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-warmup-batches", type=int, default=3)
parser.add_argument("--num-batches-per-iter", type=int, default=5)
parser.add_argument("--num-iters", type=int, default=1000)
args = parser.parse_args()


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
