"""Which transport moves the bytes of a c10d process group, and why."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hvdtrain.errors import BackendUnavailable, InputError

TRANSPORTS = ("nccl", "gloo")


def choose(requested: str, device: torch.device) -> tuple[str, str]:
    """Return the transport and the reason for it. Not collective.

    Raises InputError for an unknown name, BackendUnavailable for one that torch here lacks or that
    cannot carry tensors of `device`.
    """
    if requested == "auto":
        if device.type == "cuda":
            return "nccl", "tensors are on CUDA"
        return "gloo", "tensors are on the CPU"
    if requested not in TRANSPORTS:
        raise InputError(f"unknown transport {requested!r}; one of: auto, {', '.join(TRANSPORTS)}")
    if not dist.is_backend_available(requested):
        raise BackendUnavailable(f"torch {torch.__version__} has no {requested}")
    if requested == "nccl" and device.type != "cuda":
        raise BackendUnavailable(f"nccl carries CUDA tensors only, and the device is {device}")
    return requested, "as requested"
