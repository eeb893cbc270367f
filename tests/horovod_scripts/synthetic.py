"""A script with the structure of Horovod's PyTorch synthetic benchmark, with BatchNorm."""

import argparse
import hashlib
import timeit

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-iters", type=int, default=3)
parser.add_argument("--num-batches-per-iter", type=int, default=2)
args = parser.parse_args()

hvd.init()
torch.manual_seed(1 + hvd.rank())
torch.set_num_threads(1)
layers = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
model = nn.Sequential(*layers, nn.Linear(8 * 49, 10))
optimizer = optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

data = torch.randn(args.batch_size, 3, 16, 16)
target = torch.randint(10, (args.batch_size,))


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()


def log(text):
    if hvd.rank() != 0:
        return
    print(text)


log(f"Number of CPUs: {hvd.size()}")
rates = []
for _ in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    rates.append(args.batch_size * args.num_batches_per_iter / seconds)
log(f"{hvd.size()} ranks: {hvd.size() * np.mean(rates):.1f} samples/s")
means = hvd.allgather_object(float(np.mean(rates)))
total = hvd.allreduce(torch.tensor(1.0), op=hvd.Sum)
log(f"slowest {min(means):.1f}, {int(total)} ranks")

digest = hashlib.sha256()
for name, value in model.named_parameters():
    digest.update(name.encode() + value.detach().numpy().tobytes())
print(f"parameters {digest.hexdigest()}", flush=True)
