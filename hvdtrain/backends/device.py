"""The device of each rank."""

from __future__ import annotations

import torch

from hvdtrain.errors import InputError
from hvdtrain.job.world import World


def pick_device(world: World, wanted: str) -> torch.device:
    """Return this rank's device: `cuda:<local_rank>` or the CPU. Not collective.

    Raises InputError for an unknown device, and if the GPUs are too few for the host's ranks.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise InputError(f"unknown device {wanted!r}; one of: auto, cpu, cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cpu" or (wanted == "auto" and count == 0):
        return torch.device("cpu")
    if wanted == "cuda" and count == 1:  # the host's only GPU, or the only one visible to this rank
        return torch.device("cuda", 0)
    # Neither falling back to the CPU nor sharing a GPU would be what the user expects.
    if count < world.local_size:
        raise InputError(
            f"{world} sees {count} GPUs that torch {torch.__version__} can use, for the "
            f"{world.local_size} ranks of its host; use --device cpu"
            f"{', or --device cuda if every rank sees a GPU of its own' * (wanted == 'auto')}"
        )
    return torch.device("cuda", world.local_rank)
