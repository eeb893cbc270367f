"""Batch normalization over the batches of all ranks, on any device and any collectives.

`hvd.SyncBatchNorm` and the backends' own layers are subclasses, which supply the two collectives.
Forward all-gathers each rank's count, mean and squared deviations per channel, and merges them;
backward sums two gradient moments per channel over all ranks. The rest is torch's own layer.
"""

from __future__ import annotations

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

    def num_ranks(self) -> int:
        """Return the number of ranks that share their statistics; with one, nothing below is
        called. Not collective.
        """
        return 1

    def gather_statistics(self, mine: Tensor) -> Tensor:
        """Return every rank's tensor, stacked by rank. Collective."""
        raise NotImplementedError

    def begin_call(self) -> Any:
        """Return what identifies one forward pass to `sum_gradients`.

        Not collective. Only called if there will be a backward pass.
        """

    def sum_gradients(self, mine: Tensor, call: Any) -> Tensor:
        """Return the sum of the tensor over all ranks. Collective; runs in backward."""
        raise NotImplementedError

    def end_call(self) -> None:
        """Note that the backward pass of a call has run. Not collective."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalize. Raises ValueError for an input that is not (N, num_features, ...)."""
        self._check_input_dim(input)
        by_batch = self.training or (self.running_mean is None and self.running_var is None)
        if not by_batch or self.num_ranks() == 1:
            result: Tensor = super().forward(input)
            return result
        x = input if input.dtype == torch.float64 else input.float()
        call = self.begin_call() if torch.is_grad_enabled() and x.requires_grad else None
        centred, *others = _Centred.apply(x, self, call)  # type: ignore[no-untyped-call]
        mean, var, unbiased = (t.detach() for t in others)  # for torch.compile
        if self.training and self.track_running_stats:
            self._update_running(mean, unbiased)
        weight, bias = (None if p is None else p.to(x.dtype) for p in (self.weight, self.bias))
        zeros = torch.zeros_like(mean)
        return F.batch_norm(centred, zeros, var, weight, bias, eps=self.eps).to(input.dtype)

    def _update_running(self, mean: Tensor, var: Tensor) -> None:
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1.0 / float(self.num_batches_tracked) if momentum is None else momentum
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            if running is not None:
                running.lerp_(new.to(running.dtype), momentum or 0.0)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features:
            raise ValueError(f"expected {self.num_features} channels (got {input.size(1)})")


class _Centred(torch.autograd.Function):
    """Returns the input without the mean of all ranks; that mean, the variance and the unbiased
    variance, which are not differentiable: backward returns what the input changes through them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: GlobalBatchNorm, call: Any) -> tuple[Tensor, ...]:
        count = x.numel() // x.size(1)
        mean = _over_batch(x) / max(count, 1)
        squares = _over_batch((x - _by_channel(mean, x)).square())
        mine = torch.stack([torch.full_like(mean, count), mean, squares]).double()
        counts, means, parts = layer.gather_statistics(mine).unbind(1)  # each by rank and channel
        # Chan, Golub and LeVeque's parallel variance (1979): E[x^2] - mean^2 would cancel digits.
        total = counts.sum(0)
        all_mean = (counts * means).sum(0) / total.clamp(min=1)
        all_squares = (parts + counts * (means - all_mean).square()).sum(0)
        var, unbiased = ((all_squares / (total - k).clamp(min=1)).to(x.dtype) for k in (0, 1))
        mean = all_mean.to(x.dtype)
        centred = x - _by_channel(mean, x)
        ctx.layer, ctx.call, ctx.ended = layer, call, False
        ctx.save_for_backward(centred, var, total)
        ctx.mark_non_differentiable(mean, var, unbiased)
        return centred, mean, var, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        centred, var, count = ctx.saved_tensors
        if not ctx.ended:  # not again if backward repeats on a retained graph
            ctx.layer.end_call()
            ctx.ended = True
        # The gradient of batch normalization (Ioffe and Szegedy, 2015) needs two means over the
        # whole batch, so over all ranks.
        sums = torch.stack([_over_batch(grad), _over_batch(grad * centred)]).double()
        total = ctx.layer.sum_gradients(sums, ctx.call)
        all_grad, all_product = (total / count.clamp(min=1)).to(grad.dtype)
        slope = _by_channel(all_product / (var + ctx.layer.eps), grad)
        return grad - _by_channel(all_grad, grad) - centred * slope, None, None


def _over_batch(x: Tensor) -> Tensor:
    """Sum the values of each channel."""
    return x.sum([0, *range(2, x.dim())])


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    """Reshape a vector of one value per channel so that it broadcasts over `x`."""
    return values.view(-1, *[1] * (x.dim() - 2))
