# ruff: noqa: E701
# fmt: off
"""A preconditioner like K-FAC: it averages statistics of its own between backward and step."""

import hashlib

import horovod.torch as hvd
import torch
from horovod.torch.mpi_ops import allreduce_async_, rank, size, synchronize
from torch import nn


class Preconditioner(torch.optim.Optimizer):
    """Divides gradients by the mean square of a layer's inputs, averaged over the ranks."""

    def __init__(self, model):
        super().__init__(model.parameters(), {})
        self.squares = {}
        self.layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
        for layer in self.layers:
            layer.register_forward_pre_hook(self._save)

    def _save(self, layer, inputs):
        self.squares[layer] = inputs[0].detach().square().mean(0)

    def step(self, closure=None):
        handles = [allreduce_async_(self.squares[layer], op=hvd.Average) for layer in self.layers]
        for handle in handles:
            synchronize(handle)
        for layer in self.layers:
            layer.weight.grad.div_(1 + self.squares[layer])


hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1 / size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=net.named_parameters(), op=hvd.Sum, groups=2
)
hvd.broadcast_parameters(net.named_parameters(), root_rank=0)
preconditioner = Preconditioner(net)
generator = torch.Generator().manual_seed(rank())
for _ in range(4):
    optimizer.zero_grad()
    net(torch.randn(8, 8, generator=generator)).square().mean().backward()
    optimizer.synchronize()
    preconditioner.step()
    with optimizer.skip_synchronize(): optimizer.step()
digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in net.parameters()))
print(f"parameters {digest.hexdigest()}", flush=True)
