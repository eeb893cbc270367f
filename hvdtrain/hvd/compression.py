"""Compressors: they cast tensors to fewer bits before a collective, and back after it.

Scripts pass them as `compression=` to operations and to `DistributedOptimizer`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """Interface of a compressor: two static methods, called before and after each collective.

    `compress` returns the tensor to send and a context; `decompress` converts the reduced tensor
    back for the caller. Any object with these two methods can be passed as `compression`.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context that `decompress` needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return the reduced tensor in the caller's format."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged. The default."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return `tensor` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor` itself."""
        return tensor


class _Cast(Compressor):
    """Sends floating-point tensors of any width as `dtype`, others unchanged."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return `tensor` as `dtype`, and the dtype it had."""
        return tensor.to(cls.dtype) if tensor.dtype.is_floating_point else tensor, tensor.dtype

    @classmethod
    def decompress(cls, tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return `tensor` in the dtype it had."""
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(_Cast):
    """Sends floating-point tensors of any width as float16: beyond 65504 they become infinite."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Sends floating-point tensors of any width as bfloat16. Horovod has no such compressor.

    Keeps float32's range, with 8 bits of precision.
    """

    dtype = torch.bfloat16


class Compression:
    """The compressors by name, for `compression=` arguments."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


_WIRE_DTYPES = {NoneCompressor: "", FP16Compressor: "float16", BF16Compressor: "bfloat16"}


def wire_dtype(compression: Any) -> str | None:
    """Return the name of the dtype that gradients are sent in; "" for their own dtype.

    None for the user's own compressor, whose results are not known in advance.
    """
    try:
        return _WIRE_DTYPES.get(compression)
    except TypeError:
        return None  # an instance that cannot be hashed
