"""Batch normalization over the batches of all ranks, on any device and any collectives.

`hvd.SyncBatchNorm` and the backends' own layers are subclasses, which supply the two collectives.
Forward all-gathers each rank's count, mean and squared deviations per channel, and merges them;
backward sums two gradient moments per channel over all ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hvdtrain._torch.batch_norm import BatchNormBase


class GlobalBatchNorm(BatchNormBase):
    """Normalizes as if all ranks' batches were one. Collective whenever it uses batch statistics:
    in training, and in eval mode without running statistics.

    Input of shape (N, C, ...), on any device, of any floating dtype; statistics are computed in
    float32 at least. Ranks may have different numbers of samples, even zero. The gradients of
    weight and bias are this rank's share, which the optimizer combines.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    @abstractmethod
    def num_ranks(self) -> int:
        """Return the number of ranks that share their statistics. Not collective."""

    @abstractmethod
    def gather_statistics(self, mine: Tensor) -> Tensor:
        """Return every rank's tensor, stacked by rank. Collective."""

    @abstractmethod
    def begin_call(self) -> Any:
        """Return what identifies one forward pass to `sum_gradients` and `end_call`.

        Not collective. Only called if there will be a backward pass.
        """

    @abstractmethod
    def sum_gradients(self, mine: Tensor, call: Any) -> Tensor:
        """Return the sum of the tensor over all ranks. Collective; runs in backward."""

    def end_call(self) -> None:
        """Note that the backward pass of a call has run. Not collective."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize. Raises ValueError for an input that is not (N, num_features, ...)."""
        self._check_input_dim(input)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        tracked = self.track_running_stats or not self.training
        running_mean = self.running_mean if tracked else None
        running_var = self.running_var if tracked else None
        by_batch = self.training or (running_mean is None and running_var is None)
        if not by_batch or self.num_ranks() == 1:
            return F.batch_norm(
                input, running_mean, running_var, self.weight, self.bias, by_batch, momentum,
                self.eps,
            )  # fmt: skip
        output, mean, var = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self, torch.is_grad_enabled()
        )
        if self.training:
            for running, new in ((running_mean, mean), (running_var, var)):
                if running is not None:
                    running.lerp_(new.to(running.dtype), momentum)
        result: Tensor = output
        return result

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels (got {input.size(1)})")


class _Normalize(torch.autograd.Function):
    """Returns the output, and the mean and unbiased variance, which are not differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        layer: GlobalBatchNorm,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = _wide(input)
        count, mean, squares = _merged(x, layer)
        var = squares / count.clamp(min=1)
        invstd = torch.rsqrt(var + eps)
        output = (x - _by_channel(mean, x)) * _by_channel(_times(invstd, weight), x)
        if bias is not None:
            output += _by_channel(bias, x)
            ctx.dtype_of_bias = bias.dtype
        if grad_enabled and any(ctx.needs_input_grad):
            ctx.layer, ctx.call, ctx.ended = layer, layer.begin_call(), False
        ctx.save_for_backward(input, weight, mean, invstd, count)
        unbiased = squares / (count - 1).clamp(min=1)
        ctx.mark_non_differentiable(mean, unbiased)
        return output.to(input.dtype), mean, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd, count = ctx.saved_tensors
        if not ctx.ended:  # not again if backward repeats on a retained graph
            ctx.layer.end_call()
            ctx.ended = True
        dy, deviation = _wide(grad_output), _wide(input) - _by_channel(mean, input)
        sum_dy, sum_dy_dev = _over_batch(dy), _over_batch(dy * deviation)
        grad_input, grad_weight, grad_bias = None, None, None
        if ctx.needs_input_grad[0]:
            # The gradient of batch normalization (Ioffe and Szegedy, 2015) needs two means over the
            # whole batch, so over all ranks. Those of weight and bias remain this rank's share.
            sums = torch.stack([sum_dy, sum_dy_dev]).double()
            total = ctx.layer.sum_gradients(sums, ctx.call)
            all_dy, all_dy_dev = (total / count.clamp(min=1)).to(dy.dtype)
            slope = _by_channel(invstd * invstd * all_dy_dev, dy)
            centred = dy - _by_channel(all_dy, dy) - deviation * slope
            grad_input = (centred * _by_channel(_times(invstd, weight), dy)).to(input.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (sum_dy_dev * invstd).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = sum_dy.to(ctx.dtype_of_bias)
        return grad_input, grad_weight, grad_bias, None, None, None


def _merged(x: Tensor, layer: GlobalBatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """Return, over all ranks, the number of values per channel, their mean and their sum of squared
    deviations. Collective.
    """
    count = x.numel() // x.size(1)
    if count:
        mean = x.mean(_batch_dims(x))
        squares = _over_batch((x - _by_channel(mean, x)).square())
    else:
        mean = squares = x.new_zeros(x.size(1))
    mine = torch.stack([torch.full_like(mean, count), mean, squares]).double()
    counts, means, parts = layer.gather_statistics(mine).unbind(1)  # each by rank and channel
    # Chan, Golub and LeVeque's parallel variance (1979): E[x^2] - mean^2 would cancel digits.
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total.clamp(min=1)
    squares = (parts + counts * (means - mean).square()).sum(0)
    return total[0], mean.to(x.dtype), squares.to(x.dtype)


def _wide(t: Tensor) -> Tensor:
    """Return `t` in the precision of the statistics: float64, else float32."""
    return t if t.dtype == torch.float64 else t.float()


def _batch_dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _over_batch(x: Tensor) -> Tensor:
    return x.sum(_batch_dims(x))


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """Reshape a vector of one value per channel so that it broadcasts over `x`."""
    return values.to(_wide(x).dtype).view([-1 if dim == 1 else 1 for dim in range(x.dim())])


def _times(values: Tensor, weight: Tensor | None) -> Tensor:
    return values if weight is None else values * weight.to(values.dtype)
