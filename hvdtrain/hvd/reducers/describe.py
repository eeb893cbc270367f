"""Describe an optimizer's parameters to the other ranks: the plan that `BucketReducer` proposes."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.compression import Compression
from hvdtrain.hvd.engine.engine import Engine
from hvdtrain.hvd.engine.lanes import BUCKET_BYTES
from hvdtrain.hvd.engine.plan import DENSE, FROZEN, SPARSE, Plan
from hvdtrain.hvd.engine.request import dtype_name
from hvdtrain.hvd.reducers.base import Recipe

_WIRE = {Compression.none: "", Compression.fp16: "float16", Compression.bf16: "bfloat16"}


def wire_dtype(compression: Any) -> str | None:
    """Return the name of the dtype that gradients are sent in; "" for their own dtype.

    None for the user's own compressor, whose results are not known in advance.
    """
    try:
        return _WIRE.get(compression)
    except TypeError:
        return None  # an instance that cannot be hashed


def digest(recipe: Recipe) -> str:
    """Return a hash of the parameters' names and shapes: an optimizer's id, equal on all ranks."""
    named = zip(recipe.names, recipe.params, strict=True)
    about = sorted(f"{name}:{list(p.shape)}" for name, p in named)
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:8]


def describe(recipe: Recipe, order: list[int], wanted: list[bool], engine: Engine) -> Plan:
    """Return the plan that this rank proposes; rank 0 merges the proposals.

    `order`: indices of parameters as their gradients became ready. `wanted`: by index, whether this
    rank has a gradient to average.
    """
    on_gpu = any(p.is_cuda for p in recipe.params)
    fusion_bytes = engine.settings.fusion_threshold
    # Backward reaches the last parameters first, so the unknown rest follows in reverse.
    ready = list(dict.fromkeys(order))
    rest = [i for i in reversed(range(len(recipe.params))) if i not in set(ready)]
    names = [recipe.names[i] for i in (*ready, *rest)]
    kinds, strides = {}, {}
    for name, p, want in zip(recipe.names, recipe.params, wanted, strict=True):
        sparse = p.grad is not None and p.grad.is_sparse and not recipe.sparse_as_dense
        kinds[name] = SPARSE if sparse else DENSE if want else FROZEN
        if not p.is_contiguous() and _is_channels_last(p):
            strides[name] = list(p.stride())
    options = [
        recipe.op,
        wire_dtype(recipe.compression) or None,
        BUCKET_BYTES if fusion_bytes is None else fusion_bytes,
        "GPU" if on_gpu else "CPU",
        recipe.groups,
        # Whether large gradients are reduced in place: on shm, copying into a shared bucket pays.
        on_gpu or engine.groups.transport != "shm",
    ]
    shapes = {n: list(p.shape) for n, p in zip(recipe.names, recipe.params, strict=True)}
    dtypes = {n: dtype_name(p.dtype) for n, p in zip(recipe.names, recipe.params, strict=True)}
    return Plan(names, shapes, dtypes, kinds, strides, options)


def _is_channels_last(p: Tensor) -> bool:
    if p.dim() == 4:
        return p.is_contiguous(memory_format=torch.channels_last)
    return p.dim() == 5 and p.is_contiguous(memory_format=torch.channels_last_3d)
