"""What a task returns as metrics, exact means over all ranks, and the fingerprint of a model.

A metric object is one of torchmetrics, or any with the same protocol: `update(...)`, `compute()`,
`reset()`, `metric_state` (a dict of tensors, and of lists of tensors) and `_reductions` (for each
of these a function, or None). Across ranks, tensors are stacked and lists joined, in rank order;
the function then reduces the stack or the list. These are torchmetrics' own rules, also for its
reduction "mean", which does not weight ranks by samples.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hvdtrain.backends.base import Backend
from hvdtrain.errors import InputError, WorldMismatch
from hvdtrain.optim.model_sync import uncompiled

_PROTOCOL = ("update", "compute", "reset", "metric_state", "_reductions")


class Sum:
    """A tensor of one batch that is summed over all batches and ranks, such as counts.

    Integers and booleans are summed exactly, as int64; floating-point numbers as float64.
    """

    def __init__(self, value: Tensor) -> None:
        if not isinstance(value, Tensor) or value.is_complex():
            raise InputError(f"Sum needs a real tensor, but was given: {type(value).__name__}")
        is_float = value.is_floating_point()
        self.value = value.detach().to(torch.float64 if is_float else torch.int64)


class WeightedMean:
    """A mean of one batch over `weight` tokens, or whatever it counts, in place of its samples.

    `value` is a tensor with one number, `weight` a number, or a tensor with one, that is not
    negative. A value of weight 0 does not count, even if it is NaN.
    """

    def __init__(self, value: Tensor, weight: Tensor | float) -> None:
        if not (isinstance(value, Tensor) and value.numel() == 1) or value.is_complex():
            is_tensor = isinstance(value, Tensor)
            given = f"shape {tuple(value.shape)}" if is_tensor else f"{value!r:.60}"
            raise InputError(
                f"WeightedMean needs a real tensor with one number, but was given: {given}"
            )
        self.weight = torch.as_tensor(weight).detach().double().reshape(()).to(value.device)
        self.value = value.detach().double().reshape(()).masked_fill(self.weight == 0, 0.0)


def is_metric_object(value: object) -> bool:
    """Return whether `value` follows the protocol in this module's docstring."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in _PROTOCOL)


class Mean:
    """Weighted means, by name. Call `add` on each rank, and `combine` the `shares` of all ranks."""

    def __init__(self) -> None:
        self._sums = defaultdict[str, list[Tensor]](list)
        self._weights = defaultdict[str, float | Tensor](float)

    def add(self, values: Mapping[str, Tensor], weight: float | Tensor) -> None:
        """Add the means of one batch, with its number of samples, or another weight. Not
        collective; synchronises no device.

        Raises InputError for a value that is not a single number.
        """
        for name, value in values.items():
            if value.numel() != 1:
                raise InputError(
                    f"the metric {name!r} has shape {tuple(value.shape)}; a task must return its "
                    "mean over the batch"
                )
            self._sums[name].append(value.detach().double().reshape(()) * weight)
            self._weights[name] = self._weights[name] + weight

    def shares(self) -> dict[str, tuple[float, float]]:
        """Return the sum of each value times its weight on this rank, and the sum of weights."""
        return {
            name: (float(torch.stack(sums).sum()), float(self._weights[name]))
            for name, sums in self._sums.items()
        }

    @staticmethod
    def combine(shares: Sequence[tuple[float, float]]) -> float:
        """Return the weighted mean over all ranks, given their shares in rank order.

        Every rank sums in that order: all get the same bits.
        """
        return sum(total for total, _ in shares) / sum(weight for _, weight in shares)


def fingerprint(state: Mapping[str, object]) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and bytes of the tensors in a state dict, in
    the order of their names.
    """
    digest = hashlib.sha256()
    # A compiled model has the same fingerprint as the plain one.
    plain = {uncompiled(name): t for name, t in state.items() if isinstance(t, Tensor)}
    for name in sorted(plain):
        # A lazily conjugated or negated view has other bytes in memory than its values.
        data = plain[name].detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(f"{name} {data.dtype} {tuple(data.shape)}\n".encode())
        digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_equal(backend: Backend, model: nn.Module, when: str = "at the end") -> None:
    """Raise WorldMismatch, on every rank, if the parameters differ between ranks. Collective."""
    if backend.world.size == 1:
        return
    first, *others = backend.all_gather_object(fingerprint(dict(model.named_parameters())))
    for rank, other in enumerate(others, 1):
        if other != first:
            raise WorldMismatch(
                f"the parameters differ {when}: rank 0 has {first[:12]}, rank {rank} has "
                f"{other[:12]}; let the loss call the net that it is given, not the model itself, "
                "and change weights in the same way on all ranks",
                on_all_ranks=True,
            )


def agreed_fingerprint(backend: Backend, model: nn.Module) -> str:
    """Return the hash of rank 0's state dict. Collective. Raises what `check_equal` does."""
    check_equal(backend, model)
    return backend.broadcast_object(fingerprint(model.state_dict()))
