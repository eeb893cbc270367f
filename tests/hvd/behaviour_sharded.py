"""`hvd.DistributedOptimizer(shard=True)`, our extension: a script's bits are those without it; see
behaviour.py.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.hvd.behaviour import Hvd, added, case, raises
from tests.hvd.optimizer_state import same_in_all
from tests.hvd.optimizer_table import adamw, backward, synchronized, wrap


def train(hvd: Hvd, shard: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Train as Horovod's examples do, with two passes a step and clipping in some steps."""
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(4, 131), nn.Tanh(), nn.Linear(131, 3)).double()
    optimizer = wrap(hvd, model, adamw, backward_passes_per_step=2, shard=shard)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(5):
        for k in range(2):
            backward(hvd, model, 2 * step + k)
        if step % 2:
            with synchronized(optimizer):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 2:  # as after a checkpoint is loaded on every rank
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = copy.deepcopy(optimizer.state_dict()) if hvd.rank() == 0 else {}  # not collective
    if hvd.rank() == 0:
        torch.save(model.state_dict(), "/dev/null")
    weights = [p.detach().clone() for p in model.parameters()]
    hvd.barrier()
    return weights, state


@case(arms=["hvd-torchrun"])
def a_script_has_the_bits_of_one_without_it(hvd: Hvd) -> None:
    same_in_all(train(hvd, True), train(hvd, False))


@case(arms=["hvd-torchrun"], sizes=(2,))
def adasum_and_a_process_set_exclude_it(hvd: Hvd) -> None:
    with added(hvd, 0) as small:
        for changes in ({"op": hvd.Adasum}, {"process_set": small}):
            sgd = torch.optim.SGD(nn.Linear(2, 2).parameters())
            with raises(ValueError, "shard=True"):
                hvd.DistributedOptimizer(sgd, shard=True, **changes)
