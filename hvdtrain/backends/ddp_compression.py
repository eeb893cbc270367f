"""Compressed gradients for the backend `ddp`: torch's own communication hooks.

fp16, bf16    each bucket is cast, averaged, and cast back
powersgd      each bucket is sent as low-rank factors, and this rank's error is added to its
              next gradient (Vogels, Karimireddy and Jaggi, NeurIPS 2019)
"""

# Without `from __future__ import annotations`: DDP looks at the classes in a hook's annotations.

from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

# PowerSGD's own default rank is 1. The first two steps are exact, as torch requires: it keeps what
# it knows of a bucket by its index, and DDP rebuilds its buckets after the first step.
_RANK = 2
_EXACT_STEPS = 2


def register(net: DistributedDataParallel, compression: str) -> "PowerSGD | None":
    """Register the communication hook for a value of `BackendOptions.compression`, if it has one.

    Returns the hook's state if it differs between ranks, else None. Not collective.
    """
    if compression in _CASTS:
        net.register_comm_hook(None, _CASTS[compression])
    if compression != "powersgd":
        return None
    hook = PowerSGD(next(net.parameters()).device)
    net.register_comm_hook(hook, PowerSGD.reduce)
    return hook


def _to_bf16(state: object, bucket: GradBucket) -> Future[Tensor]:
    """Call torch's hook under another name: by its own, DDP refuses it on everything but NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


_CASTS = {"fp16": default_hooks.fp16_compress_hook, "bf16": _to_bf16}


class PowerSGD:
    """torch's PowerSGD hook, with a state that checkpoints can hold."""

    def __init__(self, device: torch.device) -> None:
        """`device`: that of the gradients."""
        self._device = device
        self.paused = False
        """Whether gradients are averaged as they are, without a change of the state."""
        self._state = PowerSGDState(None, _RANK, start_powerSGD_iter=_EXACT_STEPS)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Start the averaging of a bucket; return its future. Collective."""
        if self.paused:
            return default_hooks.allreduce_hook(None, bucket)  # type: ignore[arg-type]
        return powerSGD_hook(self._state, bucket)

    def state_dict(self) -> dict[str, Any]:
        """Return the steps taken, and the errors and factors of each bucket. Not collective."""
        state = self._state
        return {
            "steps": state.iter,
            "errors": {at: t.clone() for at, t in state.error_dict.items()},
            "factors": {at: t.clone() for at, t in state.q_memory_dict.items()},
            # Overwritten in each step, but its presence tells torch that the factors exist.
            "products": {at: t.clone() for at, t in state.p_memory_dict.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. Not collective."""
        self._state.iter = state["steps"]
        self._state.error_dict = self._on_device(state["errors"])
        self._state.q_memory_dict = self._on_device(state["factors"])
        self._state.p_memory_dict = self._on_device(state["products"])

    def _on_device(self, tensors: dict[int, Tensor]) -> dict[int, Tensor]:
        return {at: t.to(self._device) for at, t in tensors.items()}
