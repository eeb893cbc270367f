"""Mixed precision with a loss scale, as for GPUs; bfloat16 on a CPU."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

hvd.init()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(42)
dataset = TensorDataset(torch.randn(640, 24), torch.randint(0, 5, (640,)))
model = nn.Sequential(nn.Linear(24, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 5)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.none,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
scaler = GradScaler(device)

sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
for epoch in range(1000):
    model.train()
    sampler.set_epoch(epoch)
    for inputs, labels in loader:
        inputs, labels = inputs.to(device), labels.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
