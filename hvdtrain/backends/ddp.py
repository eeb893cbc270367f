"""Native DDP: gradients are averaged bucket by bucket while backward runs."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hvdtrain.backends.c10d import C10d

# torch 2.13 renamed it, and warns of the old name.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class DDP(C10d):
    """`torch.nn.parallel.DistributedDataParallel` on any transport."""

    name: ClassVar[str] = "ddp"

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        net = DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            bucket_cap_mb=self.options.bucket_mib,
            # The contract's own policy for buffers applies, once a step, on every backend alike.
            **cast("dict[str, Any]", {_SYNC_BUFFERS: False}),
            find_unused_parameters=self.options.unused_parameters == "zero",
            # p.grad lies in the bucket itself: no copy back after the all-reduce.
            gradient_as_bucket_view=True,
        )
        return net, optimizer

    def accumulate(self, net: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Keep DDP from reducing in all but the last micro-batch of a window."""
        if last or not isinstance(net, DistributedDataParallel):
            return nullcontext()
        return net.no_sync()

    def describe(self) -> dict[str, Any]:
        """Add the bucket size, in MiB."""
        return {**super().describe(), "bucket_mib": self.options.bucket_mib}
