"""What changes a step: wrappers around an optimizer, and what is done to a model on all ranks.

    local_sgd           the ranks step alone, and average their parameters every H steps; DiLoCo
    sharded_optimizer   the ranks of a host share parameters and state, and each steps its part
    global_batch_norm   BatchNorm over all ranks
    model_sync          broadcasts, averages and checks of a model, its gradients and its buffers

A wrapper has the groups, the state, `step`, `zero_grad` and `state_dict` of the optimizer in it,
which is its `wrapped`. It can be used in a loop of one's own.
"""
