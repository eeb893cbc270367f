"""One training in many versions: the first argument says which mistake this one has, or that it is
right; "horovod" is right, too.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

KIND = sys.argv[1]
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
if KIND == "horovod":
    import horovod.torch as hvd

    hvd.init()
    place = hvd.size(), hvd.rank()
else:
    dist.init_process_group("gloo")
    place = dist.get_world_size(), dist.get_rank()
torch.manual_seed(1 if KIND == "seed" else 0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
if KIND == "dropped layer":
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))
if KIND == "frozen layer":
    model[2].requires_grad_(False)
if KIND == "bf16":
    model = model.bfloat16()
torch.manual_seed(7)
data = TensorDataset(torch.randn(512, 20), torch.randint(0, 4, (512,)))
net = model
if KIND not in ("missing average", "clip before average", "horovod"):
    net = DistributedDataParallel(model)
kind = torch.optim.Adam if KIND == "another optimizer" else torch.optim.SGD
optimizer = kind(model.parameters(), lr=0.1 if KIND == "lr" else 0.05)
if KIND == "horovod":
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
sampler = DistributedSampler(data, *place, shuffle=True, seed=3 if KIND == "order" else 0)
loader = DataLoader(data, batch_size=8 if KIND == "half batch" else 16, sampler=sampler)
step = 0
while step < STEPS:
    for inputs, labels in loader:
        optimizer.zero_grad()
        if KIND == "bf16":
            inputs = inputs.bfloat16()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        if KIND == "clip before average":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        if KIND == "slow":
            time.sleep(0.1)
        if KIND == "sum":
            for p in model.parameters():
                p.grad *= dist.get_world_size()
        optimizer.step()
        step += 1
