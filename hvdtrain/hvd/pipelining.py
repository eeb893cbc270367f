"""Stepping on one bucket's parameters while the next buckets are still on their way.

Only where it makes no difference but to time: optimizers of torch's own that treat every parameter
by itself, and no hooks that expect one step. And only where there is time to gain: on CUDA, or with
more cores than the ranks of this host compute on; else communication and optimizer take the cores
from each other. HVDTRAIN_PIPELINED_STEP=0 or 1 decides otherwise.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.reducers.buckets import BucketReducer

_BY_PARAMETER = {
    cls
    for name in "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD".split()
    if (cls := getattr(torch.optim, name, None)) is not None
}


def worthwhile(optimizer: Optimizer) -> bool:
    """Whether stepping in parts gives the same as stepping at once, and may be faster."""
    wish = os.environ.get("HVDTRAIN_PIPELINED_STEP", "")
    return wish != "0" and _possible(optimizer) and (wish == "1" or _has_room(optimizer))


def _has_room(optimizer: Optimizer) -> bool:
    if optimizer.param_groups[0]["params"][0].is_cuda:
        return True
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (cores or 1) > basics.local_size() * torch.get_num_threads()


def _possible(optimizer: Optimizer) -> bool:
    hooks = (
        *getattr(optimizer, "_optimizer_step_pre_hooks", ()),
        *getattr(optimizer, "_optimizer_step_post_hooks", ()),
        *torch_optimizer._global_optimizer_pre_hooks,
        *torch_optimizer._global_optimizer_post_hooks,
    )
    return type(optimizer).__base__ in _BY_PARAMETER and not hooks


def step(optimizer: Optimizer, reducer: BucketReducer) -> None:
    """Average all gradients, and step on each bucket as it arrives. Collective."""
    inner: Any = type(optimizer).__base__.step  # type: ignore[union-attr]
    if getattr(inner, "hooked", False):
        inner = inner.__wrapped__  # without torch's record of one step, of which there are several
    groups = optimizer.param_groups
    left = [list(group["params"]) for group in groups]
    try:
        for params in reducer.finish():
            arrived = set(map(id, params))
            _step_on(optimizer, inner, groups, [[p for p in ps if id(p) in arrived] for ps in left])
            left = [[p for p in ps if id(p) not in arrived] for ps in left]
        # Those in no bucket: the gradient, if there is one, is the rank's own.
        _step_on(optimizer, inner, groups, left)
    finally:
        optimizer.param_groups = groups


def _step_on(
    optimizer: Optimizer,
    inner: Any,
    groups: list[dict[str, Any]],
    parts: list[list[torch.Tensor]],
) -> None:
    pairs = zip(groups, parts, strict=True)
    optimizer.param_groups = [{**group, "params": part} for group, part in pairs if part]
    if optimizer.param_groups:
        inner(optimizer)
