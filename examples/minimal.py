"""A loop of your own: plain.py for any number of ranks, with 8 lines of its own.

The same file under python, torchrun, horovodrun, mpirun and srun:
`horovodrun -np 2 python examples/minimal.py`.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvdtrain import Loader, open_backend

torch.manual_seed(0)
x = torch.randn(2048, 8)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

with open_backend() as backend:  # an error inside ends the job on every rank
    net, optimizer = backend.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = Loader(backend, data, batch_size=32)
    for epoch in range(5):
        for inputs, targets in loader:
            with backend.gradients(optimizer):  # afterwards p.grad is the mean over all ranks
                loss = nn.functional.mse_loss(net(inputs), targets)
                loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        backend.print(f"epoch {epoch}  loss {loss.item():.8f} on {backend.world.size} ranks")
