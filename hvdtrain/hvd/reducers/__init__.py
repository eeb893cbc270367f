"""Reducers: they average the gradients of `DistributedOptimizer` while backward still runs.

    buckets   in buckets that all ranks send in an agreed order: the default
    named     one named allreduce per gradient, for the user's own compressors

Both derive from `base.Reducer`. `bucket` is one bucket's memory, `byname` the named allreduces,
`describe` what the ranks agree on.
"""

from __future__ import annotations

from hvdtrain.hvd.reducers.base import Recipe, Reducer
from hvdtrain.hvd.reducers.buckets import BucketReducer
from hvdtrain.hvd.reducers.describe import wire_dtype
from hvdtrain.hvd.reducers.named import NamedReducer


def make(recipe: Recipe) -> Reducer:
    """Return the reducer for a recipe: buckets, if the compressor is one of Horovod's or bf16."""
    known = wire_dtype(recipe.compression) is not None
    return BucketReducer(recipe) if known else NamedReducer(recipe)
