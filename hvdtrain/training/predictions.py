"""Predictions: collected from all ranks, put into the order of the data, and written to a file.

`Inference.predict` collects them. The place of a rank's own sample k, with n ranks, is that of
(k, rank): the ranks take the samples in turn. Data that divide themselves (`rank_shard`) are in the
order of (rank, k): that of the data if each rank's part is a contiguous one.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from hvdtrain.errors import InputError
from hvdtrain.system.files import finite
from hvdtrain.system.trees import map_tree

SUFFIXES = (".pt", ".npy", ".jsonl")


def in_order(by_rank: list[list[Any]], in_turn: bool) -> Any:
    """Return the parts of all ranks as one, in the order of the data, which the ranks have taken
    `in_turn` or one rank after another: a tensor, a dict of tensors by name, or a list. Raises
    InputError if there is nothing, or they do not fit together.
    """
    parts = [part for of_rank in by_rank for part in of_rank]
    if not parts:
        raise InputError("there is nothing to predict: the evaluation data have no sample")
    kinds = [sorted(part) if isinstance(part, dict) else type(part) for part in parts]
    if any(kind != kinds[0] for kind in kinds):
        raise InputError("predict must return the same kind of value for every batch")
    places = torch.cat([torch.arange(sum(map(num_rows, of_rank))) for of_rank in by_rank])
    order = places.argsort(stable=True) if in_turn else torch.arange(len(places))

    def joined(parts: list[Any]) -> Any:
        if isinstance(parts[0], list):
            items = [item for part in parts for item in part]
            return [items[place] for place in order]
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise InputError(
                f"predict returned rows of the shapes {', '.join(map(str, sorted(shapes)))}; pad "
                "them, or return a list by sample"
            )
        return torch.cat(parts)[order]

    if isinstance(parts[0], dict):
        return {name: joined([part[name] for part in parts]) for name in parts[0]}
    return joined(parts)


def check_rows(prediction: Any, size: int) -> None:
    """Raise InputError unless a prediction has one row or item for each of `size` samples."""
    tensors = prediction.values() if isinstance(prediction, dict) else [prediction]
    counts = [num_rows(tensor) for tensor in tensors]
    if {*counts} != {size}:
        raise InputError(
            f"predict must return one row or item for each sample; of {size} samples it returned "
            f"{', '.join(map(str, counts))}"
        )


def write(predictions: Any, suffix: str, file: BinaryIO) -> None:
    """Write what `in_order` returned. Raises InputError if the format cannot hold it.

    .pt is one of torch.save; .npy has one array; .jsonl has one JSON value in a line by sample.
    """
    if suffix == ".pt":
        torch.save(predictions, file)
    elif suffix == ".npy":
        if not isinstance(predictions, Tensor):
            raise InputError(
                f"a .npy file has one array, and predict returned a {type(predictions).__name__}; "
                "write a .pt or .jsonl"
            )
        np.save(file, _numbers(predictions).numpy())
    else:
        rows = predictions
        if isinstance(predictions, dict):
            columns = zip(*predictions.values(), strict=True)
            rows = (dict(zip(predictions, row, strict=True)) for row in columns)
        for row in rows:
            plain = map_tree(lambda t: _numbers(t).tolist(), Tensor, row)
            try:
                line = json.dumps(finite(plain), allow_nan=False)
            except TypeError as error:
                raise InputError(f"a .jsonl file cannot hold the predictions: {error}") from None
            file.write(f"{line}\n".encode())


def _numbers(t: Tensor) -> Tensor:
    """Return a tensor of a type that numpy has."""
    return t.float() if t.dtype == torch.bfloat16 else t


def num_rows(part: Any) -> int:
    """Return the number of samples of a tensor, a dict of tensors or a list of predictions."""
    if isinstance(part, dict):
        part = next(iter(part.values()))
    return len(part) if isinstance(part, list) or part.dim() else 0
