"""The gradients of `DistributedOptimizer`: reducers average them while backward still runs.

    bucket_reducer   in buckets that all ranks send in an agreed order: the default
    named            one named allreduce per gradient, for the user's own compressors
    reducer          `PassCounter` averages nothing, for Adasum

All derive from `reducer.Reducer`. `plan` divides parameters into buckets, `channel` is what the
ranks share of them, `bucket` one bucket's memory.
"""
