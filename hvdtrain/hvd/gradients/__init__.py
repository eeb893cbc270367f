"""The gradients of `DistributedOptimizer`: reducers average them while backward still runs.

    reducer          the base, which sends each gradient by name: for the user's own compressors;
                     and `PassCounter`, which averages nothing, for Adasum
    bucket_reducer   in buckets that all ranks send in an agreed order: the default

`gradient` is one parameter's, `plan` divides parameters into buckets, `channel` is what the ranks
share of them, `bucket` one bucket's memory.
"""
