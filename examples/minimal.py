"""An own training loop, without the Trainer. The same file under python, under torchrun, and under
horovodrun, mpirun and srun: `horovodrun -np 2 python examples/minimal.py`.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from hvdtrain import open_backend

torch.manual_seed(0)
x = torch.randn(2048, 8)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

with open_backend() as backend:  # an error inside ends the job on every rank
    world, device = backend.world, backend.device
    sampler: DistributedSampler[object] = DistributedSampler(data, world.size, world.rank)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = model.to(device)
    net, optimizer = backend.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            # With gradient accumulation: last=False for all but the last micro-batch of a step.
            with backend.accumulate(net, last=True):
                loss = nn.functional.mse_loss(net(inputs.to(device)), targets.to(device))
                loss.backward()  # type: ignore[no-untyped-call]
            backend.finish_backward(optimizer)  # now p.grad is the mean over all ranks
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = backend.all_reduce(loss.detach())
        if world.rank == 0:
            print(f"epoch {epoch}  loss {mean.item():.8f}  {backend.name} on {world.size} ranks")
