"""SyncBatchNorm: batch normalization over the batches of all ranks.

For scripts. Forward all-gathers each rank's count, mean and squared deviations per channel, and
merges them; backward sums two gradient moments per channel over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.mpi_ops import Sum, allgather_async, allreduce_async, size, synchronize


class SyncBatchNorm(BatchNormBase):
    """Normalizes as if all ranks' batches were one. Collective whenever it uses batch statistics:
    in training, and in eval mode without running statistics.

    Input of shape (N, C, ...), on any device, of any floating dtype; statistics are computed in
    float32 at least. Ranks may have different numbers of samples, even zero. The gradients of
    weight and bias are this rank's share, which the optimizer combines.
    """

    _site: _Site | None = None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_site": None}  # a copy is another module, with other names

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
        if not by_batch or size() == 1:
            return F.batch_norm(
                input, running_mean, running_var, self.weight, self.bias, by_batch, momentum,
                self.eps,
            )  # fmt: skip
        output, mean, var = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self._own_site(), torch.is_grad_enabled()
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

    def _own_site(self) -> _Site:
        """Return the names of this module's operations; new ones after each `init`."""
        if self._site is None or self._site.generation != basics.generation:
            self._site = _Site.next()
        return self._site


@dataclass
class _Site:
    """The names of one module's operations.

    Modules are numbered in the order of their first communication, which is the same on all ranks;
    the order of construction need not be. Each `init` restarts the numbers, since ranks that are
    new then start at 0.
    """

    generation: int
    number: int
    calls: int = 0
    pending: int = 0

    @classmethod
    def next(cls) -> _Site:
        generation, number = _last
        number = number + 1 if generation == basics.generation else 0
        globals()["_last"] = basics.generation, number
        return cls(basics.generation, number)

    @property
    def statistics(self) -> str:
        return f"sync_batch_norm.{self.number}.statistics"

    def begin_call(self) -> str:
        """Return a name for this call's gradients that no call with a pending backward has."""
        # A graph that is dropped leaves `pending` too high; the modulo bounds the number of names.
        self.calls = (self.calls + 1) % 256 if self.pending else 0
        self.pending += 1
        return f"sync_batch_norm.{self.number}.gradients.{self.calls}"

    def end_call(self) -> None:
        self.pending -= 1


_last = (0, -1)


class _Normalize(torch.autograd.Function):
    """Returns the output, and the mean and unbiased variance, which are not differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        site: _Site,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = _wide(input)
        count, mean, squares = _combined(x, site.statistics)
        var = squares / count.clamp(min=1)
        invstd = torch.rsqrt(var + eps)
        output = (x - _by_channel(mean, x)) * _by_channel(_times(invstd, weight), x)
        if bias is not None:
            output += _by_channel(bias, x)
            ctx.dtype_of_bias = bias.dtype
        if grad_enabled and any(ctx.needs_input_grad):
            ctx.site, ctx.name, ctx.ended = site, site.begin_call(), False
        ctx.save_for_backward(input, weight, mean, invstd, count)
        unbiased = squares / (count - 1).clamp(min=1)
        ctx.mark_non_differentiable(mean, unbiased)
        return output.to(input.dtype), mean, unbiased

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd, count = ctx.saved_tensors
        if not ctx.ended:  # not again if backward repeats on a retained graph
            ctx.site.end_call()
            ctx.ended = True
        dy, deviation = _wide(grad_output), _wide(input) - _by_channel(mean, input)
        sum_dy, sum_dy_dev = _over_batch(dy), _over_batch(dy * deviation)
        grad_input, grad_weight, grad_bias = None, None, None
        if ctx.needs_input_grad[0]:
            # The gradient of batch normalization (Ioffe and Szegedy, 2015) needs two means over the
            # whole batch, so over all ranks. Those of weight and bias remain this rank's share.
            sums = torch.stack([sum_dy, sum_dy_dev]).double()
            handle = allreduce_async(sums, name=ctx.name, op=Sum)
            all_dy, all_dy_dev = (synchronize(handle) / count.clamp(min=1)).to(dy.dtype)
            slope = _by_channel(invstd * invstd * all_dy_dev, dy)
            centred = dy - _by_channel(all_dy, dy) - deviation * slope
            grad_input = (centred * _by_channel(_times(invstd, weight), dy)).to(input.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (sum_dy_dev * invstd).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = sum_dy.to(ctx.dtype_of_bias)
        return grad_input, grad_weight, grad_bias, None, None, None


def _combined(x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
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
    handle = allgather_async(mine.unsqueeze(0), name=name)
    counts, means, parts = synchronize(handle).unbind(1)  # each by rank and channel
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
