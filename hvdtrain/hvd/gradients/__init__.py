"""The gradients of `DistributedOptimizer`: a reducer averages them while backward still runs.

    pass_counter     hooks count backward passes, and leave gradients alone: for Adasum
    reducer          derives from it: in buckets that all ranks send in an agreed order, or by name

`gradient` is one parameter's, `plan` divides parameters into buckets, `channel` is what the ranks
share of them, `bucket` one bucket's memory.
"""
