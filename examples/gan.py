"""Two models, two optimizers, a loop of your own: a GAN on the digits, with exact resume.

    torchrun --nproc-per-node 2 examples/gan.py --run-dir runs/gan --steps 200
    torchrun --nproc-per-node 2 examples/gan.py --run-dir runs/gan --steps 400     # goes on

Each model is prepared with its own optimizer, on any backend (`--backend compat`, `horovod`, ...).
Interrupted after any checkpoint and started again, it ends with the same bits.
"""

import argparse
import hashlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain import Backend, Checkpoints, open_backend
from hvdtrain.tasks.digits import Digits

NOISE, BATCH = 16, 32


def models() -> nn.ModuleDict:
    generator = nn.Sequential(
        nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()
    )
    discriminator = nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1)
    )
    return nn.ModuleDict({"generator": generator, "discriminator": discriminator})


def train(backend: Backend, run_dir: Path, steps: int, every: int) -> str:
    """Train up to `steps`; return the hash of all parameters. Collective."""
    world, both = backend.world, models().to(backend.device)
    images = Digits().datasets()[0].tensors[0].flatten(1).to(backend.device)  # type: ignore[attr-defined]
    nets, optimizers = {}, {}
    for name, model in both.items():
        adam = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999))
        nets[name], optimizers[name] = backend.prepare(model, adam)
    checkpoints = Checkpoints(backend, run_dir, keep=2)

    for step in range(checkpoints.load(models=both, **optimizers), steps):
        torch.manual_seed(step * world.size + world.rank)  # a resumed run draws the same numbers
        real = images[torch.randint(len(images), (BATCH,))]
        noise = torch.randn(BATCH, NOISE, device=backend.device)
        with torch.no_grad():
            fake = both["generator"](noise)
        with backend.gradients(optimizers["discriminator"]):
            # One forward pass for real and generated images: DDP prepares one backward for each.
            logits = nets["discriminator"](torch.cat([real, fake]))
            is_real = torch.cat([torch.ones(BATCH, 1), torch.zeros(BATCH, 1)]).to(backend.device)
            of_discriminator = F.binary_cross_entropy_with_logits(logits, is_real)
            of_discriminator.backward()  # type: ignore[no-untyped-call]
        optimizers["discriminator"].step()
        optimizers["discriminator"].zero_grad()

        both["discriminator"].requires_grad_(False)  # it passes gradients on, and gets none
        with backend.gradients(optimizers["generator"]):
            logits = both["discriminator"](nets["generator"](noise))
            of_generator = F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
            of_generator.backward()  # type: ignore[no-untyped-call]
        optimizers["generator"].step()
        optimizers["generator"].zero_grad()
        both["discriminator"].requires_grad_(True)

        if (step + 1) % every == 0 or step + 1 == steps:
            losses = backend.all_reduce(torch.stack([of_discriminator, of_generator]).detach())
            d, g = losses.tolist()
            backend.print(f"step {step + 1}  discriminator {d:.4f}  generator {g:.4f}")
            checkpoints.save(step + 1, models=both, **optimizers)
    state = torch.cat([t.detach().cpu().double().flatten() for t in both.state_dict().values()])
    digests = backend.all_gather_object(hashlib.sha256(state.numpy().tobytes()).hexdigest())
    (digest,) = set(digests)  # every rank has the same parameters
    return digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/gan"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=50)
    given = parser.parse_args()
    torch.manual_seed(0)
    with open_backend(given.backend) as backend:
        digest = train(backend, given.run_dir, given.steps, given.checkpoint_every)
        backend.print(f"done  params_sha256 {digest}")


if __name__ == "__main__":
    main()
