"""Native DDP: gradients are averaged bucket by bucket while backward runs."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hvdtrain.backends.base import BackendOptions
from hvdtrain.backends.c10d import C10d
from hvdtrain.errors import InputError
from hvdtrain.world import World

# The argument that turns off DDP's own buffer broadcast: torch 2.13 renamed it, and warns of the
# old name.
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
        self._ready: dict[Tensor, None] = {}
        """An ordered set: the parameters that got a gradient in the window's last micro-batch."""
        self._unordered: dict[int, tuple[DistributedDataParallel, Optimizer]] = {}
        """Wrapped models before their first step, keyed by id(optimizer): see `_reduce_first`."""

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        if self.options.unused_parameters == "error":
            for p in model.parameters():
                if p.requires_grad:
                    hook = self._ready.setdefault
                    p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        net = DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            bucket_cap_mb=self.options.bucket_mib,
            # `sync_buffers` applies the policy for buffers instead, once a step.
            **cast("dict[str, Any]", {FORWARD_SYNC: False}),
            find_unused_parameters=self.options.unused_parameters == "zero",
            # p.grad is a view of its bucket: no copy back after the all-reduce.
            gradient_as_bucket_view=True,
        )
        # `_reduce_first` is not needed with two ranks, where a sum is the same in any order, nor
        # with find_unused_parameters, where DDP never rebuilds its buckets.
        if self.world.size > 2 and self.options.unused_parameters == "error":
            self._unordered[id(optimizer)] = net, optimizer
        return net, optimizer

    def sync_batch_norm(self) -> type[_BatchNorm] | None:
        """Return torch's own layer on CUDA, its only device."""
        return nn.SyncBatchNorm if self.device.type == "cuda" else None

    def accumulate(self, net: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Let DDP reduce in the last micro-batch of a window only."""
        if not isinstance(net, DistributedDataParallel):
            raise ValueError("accumulate wants the net that prepare returned")
        if not last:
            return net.no_sync()
        for p in net.module.parameters():
            self._ready.pop(p, None)
        if any(net is other for other, _ in self._unordered.values()):
            return net.no_sync()  # in the first step `_reduce_gradients` reduces instead
        return nullcontext()

    def _reduce_gradients(self, optimizer: Optimizer) -> None:
        """Raise InputError if DDP has not reduced, because a parameter got no gradient in the last
        micro-batch. In the first step, with three ranks or more, reduce here.

        DDP itself raises in the next forward pass only, after a step with wrong gradients.
        """
        if self.options.unused_parameters != "error":
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(p.requires_grad and p not in self._ready for p in parameters):
            names = self.names(optimizer)
            late = [names[p] for p in parameters if p.requires_grad and p not in self._ready]
            raise InputError(
                f"{len(late)} parameters got no gradient in the last micro-batch of a step: "
                f"{', '.join(late)}; DDP needs them there, or --unused-parameters zero"
            )
        if id(optimizer) in self._unordered:
            self._reduce_first(self._unordered.pop(id(optimizer))[0])

    def _reduce_first(self, net: DistributedDataParallel) -> None:
        """Average the gradients of the first step in the buckets that all later steps use.

        DDP starts with buckets in the order of registration, and rebuilds them after one backward
        pass in the order in which gradients became ready. In a ring all-reduce the order of
        additions depends on an element's place in its bucket. So with three ranks or more, the
        first step of a resumed run would differ from the same step of an uninterrupted run.
        Therefore the gradients pass through DDP twice: to rebuild the buckets, and to be averaged.
        """
        mine = set(net.module.parameters())
        grads = {p: p.grad for p in self._ready if p in mine and p.grad is not None}
        for rebuild in (True, False):
            net.reducer.prepare_for_forward()
            net.reducer.prepare_for_backward([])
            for p, grad in grads.items():
                p.grad = None
                torch.autograd.backward([p], [grad.clone() if rebuild else grad])
            if rebuild:
                net.reducer._rebuild_buckets()

    def describe(self) -> dict[str, Any]:
        """Add the bucket size, in MiB."""
        return {**super().describe(), "bucket_mib": self.options.bucket_mib}
