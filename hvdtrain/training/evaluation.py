"""One evaluation over all ranks: means, sums and metric objects, reduced to the same bits.

The Trainer calls `evaluate_each`, which adds what `Task.metrics` returns for each batch, and
reduces:

    each rank     all-gathers   (total, weight) of each mean, the tensor of each Sum, and the state
                                of each metric object
    rank 0        combines      means and sums in rank order, metric objects on the combined state,
                                and the task's derived metrics
    rank 0        broadcasts    the results: a function of a user could differ between ranks
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.backends.base import Backend
from hvdtrain.errors import HvdtrainError, InputError
from hvdtrain.training.metrics import Mean, Sum, WeightedMean, is_metric_object
from hvdtrain.training.precision import Precision
from hvdtrain.training.task import CheckedTask

Derive = Callable[[dict[str, Any]], dict[str, Any]]
"""`Task.derived_metrics`, or a function like it."""
Share = tuple[str, Any]
"""What one rank contributes to a metric: `mean`, `sum` or `object`, and the values on the CPU."""


class Evaluation:
    """What one rank adds up in one evaluation. Call `add` for each batch, then `reduce` once.

    `warn`: the evaluation is of a part of the data, which may be too small for a metric: called on
    rank 0 with the exception that computing raises, in place of raising it.
    """

    def __init__(self, warn: Callable[[Exception], None] | None = None) -> None:
        self._warn = warn
        self._mean = Mean()
        self._sums: dict[str, Tensor] = {}
        self._objects: dict[str, Any] = {}

    def add(self, values: Mapping[str, Any], num_samples: int) -> None:
        """Add the metrics of one batch of `num_samples`. Not collective; synchronises no device.

        Raises InputError for a value that has another shape, or is another object, than before.
        """
        means = {}
        for name, value in values.items():
            if isinstance(value, Tensor):
                means[name] = value
            elif isinstance(value, WeightedMean):
                self._mean.add({name: value.value}, value.weight)
            elif isinstance(value, Sum):
                before = self._sums.get(name, torch.zeros_like(value.value))
                self._sums[name] = _added(name, before, value.value)
            elif self._objects.setdefault(name, value) is not value:
                raise InputError(
                    f"the metric {name!r} is a new {type(value).__name__} for every batch; a task "
                    "must create it once, and return the same object"
                )
        self._mean.add(means, num_samples)

    def reduce(self, backend: Backend, derive: Derive = lambda totals: {}) -> dict[str, Any]:
        """Return the metrics over all samples of all ranks: numbers, and nested lists of them.

        Collective: a rank that added nothing calls it, too. The result has the same bits on all
        ranks. `derive` gets it on rank 0, with tensors in place of lists, and returns more. Resets
        all metric objects. Raises InputError, on every rank, for what cannot be combined.
        """
        shares: dict[str, Share] = {
            **{name: ("mean", share) for name, share in self._mean.shares().items()},
            **{name: ("sum", total.cpu()) for name, total in self._sums.items()},
            **{name: ("object", _states_of(metric)) for name, metric in self._objects.items()},
        }
        everyone = backend.all_gather_object(shares)
        with backend.share_errors():
            totals = self._combine(everyone, derive) if backend.world.rank == 0 else {}
        for metric in self._objects.values():
            metric.reset()
        return backend.broadcast_object(totals)

    def _combine(self, everyone: list[dict[str, Share]], derive: Derive) -> dict[str, Any]:
        """Return the results of all ranks' shares, in rank order; nothing after a warning."""
        totals: dict[str, Any] = {}
        try:
            for name in dict.fromkeys(name for shares in everyone for name in shares):
                total = self._total(name, [shares[name] for shares in everyone if name in shares])
                if isinstance(total, Mapping):  # the result of a metric with several
                    totals.update({f"{name}_{key}": value for key, value in total.items()})
                else:
                    totals[name] = total
            totals.update(derive(totals))
        except HvdtrainError:
            raise
        except Exception as error:
            if self._warn is None:
                raise
            self._warn(error)
            return {}
        return {name: _plain(name, value) for name, value in totals.items()}

    def _total(self, name: str, shares: list[Share]) -> Any:
        """Return the total of one metric over all ranks; NaN if a part of the data has none."""
        (kind, *others), values = sorted({kind for kind, _ in shares}), [v for _, v in shares]
        if others:
            raise InputError(
                f"the metric {name!r} differs between ranks: {', '.join([kind, *others])}; a task "
                "must return the same kind for every batch"
            )
        if kind == "sum":
            return functools.reduce(functools.partial(_added, name), values)
        if kind == "object" and name in self._objects:
            return _compute(self._objects[name], values)
        if kind == "mean" and sum(weight for _, weight in values) > 0:
            return Mean.combine(values)
        if self._warn is not None:
            return math.nan
        raise InputError(
            f"the metric {name!r} is missing on rank 0, or is a mean whose weights are all 0; a "
            "task must return it for every batch, and some weights must be above 0"
        )


@torch.no_grad()
def evaluate_each(
    model: nn.Module,
    batches: Mapping[str, Iterator[tuple[int, Any]]],
    task: CheckedTask,
    backend: Backend,
    precision: Precision,
    warn: Callable[[Exception], None] | None = None,
) -> dict[str, Any]:
    """Return the metrics over this rank's `batches`, with their sizes, and those of all others; of
    several evaluation data with their name before.

    Collective. The model is in eval mode meanwhile. Raises what `Evaluation` does, which has
    `warn`.
    """
    metrics: dict[str, Any] = {}
    with eval_mode(model):
        for name, of_data in batches.items():
            evaluation = Evaluation(warn)
            for size, batch in of_data:
                with precision.autocast():
                    evaluation.add(task.metrics(model, batch), size)
            found = evaluation.reduce(backend, task.derived_metrics)
            metrics |= {f"{name}_{metric}" if name else metric: v for metric, v in found.items()}
    return metrics


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode inside the block, then each module into its own mode again: the
    task may have frozen some, such as BatchNorm layers.
    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in before:  # parents first
            if module.training != mode:
                module.train(mode)  # not the attribute: a module may override the method


@contextlib.contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the model's buffers at the end: a sample of weight 0 changes no statistics.

    Also one in whose place the model has put another tensor.
    """
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, value in kept:
                buffer.copy_(value)
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)


def _added(name: str, total: Tensor, value: Tensor) -> Tensor:
    """Return the sum of two parts of a `Sum`."""
    if total.shape != value.shape:
        raise InputError(
            f"the sum {name!r} has shape {tuple(total.shape)} and then {tuple(value.shape)}; a "
            "task must return the same shape for every batch"
        )
    return total + value


def _parts(metric: Any) -> list[Any]:
    """Return the metric, and those inside of it: a wrapper's own state is empty."""
    modules = metric.modules() if hasattr(metric, "modules") else [metric]
    return [part for part in modules if is_metric_object(part)]


def _states_of(metric: Any) -> list[dict[str, Any]]:
    """Return the states of each part by name, on the CPU."""
    return [
        {
            name: value.detach().cpu()
            if isinstance(value, Tensor)
            else [item.detach().cpu() for item in value]
            for name, value in part.metric_state.items()
        }
        for part in _parts(metric)
    ]


def _compute(metric: Any, states: list[list[dict[str, Any]]]) -> Any:
    """Return the result of `metric` on the states of all ranks, by rank, part and name.

    It does not communicate by itself, as torchmetrics would under `ddp`, and has its own states
    afterwards.
    """
    with contextlib.ExitStack() as stack:
        for part, of_ranks in zip(_parts(metric), zip(*states, strict=True), strict=True):
            replaced: dict[str, Any] = {}
            if hasattr(part, "distributed_available_fn"):
                replaced["distributed_available_fn"] = lambda: False
            if len(states) > 1:  # with one rank there is nothing to reduce, as in torchmetrics
                for name, reduction in part._reductions.items():
                    everyone = [state[name] for state in of_ranks]
                    replaced[name] = _reduced(everyone, reduction, getattr(part, name))
            for name, value in replaced.items():
                stack.callback(setattr, part, name, getattr(part, name))
                setattr(part, name, value)
        return metric.compute()


def _reduced(everyone: list[Any], reduction: Callable[[Any], Any] | None, own: Any) -> Any:
    """Return one state of all ranks, on the device of this rank's `own`."""
    if isinstance(own, Tensor):
        together: Any = torch.stack(everyone).to(own.device)
    else:
        device = own[0].device if own else None
        together = [item.to(device) for items in everyone for item in items]
        if not together:
            return together
    return together if reduction is None else reduction(together)


def _plain(name: str, value: Any) -> Any:
    """Return a number, or nested lists of numbers, in place of a tensor."""
    if isinstance(value, Tensor) and not value.is_complex():
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (int, float, list)):
        return value
    raise InputError(
        f"the metric {name!r} is a {type(value).__name__}; it must be a number or a tensor",
    )
