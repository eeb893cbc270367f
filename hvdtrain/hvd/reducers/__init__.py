"""How `DistributedOptimizer` gets gradients averaged while backward still runs.

`buckets`: agreed buckets, sent without asking; for everything but `named`: every step by name, for
compressors that only the user knows.
"""

from __future__ import annotations

from hvdtrain.hvd.reducers.base import Recipe, Reducer
from hvdtrain.hvd.reducers.buckets import BucketReducer
from hvdtrain.hvd.reducers.describe import wire_dtype
from hvdtrain.hvd.reducers.named import NamedReducer


def make(recipe: Recipe) -> Reducer:
    """Return the reducer for what an optimizer was asked to do."""
    known = wire_dtype(recipe.compression) is not None
    return BucketReducer(recipe) if known else NamedReducer(recipe)
