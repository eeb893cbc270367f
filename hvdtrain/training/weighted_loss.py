"""The losses of one optimizer step when each has a weight: the mean over all samples or tokens.

`Stepper` uses it for a task whose `loss` returns `(loss, weight)`, and so does the hand-written
loop of `hvdtrain compare`. Engines average gradients with equal factors, so each rank must scale
its losses before the last backward pass, in which engines begin to send. Only then are the weights
of a step known. So, on each of R ranks with micro-batches 1 to n:

    micro-batches 1 to n-1   backward(loss * weight / unit)     unit: n times the first weight
    micro-batch n, forward   mean = all-reduced mean over the ranks of the sum of n weights
                             p.grad *= unit / mean              only if n > 1
    micro-batch n, backward  backward(loss * weight / mean)

The mean over the ranks is then sum(weight * loss) / sum(weight). The engine gets gradients of the
usual size, already scaled: fp16's loss scale, compressed and sparse gradients need no code of their
own, and clipping follows as always. The `unit` may differ between ranks: it has left the gradients
before they are sent.

A micro-batch of weight 0 has a gradient of zeros, whatever backward computes: a loss that divides
by its weight has 0 / 0 there, and NaN times 0 is NaN. Tensor hooks replace it, which run before
engines accumulate and send it. With SyncBatchNorm its gradient is not zero: its samples are part of
the statistics of all ranks. There a loss of weight 0 must be finite.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError
from hvdtrain.training.nonfinite import is_finite


class WeightedLosses:
    """The losses of one step on one rank. `num`: how many `scale` is called with. `sync_bn`:
    whether the model has SyncBatchNorm layers, whose backward pass exchanges gradients.
    """

    def __init__(
        self, backend: Backend, parameters: Iterable[Tensor], num: int, sync_bn: bool = False
    ) -> None:
        self._backend = backend
        self._parameters = [p for p in parameters if p.requires_grad]
        self._num = num
        self._sync_bn = sync_bn
        self._unit = 0.0
        self._weights = 0.0
        self._parts: list[Tensor] = []
        """The losses, each times its weight."""
        self._zeroing: list[Any] = []
        """The handles of the hooks that make the gradients of this micro-batch zero."""

    def scale(self, loss: Tensor, weight: float) -> Tensor:
        """Return the loss to start backward from, given the mean of a micro-batch and its weight.

        Collective for the last micro-batch: one all-reduce of a number. Raises InputError, on every
        rank, if the weights of a step are all zero. Call `scale` or `mean` after each backward
        pass.
        """
        self._end_zeroing()
        self._weights += weight
        if weight == 0:
            # The mean over no token is often NaN. It counts nothing, and its gradient is zero.
            if self._sync_bn:
                self._check_finite(loss)
            else:
                self._zeroing = [p.register_hook(torch.zeros_like) for p in self._parameters]  # type: ignore[no-untyped-call]
            loss = loss.nan_to_num(0.0, 0.0, 0.0)
        self._parts.append(loss.detach().double() * weight)
        if len(self._parts) < self._num:
            self._unit = self._unit or self._num * weight
            return loss * (weight / self._unit if self._unit else 0.0)
        own = torch.tensor(self._weights, dtype=torch.float64, device=self._backend.device)
        self._mean = float(self._backend.all_reduce(own, "mean"))
        if self._mean == 0:
            raise InputError(
                "the weights that loss returned are 0 for every micro-batch of a step on every "
                "rank, so that the step has no mean; leave such batches out of the data",
                on_all_ranks=True,
            )
        if self._unit:
            factor = self._unit / self._mean
            with torch.no_grad():
                for p in self._parameters:
                    if p.grad is not None:
                        p.grad.mul_(factor)
        return loss * (weight / self._mean)

    def mean(self) -> Tensor:
        """Return what the mean over the ranks makes the step's mean loss, after the last backward
        pass. Not collective.
        """
        self._end_zeroing()
        return reduce(torch.add, self._parts) / self._mean

    def _check_finite(self, loss: Tensor) -> None:
        """Raise InputError if a loss of weight 0 is not finite, before its gradient is sent."""
        # If the weights are not finite either, the run has diverged, which is reported as that.
        if not is_finite(loss) and all(map(is_finite, self._parameters)):
            raise InputError(
                "a loss of weight 0 is not finite, and SyncBatchNorm would send its gradient to "
                "all ranks within the backward pass; divide by the weight in loss as "
                "total / weight.clamp(min=1)"
            )

    def _end_zeroing(self) -> None:
        for handle in self._zeroing:
            handle.remove()
        self._zeroing = []
