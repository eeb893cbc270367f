"""DistributedDataParallel: one option under two names, and its buckets before the first step.

Used by the backend `ddp` and by `compare`.

Relies on `DistributedDataParallel.reducer`, a c10d Reducer with `prepare_for_forward`,
`prepare_for_backward` and `_rebuild_buckets`. Without them `reduce_in_rebuilt_buckets` raises
AttributeError in the first step with three ranks or more: wrong bits after a resume would be worse.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

FORWARD_SYNC = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)
"""The argument that turns off DDP's own buffer broadcast. torch 2.13 renamed it: the old one warns.
"""


def reduce_in_rebuilt_buckets(
    net: DistributedDataParallel, grads: Mapping[Tensor, Tensor], pause: Callable[[bool], None]
) -> None:
    """Average `grads` into `p.grad`, in the buckets that all later steps use. Collective.

    The first pass only makes DDP rebuild its buckets, in the order of `grads`; the second averages.
    `pause(True)` is called before the first, and `pause(False)` before the second.
    """
    for rebuild in (True, False):
        pause(rebuild)
        net.reducer.prepare_for_forward()
        net.reducer.prepare_for_backward([])
        for p, grad in grads.items():
            p.grad = None
            torch.autograd.backward([p], [grad.clone() if rebuild else grad])
        if rebuild:
            net.reducer._rebuild_buckets()
