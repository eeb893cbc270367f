"""A GAN: two models, each with an optimizer of its own, which a function wraps."""

import hashlib
import sys

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import nn


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def distributed(optimizer, module):
    hvd.broadcast_parameters(module.state_dict(), root_rank=0)
    return hvd.DistributedOptimizer(optimizer, named_parameters=module.named_parameters())


hvd.init()
torch.manual_seed(hvd.rank())
torch.set_num_threads(1)
gan = Gan()
optimizer_g = distributed(torch.optim.Adam(gan.generator.parameters(), lr=1e-3), gan.generator)
optimizer_d = distributed(
    torch.optim.Adam(gan.discriminator.parameters(), lr=1e-3), gan.discriminator
)
for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 4):
    real, noise = torch.randn(8, 8), torch.randn(8, 4)
    for parameter in gan.discriminator.parameters():
        parameter.requires_grad_(True)
    optimizer_d.zero_grad()
    fake = gan.generator(noise).detach()
    answers = gan.discriminator(real), gan.discriminator(fake)
    ones, zeros = torch.ones(8, 1), torch.zeros(8, 1)
    loss_d = F.binary_cross_entropy_with_logits(answers[0], ones)
    loss_d = loss_d + F.binary_cross_entropy_with_logits(answers[1], zeros)
    loss_d.backward()
    optimizer_d.step()
    for parameter in gan.discriminator.parameters():
        parameter.requires_grad_(False)
    optimizer_g.zero_grad()
    loss_g = F.binary_cross_entropy_with_logits(gan.discriminator(gan.generator(noise)), ones)
    loss_g.backward()
    optimizer_g.step()
digest = hashlib.sha256()
for name, value in sorted(gan.state_dict().items()):
    digest.update(name.encode() + value.numpy().tobytes())
print(f"parameters {digest.hexdigest()}", flush=True)
