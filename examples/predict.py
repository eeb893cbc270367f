"""Predict each sample with trained weights, on any number of ranks, in the order of the data.

    hvdtrain export runs/digits model.pt
    torchrun --nproc-per-node 2 examples/predict.py model.pt predictions.npy

Rank r of n predicts the samples r, r + n, ..., and rank 0 puts their rows into order.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from hvdtrain import Backend, open_backend
from hvdtrain.tasks.digits import Digits


@torch.no_grad()
def predict(backend: Backend, weights: Path) -> torch.Tensor | None:
    """Return the outputs for the evaluation data, on rank 0; None elsewhere. Collective."""
    task, world = Digits(), backend.world
    model, data = task.model(), task.datasets()[1]
    with backend.share_errors():  # the error of one rank is raised on all
        model.load_state_dict(torch.load(weights))
    model.to(backend.device).eval()
    own = range(world.rank, len(data), world.size)  # type: ignore[arg-type]
    batches = DataLoader(Subset(data, own), batch_size=64)
    rows = [model(inputs.to(backend.device)).cpu() for inputs, _ in batches]
    everyone = backend.all_gather_object(rows)
    if world.rank != 0:
        return None
    parts = [torch.cat(theirs) for theirs in everyone if theirs]
    found = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:])
    for rank, part in enumerate(parts):
        found[rank :: world.size] = part
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("weights", type=Path)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    with open_backend("auto") as backend:
        found = predict(backend, args.weights)
        if found is not None:
            np.save(args.output, found.numpy())
            backend.print(f"{len(found)} samples: {args.output}")


if __name__ == "__main__":
    main()
