"""A plain training script for one process; minimal.py is the same for many."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(2048, 8)
data = TensorDataset(x, x.sin().sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
for epoch in range(5):
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}  loss {loss.item():.8f}")
