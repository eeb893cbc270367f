"""A benchmark on random images: everything is broadcast after the optimizer is wrapped."""

import argparse
import timeit

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from models import ResNet
from torch import optim

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-warmup-batches", type=int, default=3)
parser.add_argument("--num-batches-per-iter", type=int, default=5)
parser.add_argument("--num-iters", type=int, default=1000)
args = parser.parse_args()

hvd.init()
torch.manual_seed(hvd.rank())
model = ResNet()
optimizer = optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

data = torch.randn(args.batch_size, 3, 32, 32)
target = torch.LongTensor(args.batch_size).random_() % 1000


def benchmark_step():
    optimizer.zero_grad()
    output = model(data)
    loss = F.cross_entropy(output, target)
    loss.backward()
    optimizer.step()


timeit.timeit(benchmark_step, number=args.num_warmup_batches)
for x in range(args.num_iters):
    time = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    if hvd.rank() == 0:
        print(f"Iter #{x}: {args.batch_size * args.num_batches_per_iter / time:.1f} img/sec")
