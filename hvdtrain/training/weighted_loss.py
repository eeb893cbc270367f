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
usual size, already scaled: fp16's loss scale, compressed, sparse and server-side gradients need no
code of their own, and clipping follows as always. The `unit` may differ between ranks:
it has left the gradients before they are sent.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError


class WeightedLosses:
    """The losses of one step on one rank. `num`: how many `scale` is called with."""

    def __init__(self, backend: Backend, parameters: Iterable[Tensor], num: int) -> None:
        self._backend = backend
        self._parameters = parameters
        self._num = num
        self._left = num
        self._unit = 0.0
        self._mean = 0.0
        self._weights = 0.0
        self._total: Tensor | None = None

    def scale(self, loss: Tensor, weight: float) -> Tensor:
        """Return the loss to start backward from, given the mean of a micro-batch and its weight.

        Collective for the last micro-batch: one all-reduce of a number. Raises InputError, on every
        rank, if the weights of a step are all zero.
        """
        self._left -= 1
        self._weights += weight
        if weight == 0:
            # The mean over no token is often NaN. It counts nothing, and its gradient is zero.
            loss = loss.nan_to_num(0.0, 0.0, 0.0)
        part = loss.detach().double() * weight
        self._total = part if self._total is None else self._total + part
        if self._left:
            self._unit = self._unit or self._num * weight
            return loss * (weight / self._unit if self._unit else 0.0)
        self._mean = self._reduce()
        if self._unit:
            self._rescale(self._unit / self._mean)
        return loss * (weight / self._mean)

    def mean(self) -> Tensor:
        """Return what the mean over the ranks makes the step's mean loss, after the last `scale`.

        Not collective.
        """
        assert self._total is not None
        return self._total / self._mean

    def _reduce(self) -> float:
        """Return the mean over the ranks of their sums of weights."""
        own = torch.tensor(self._weights, dtype=torch.float64, device=self._backend.device)
        mean = float(self._backend.all_reduce(own, "mean"))
        if mean == 0:
            raise InputError(
                "the weights that loss returned are 0 for every micro-batch of a step on every "
                "rank, so that the step has no mean; leave such batches out of the data",
                on_all_ranks=True,
            )
        return mean

    @torch.no_grad()
    def _rescale(self, factor: float) -> None:
        for p in self._parameters:
            if p.grad is not None:
                p.grad.mul_(factor)
