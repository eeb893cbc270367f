"""Native DDP: gradients are averaged bucket by bucket while backward runs."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hvdtrain.backends.base import BackendOptions
from hvdtrain.backends.c10d import C10d
from hvdtrain.errors import InputError
from hvdtrain.world import World

# torch 2.13 renamed it, and warns of the old name.
FORWARD_SYNC = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class DDP(C10d):
    """`torch.nn.parallel.DistributedDataParallel` on any transport."""

    name: ClassVar[str] = "ddp"

    def __init__(self, world: World, options: BackendOptions) -> None:
        super().__init__(world, options)
        self._seen: set[Tensor] = set()
        """Parameters that got a gradient in the last micro-batch of the window."""

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        if self.options.unused_parameters == "error":
            for p in model.parameters():
                if p.requires_grad:
                    hook = self._seen.add
                    p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        net = DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            bucket_cap_mb=self.options.bucket_mib,
            # The contract's own policy for buffers applies, once a step, on every backend alike.
            **cast("dict[str, Any]", {FORWARD_SYNC: False}),
            find_unused_parameters=self.options.unused_parameters == "zero",
            # p.grad lies in the bucket itself: no copy back after the all-reduce.
            gradient_as_bucket_view=True,
        )
        return net, optimizer

    def accumulate(self, net: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Keep DDP from reducing in all but the last micro-batch of a window."""
        if not isinstance(net, DistributedDataParallel):
            raise ValueError("accumulate wants the net that prepare returned")
        if not last:
            return net.no_sync()
        self._seen.difference_update(net.module.parameters())
        return nullcontext()

    def _reduce_gradients(self, optimizer: Optimizer) -> None:
        """Make sure that DDP has reduced: it does not where the last micro-batch left one out.

        It would say so only in the next forward pass, a step with wrong gradients later.
        """
        if self.options.unused_parameters != "error":
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.requires_grad and p not in self._seen for p in parameters):
            names = self.names(optimizer)
            late = [names[p] for p in parameters if p.requires_grad and p not in self._seen]
            raise InputError(
                f"{len(late)} parameters got no gradient in the last micro-batch of a step: "
                f"{', '.join(late)}; DDP needs them there, or --unused-parameters zero"
            )

    def describe(self) -> dict[str, Any]:
        """Add the bucket size, in MiB."""
        return {**super().describe(), "bucket_mib": self.options.bucket_mib}
