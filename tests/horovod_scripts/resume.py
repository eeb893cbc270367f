"""BatchNorm and Adam from a checkpoint of rank 0, with a schedule: rank 0 alone loads, all wrap."""

import argparse

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoint", required=True)
parser.add_argument("--epochs", type=int, default=1000)
args = parser.parse_args()


hvd.init()
torch.manual_seed(hvd.rank())
model = nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 * hvd.size(), weight_decay=1e-4)
torch.manual_seed(1)
dataset = TensorDataset(torch.randn(640, 20), torch.randint(0, 4, (640,)))
criterion = nn.CrossEntropyLoss()

start_epoch = 0
if hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    start_epoch = checkpoint["epoch"]
start_epoch = hvd.broadcast_object(start_epoch, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)

sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
for epoch in range(start_epoch, args.epochs):
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        criterion(model(inputs), labels).backward()
        optimizer.step()
    scheduler.step()
