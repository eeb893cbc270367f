"""Two models, two optimizers, a loop of one's own: a GAN on the digits, with exact resume.

    torchrun --nproc-per-node 2 examples/gan.py --run-dir runs/gan --steps 200
    torchrun --nproc-per-node 2 examples/gan.py --run-dir runs/gan --steps 400     # goes on

Each model is prepared with its own optimizer, on any backend (`--backend compat`, `horovod`, ...).
Interrupted after any checkpoint and started again, it ends with the same bits.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hvdtrain import Backend, open_backend
from hvdtrain.optim.model_sync import broadcast_state, to_cpu
from hvdtrain.tasks.digits import Digits
from hvdtrain.training import checkpoint
from hvdtrain.training.metrics import agreed_fingerprint

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
    first = resume(backend, run_dir, both, optimizers)

    for step in range(first, steps):
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
            save(backend, run_dir, step + 1, both, optimizers)
    return agreed_fingerprint(backend, both)


def save(
    backend: Backend, run_dir: Path, step: int, both: nn.ModuleDict, optimizers: dict[str, Any]
) -> None:
    with backend.share_errors():  # an error of rank 0 ends all
        if backend.world.rank == 0:
            states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
            parts = {"models": to_cpu(both.state_dict()), "optimizers": to_cpu(states)}
            checkpoint.save(run_dir, step, parts, {"task": "gan"})
            checkpoint.prune(run_dir, 2)


def resume(backend: Backend, run_dir: Path, both: nn.ModuleDict, optimizers: dict[str, Any]) -> int:
    """Load the newest checkpoint on rank 0, and send it to all; return its step."""
    step = 0
    with backend.share_errors():
        path = checkpoint.newest(run_dir)[0] if backend.world.rank == 0 else None
        if path is not None:
            both.load_state_dict(checkpoint.load(path, "models"))
            for name, state in checkpoint.load(path, "optimizers").items():
                optimizers[name].load_state_dict(state)
            step = int(path.name.rpartition("-")[2])
    for name, model in both.items():
        broadcast_state(backend, model, optimizers[name])
    return backend.broadcast_object(step)


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
