"""The numbers in a gradient, dense or sparse: used by the guard, the log and error messages."""

from __future__ import annotations

import torch
from torch import Tensor


def values_of(grad: Tensor) -> Tensor:
    """Return the values of a gradient that may be sparse or complex, as a real tensor."""
    values = grad.detach()
    values = values.coalesce().values() if values.is_sparse else values
    return torch.view_as_real(values) if values.is_complex() else values


def norm_of(grad: Tensor) -> Tensor:
    """Return the norm, in float64, on the gradient's device. Does not synchronise that."""
    values = values_of(grad)
    # A half's squares overflow. Float64 for all would take nine times as long.
    wide = torch.float32 if values.dtype.itemsize < 4 else None
    norm: Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm.double()


def is_finite(value: Tensor) -> bool:
    """Return whether all elements are finite. Waits for the device."""
    return bool(values_of(value).isfinite().all())
