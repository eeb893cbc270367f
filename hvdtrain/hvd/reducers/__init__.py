"""Reducers: they average the gradients of `DistributedOptimizer` while backward still runs.

    bucket_reducer   in buckets that all ranks send in an agreed order: the default
    named            one named allreduce per gradient, for the user's own compressors
    reducer          `PassCounter` averages nothing, for Adasum

All derive from `reducer.Reducer`; `bucket` is one bucket's memory.
"""

from __future__ import annotations

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.compression import wire_dtype
from hvdtrain.hvd.engine.request import ADASUM
from hvdtrain.hvd.reducers.bucket_reducer import BucketReducer
from hvdtrain.hvd.reducers.named import NamedReducer
from hvdtrain.hvd.reducers.reducer import AveragingSpec, PassCounter, Reducer


def make(spec: AveragingSpec) -> Reducer:
    """Return the reducer for a spec: buckets, if the compressor is one of Horovod's or bf16."""
    if spec.op == ADASUM and basics.size() > 1:
        return PassCounter(spec)
    known = wire_dtype(spec.compression) is not None
    return BucketReducer(spec) if known else NamedReducer(spec)
