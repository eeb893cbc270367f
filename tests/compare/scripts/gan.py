"""Two networks with an optimizer each."""

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT = 8

hvd.init()
torch.manual_seed(5)
dataset = TensorDataset(torch.randn(640, 1, 8, 8).tanh())


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(LATENT, 16, 4, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, bias=False),
        )

    def forward(self, x):
        return self.main(x).view(-1)


netG, netD = Generator(), Discriminator()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
hvd.broadcast_parameters(netG.state_dict(), root_rank=0)
hvd.broadcast_parameters(netD.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizerG, root_rank=0)
hvd.broadcast_optimizer_state(optimizerD, root_rank=0)
# The discriminator sees two batches before it steps.
optimizerD = hvd.DistributedOptimizer(
    optimizerD,
    named_parameters=[(f"D.{name}", p) for name, p in netD.named_parameters()],
    backward_passes_per_step=2,
)
optimizerG = hvd.DistributedOptimizer(
    optimizerG, named_parameters=[(f"G.{name}", p) for name, p in netG.named_parameters()]
)

criterion = nn.BCEWithLogitsLoss()
sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())
loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
torch.manual_seed(100 + hvd.rank())
for epoch in range(1000):
    sampler.set_epoch(epoch)
    for (real,) in loader:
        optimizerD.zero_grad()
        ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
        criterion(netD(real), ones).backward()
        fake = netG(torch.randn(len(real), LATENT, 1, 1))
        criterion(netD(fake.detach()), zeros).backward()
        optimizerD.step()

        for p in netD.parameters():
            p.requires_grad_(False)
        optimizerG.zero_grad()
        criterion(netD(fake), ones).backward()
        optimizerG.step()
        for p in netD.parameters():
            p.requires_grad_(True)
