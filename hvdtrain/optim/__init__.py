"""Wrappers around an optimizer that change the algorithm, for the Trainer and for loops of one's
own:

    local_sgd   the ranks step alone, and average their parameters every H steps; DiLoCo

A wrapper has the groups, the state, `step`, `zero_grad` and `state_dict` of the optimizer in it,
which is its `wrapped`.
"""
