"""Casting tensors to fewer bits around a collective, and back after it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Compressor:
    """What a compressor offers: two static methods, called around each collective.

    `compress` returns the tensor to send and a context; `decompress` turns what came back into
    what the caller gets. Any object with these two works wherever a compression is asked for.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and what `decompress` needs to know of it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return what came back as the caller knows it."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are. The default."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return `tensor` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor` itself."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating tensors, of any width, as float16; others as they are.

    Values beyond 65504 overflow to infinity.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return `tensor` as float16, and its dtype."""
        return _narrowed(tensor, torch.float16)

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return `tensor` in the dtype it had."""
        return _restored(tensor, ctx)


class BF16Compressor(Compressor):
    """Sends floating tensors, of any width, as bfloat16; others as they are.

    Keeps float32's range, with 8 bits of precision. Horovod has no such compressor.
    """

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return `tensor` as bfloat16, and its dtype."""
        return _narrowed(tensor, torch.bfloat16)

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        """Return `tensor` in the dtype it had."""
        return _restored(tensor, ctx)


class Compression:
    """The compressors by name, for `compression=` arguments."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def _narrowed(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, torch.dtype]:
    return tensor.to(dtype) if tensor.dtype.is_floating_point else tensor, tensor.dtype


def _restored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if dtype.is_floating_point else tensor
