"""One process that trains, in the ways in which scripts differ: the argument says which."""

import contextlib
import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

KIND = sys.argv[1] if len(sys.argv) > 1 else ""
if KIND == "no optimizer":
    print("nothing to train")
    sys.exit()
if KIND == "changes folder":
    os.chdir("/")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 5), torch.randn(64, 1))
model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1))
other = nn.Linear(5, 1)


class Nested(torch.optim.SGD):
    """As Horovod's: torch runs the hooks of a step twice, for this method and for its parent's."""

    def step(self, closure=None):
        return super().step(closure)


class NoRate(torch.optim.SGD):
    """Finds its rate itself, as Adafactor does."""

    def __init__(self, params):
        super().__init__(params, lr=0.01)
        self.param_groups[0]["lr"] = None

    def step(self, closure=None):
        self.param_groups[0]["lr"] = 0.01
        super().step(closure)
        self.param_groups[0]["lr"] = None


class Fails(torch.optim.SGD):
    """Its second step raises."""

    taken = 0

    def step(self, closure=None):
        self.taken += 1
        if self.taken == 2:
            raise FloatingPointError
        super().step(closure)


optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if KIND == "no rate":
    optimizer = NoRate(model.parameters())
if KIND == "a step raises":
    optimizer = Fails(model.parameters())
if KIND == "replaced":  # as broadcast_optimizer_state and DistributedOptimizer of Horovod do
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer = Nested(optimizer.param_groups)
if KIND == "nested":  # now that torch has wrapped SGD.step
    optimizer = Nested(model.parameters(), lr=0.01)
second = torch.optim.Adam(other.parameters(), lr=0.001)
if KIND == "lbfgs":
    optimizer = torch.optim.LBFGS(model.parameters())
if KIND == "sparse input":
    first = nn.Linear(5, 3)
    model = nn.Sequential(first, nn.Linear(3, 1))
    first.forward = lambda x: torch.sparse.mm(x, first.weight.T) + first.bias
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if KIND == "compiled":
    optimizer.step = torch.compile(optimizer.step, backend="eager")
net = model


def loss_of(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(net(inputs), labels)


if KIND == "compiled model":
    net = torch.compile(model, backend="eager", fullgraph=True)
if KIND == "compiled loss":
    loss_of = torch.compile(loss_of, backend="eager", fullgraph=True)


def slow(samples):
    until = time.process_time() + 0.02
    while KIND == "workers" and time.process_time() < until:
        pass
    return default_collate(samples)


loader = DataLoader(data, batch_size=4, num_workers=int(KIND == "workers"), collate_fn=slow)
scaler = torch.amp.GradScaler("cpu", enabled=KIND == "scaler")
step = 0
while True:
    for inputs, labels in loader:
        if KIND == "sparse input":
            inputs = inputs.to_sparse()
        if KIND == "accumulates" and step % 2 == 0:
            optimizer.zero_grad()
            loss_of(inputs, labels).backward()
            step += 1
            continue

        def closure() -> torch.Tensor:
            if KIND != "accumulates":
                optimizer.zero_grad()
            loss = loss_of(inputs, labels)  # noqa: B023
            scaler.scale(loss).backward()
            return loss

        if KIND in ("closure", "lbfgs"):
            optimizer.step(closure)
        else:
            closure()
            with contextlib.suppress(FloatingPointError):
                scaler.step(optimizer)
            scaler.update()
        if KIND == "two optimizers":
            second.zero_grad()
            other(inputs).mean().backward()
            second.step()
        step += 1
        if KIND == "ends" and step == 3:
            sys.exit()
        if KIND == "fails" and step == 3:
            raise ValueError("broken")
