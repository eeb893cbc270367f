"""Native DDP: gradients are averaged bucket by bucket while backward runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hvdtrain._torch.backward import accumulation_of
from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain._torch.ddp_buckets import FORWARD_SYNC, reduce_in_rebuilt_buckets
from hvdtrain.backends import ddp_compression
from hvdtrain.backends.c10d import C10d
from hvdtrain.backends.ddp_compression import PowerSGD
from hvdtrain.backends.options import BackendOptions
from hvdtrain.errors import InputError
from hvdtrain.job.world import World


class DDP(C10d):
    """`torch.nn.parallel.DistributedDataParallel` on any transport."""

    name: ClassVar[str] = "ddp"
    compressions: ClassVar[tuple[str, ...]] = ("none", "fp16", "bf16", "powersgd")
    can_shard_optimizer: ClassVar[bool] = True

    def __init__(self, world: World, options: BackendOptions) -> None:
        super().__init__(world, options)
        self._with_gradient: dict[Tensor, None] = {}
        """An ordered set: the parameters that got a gradient in the step's last micro-batch."""
        self._before_first_step: dict[int, tuple[DistributedDataParallel, PowerSGD | None]] = {}
        """Wrapped models that need `_reduce_first_step`, keyed by id(optimizer)."""

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Wrap the model in DDP, and record which parameters get a gradient."""
        # By hooks on the nodes that accumulate gradients, which DDP hooks and keeps. Torch runs
        # all Python hooks of a node where its first is: before DDP's, also those added later.
        nodes = {p: accumulation_of(p) for p in model.parameters() if p.requires_grad}
        for p, node in nodes.items():
            node.register_hook(partial(_record, self._with_gradient, p))
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
        # One rank sends nothing, so its gradients must not be rounded.
        compression = self.options.compression if self.world.size > 1 else "none"
        powersgd = ddp_compression.register(net, compression)
        if powersgd is not None:
            self.rank_states.append(powersgd)
        # Not needed with two ranks, where a sum is the same in any order (but PowerSGD keeps errors
        # by bucket), nor with find_unused_parameters, where DDP never rebuilds its buckets.
        many = self.world.size > 2 or (self.world.size > 1 and powersgd is not None)
        if many and self.options.unused_parameters == "error":
            self._before_first_step[id(optimizer)] = net, powersgd
        return net, optimizer

    def _sync_batch_norm(self) -> type[BatchNormBase]:
        """Return torch's own layer on CUDA, its only device."""
        return nn.SyncBatchNorm if self.device.type == "cuda" else super()._sync_batch_norm()

    def _passes(
        self, net: nn.Module, optimizer: Optimizer, last: bool
    ) -> AbstractContextManager[None]:
        """Let DDP reduce in the last micro-batch of a step only."""
        assert isinstance(net, DistributedDataParallel)
        if not last:
            return net.no_sync()
        for p in net.module.parameters():
            self._with_gradient.pop(p, None)
        if id(optimizer) in self._before_first_step:
            return net.no_sync()  # in the first step `_reduce_gradients` reduces instead
        return nullcontext()

    def _reduce_gradients(self, optimizer: Optimizer) -> None:
        """Raise InputError if DDP has not reduced, because a parameter got no gradient in the last
        micro-batch. In the first step, with three ranks or more, reduce here.

        DDP itself raises in the next forward pass only, after a step with wrong gradients.
        """
        if self.options.unused_parameters != "error":
            return
        made = self._prepared[id(optimizer)]
        late = [made.names[p] for p in made.trained if p not in self._with_gradient]
        if late:
            raise InputError(
                "parameters without a gradient in the last micro-batch of a step: "
                f"{', '.join(late)}; DDP needs them there, or set --unused-parameters zero"
            )
        if id(optimizer) in self._before_first_step:
            self._reduce_first_step(*self._before_first_step.pop(id(optimizer)))

    def _reduce_first_step(self, net: DistributedDataParallel, hook: PowerSGD | None) -> None:
        """Average the gradients of the first step in the buckets that all later steps use.

        DDP starts with buckets in the order of registration, and rebuilds them after one backward
        pass in the order in which gradients became ready. In a ring all-reduce the order of
        additions depends on an element's place in its bucket. So with three ranks or more, the
        first step of a resumed run would differ from the same step of an uninterrupted run.
        Therefore the gradients pass through DDP twice: to rebuild the buckets, and to be averaged.
        Once, as long as 1.6 steps (100 MB, 3 ranks on 2 cores).
        """
        mine = set(net.module.parameters())
        grads = {p: p.grad for p in self._with_gradient if p in mine and p.grad is not None}

        def pause(now: bool) -> None:
            if hook is not None:
                hook.paused = now

        # The user's hooks have changed these gradients already: undo a second time. Hooks of a node
        # run in the order of registration, so this one is the last before DDP's.
        undo = [
            accumulation_of(p).register_hook(partial(_restore, p, grad))
            for p, grad in grads.items()
        ]
        reduce_in_rebuilt_buckets(net, grads, pause)
        for handle in undo:
            handle.remove()

    def describe(self) -> dict[str, Any]:
        """Add the bucket size, in MiB."""
        return {**super().describe(), "bucket_mib": self.options.bucket_mib}


def _record(parameters: dict[Tensor, None], p: Tensor, *_: Any) -> None:
    """Add `p`, whose gradient has been accumulated, to an ordered set."""
    parameters[p] = None


def _restore(p: Tensor, grad: Tensor, *_: Any) -> None:
    """Make `grad` the gradient again, whatever the hooks before this one have made of it."""
    p.grad = grad.clone()
