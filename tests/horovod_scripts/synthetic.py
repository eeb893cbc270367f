"""A script with the structure of Horovod's PyTorch synthetic benchmark, with BatchNorm."""

import argparse
import hashlib
import timeit

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn, optim

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true", default=False)
parser.add_argument("--num-iters", type=int, default=3)
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

data = torch.randn(8, 3, 16, 16)
target = torch.randint(10, (8,))


def benchmark_step():
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()


seconds = 0.0
for _ in range(args.num_iters):
    seconds += timeit.timeit(benchmark_step, number=2)
total = hvd.allreduce(torch.tensor(seconds), op=hvd.Sum)
if hvd.rank() == 0:
    print(f"{hvd.size()} ranks: {total.item():.1f} s")

values = (value.detach().numpy().tobytes() for value in model.parameters())
digest = hashlib.sha256(b"".join(values))
print(f"parameters {digest.hexdigest()}", flush=True)
