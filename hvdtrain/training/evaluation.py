"""One evaluation over all ranks: means, sums and metric objects, reduced to the same bits.

The Trainer calls `evaluate_each`, which adds what `Task.metrics` returns for each batch, and
reduces:

    each rank     all-gathers   (total, weight) of each mean, the tensor of each Sum, and the state
                                of each metric object
    every rank    combines      means and sums in rank order: equal bits
    rank 0        computes      metric objects on the combined state, and the task's derived metrics
    rank 0        broadcasts    the results, if there are such: a function of a user could differ
"""

from __future__ import annotations

import contextlib
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
                total = self._sums.get(name)
                if total is not None and total.shape != value.value.shape:
                    raise InputError(_other_shape(name, total, value.value))
                self._sums[name] = value.value if total is None else total + value.value
            elif self._objects.setdefault(name, value) is not value:
                raise InputError(
                    f"the metric {name!r} is a new {type(value).__name__} for every batch; a task "
                    "must create it once, and return the same object"
                )
        self._mean.add(means, num_samples)

    def reduce(
        self,
        backend: Backend,
        derive: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Return the metrics over all samples of all ranks: numbers, and nested lists of them.

        Collective: a rank that added nothing calls it, too. The result has the same bits on all
        ranks. `derive` gets it on rank 0, with tensors in place of lists, and returns more. Resets
        all metric objects. Raises InputError, on every rank, for what cannot be combined.
        """
        everyone = backend.all_gather_object(self._shares())
        totals: dict[str, Any] = {}
        for name in dict.fromkeys(name for shares in everyone for name in shares):
            shares_of_all = [s[name] for s in everyone if name in s]
            totals[name] = _combine(name, shares_of_all, self._warn is not None)
        objects = [name for name, value in totals.items() if isinstance(value, _States)]
        if objects or derive is not None:
            with backend.share_errors():
                if backend.world.rank == 0:
                    totals = self._complete(totals, derive)
            totals = backend.broadcast_object(totals if backend.world.rank == 0 else {})
        for metric in self._objects.values():
            metric.reset()
        return _plain(totals)

    def _complete(
        self, totals: dict[str, Any], derive: Callable[[dict[str, Any]], dict[str, Any]] | None
    ) -> dict[str, Any]:
        """Return the results of metric objects and `derive` too; nothing after a warning."""
        for name, value in totals.items():
            if isinstance(value, _States) and name not in self._objects:
                error = InputError(f"the metric {name!r} must be returned for every batch")
                if self._warn is None:
                    raise error
                self._warn(error)  # a later batch of this rank may return it
                return {}
        try:
            totals = self._compute(totals)
            totals.update(derive(totals) if derive is not None else {})
        except HvdtrainError:
            raise
        except Exception as error:
            if self._warn is None:
                raise
            self._warn(error)
            return {}
        return _plain(totals)

    def _shares(self) -> dict[str, tuple[str, Any]]:
        """Return what this rank contributes, by name: a kind, and the values on the CPU."""
        return {
            **{name: ("mean", share) for name, share in self._mean.shares().items()},
            **{name: ("sum", total.cpu()) for name, total in self._sums.items()},
            **{name: ("object", _states_of(metric)) for name, metric in self._objects.items()},
        }

    def _compute(self, totals: dict[str, Any]) -> dict[str, Any]:
        """Return `totals` with the result of each metric object in place of its states."""
        results: dict[str, Any] = {}
        for name, value in totals.items():
            if not isinstance(value, _States):
                results[name] = value
                continue
            with _state_of_all_ranks(self._objects[name], value):
                results.update(_by_name(name, self._objects[name].compute()))
        return results


def evaluate_each(
    model: nn.Module,
    batches: Mapping[str, Iterator[tuple[int, Any]]],
    task: CheckedTask,
    backend: Backend,
    precision: Precision,
    warn: Callable[[Exception], None] | None = None,
) -> dict[str, Any]:
    """Return the metrics of each evaluation data, with its name before theirs: `evaluate`.
    Collective.
    """
    metrics: dict[str, Any] = {}
    for name, of_data in batches.items():
        found = evaluate(model, of_data, task, backend, precision, warn)
        metrics |= {f"{name}_{metric}" if name else metric: v for metric, v in found.items()}
    return metrics


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterator[tuple[int, Any]],
    task: CheckedTask,
    backend: Backend,
    precision: Precision,
    warn: Callable[[Exception], None] | None = None,
) -> dict[str, Any]:
    """Return the metrics over this rank's `batches`, with their sizes, and those of all others.

    Collective. The model is in eval mode meanwhile. Raises what `Evaluation` does, which has
    `warn`.
    """
    evaluation = Evaluation(warn)
    with eval_mode(model):
        for size, batch in batches:
            with precision.autocast():
                evaluation.add(task.metrics(model, batch), size)
    # Overridden on all ranks or on none: only then there is something to derive.
    return evaluation.reduce(backend, task.derived_metrics if task.derives_metrics else None)


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


class _States(list[list[dict[str, Any]]]):
    """The states of one metric object: by rank, by part, by name."""


def _combine(name: str, shares: list[tuple[str, Any]], is_partial: bool) -> Any:
    """Return the total of one metric over all ranks; for an object the states, in rank order.

    `is_partial`: a mean may have no weight, and is then NaN.
    """
    kinds, values = {kind for kind, _ in shares}, [value for _, value in shares]
    if len(kinds) > 1:
        raise InputError(
            f"the metric {name!r} is a {' here and a '.join(sorted(kinds))} there; a task must "
            "return the same for every batch",
            on_all_ranks=True,
        )
    if kinds == {"mean"}:
        if not sum(weight for _, weight in values) > 0:
            if is_partial:
                return math.nan
            raise InputError(
                f"the weights of the metric {name!r} are not positive in sum over the whole "
                "evaluation, so that it has no mean",
                on_all_ranks=True,
            )
        return Mean.combine(values)
    if kinds == {"object"}:
        return _States(values)
    total = values[0]
    for value in values[1:]:
        if value.shape != total.shape:
            raise InputError(_other_shape(name, total, value), on_all_ranks=True)
        total = total + value
    return total


def _other_shape(name: str, one: Tensor, other: Tensor) -> str:
    return (
        f"the sum {name!r} has shape {tuple(one.shape)} and then {tuple(other.shape)}; a task must "
        "return one shape for every batch"
    )


def _parts(metric: Any) -> list[Any]:
    """Return the metric, and those inside of it: a wrapper's own state is empty."""
    modules = metric.modules() if hasattr(metric, "modules") else [metric]
    return [part for part in modules if is_metric_object(part)]


def _states_of(metric: Any) -> list[dict[str, Any]]:
    def on_cpu(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().cpu()
        return [item.detach().cpu() for item in value]

    return [
        {name: on_cpu(value) for name, value in part.metric_state.items()}
        for part in _parts(metric)
    ]


@contextlib.contextmanager
def _state_of_all_ranks(metric: Any, states: _States) -> Iterator[None]:
    """Give `metric` the combined state of all ranks in the block, then its own again.

    In the block it does not communicate by itself, as torchmetrics would under `ddp`.
    """
    parts = _parts(metric)
    before = [{name: getattr(part, name) for name in part._reductions} for part in parts]
    available_fns = [getattr(part, "distributed_available_fn", None) for part in parts]
    try:
        for number, part in enumerate(parts):
            if available_fns[number] is not None:
                part.distributed_available_fn = lambda: False
            if len(states) > 1:  # with one rank there is nothing to reduce, as in torchmetrics
                for name, reduction in part._reductions.items():
                    everyone = [of_rank[number][name] for of_rank in states]
                    setattr(part, name, _reduced(everyone, reduction, before[number][name]))
        yield
    finally:
        for part, own, available_fn in zip(parts, before, available_fns, strict=True):
            for name, value in own.items():
                setattr(part, name, value)
            if available_fn is not None:
                part.distributed_available_fn = available_fn


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


def _by_name(name: str, result: Any) -> dict[str, Any]:
    """Return a result by name; that of a metric with several is a dict."""
    if not isinstance(result, Mapping):
        return {name: result}
    return {f"{name}_{key}": value for key, value in result.items()}


def _plain(totals: Mapping[str, Any]) -> dict[str, Any]:
    """Return `totals` with numbers, and nested lists of them, in place of tensors."""

    def plain(name: str, value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_complex():
            return value.item() if value.numel() == 1 else value.tolist()
        if isinstance(value, (int, float, list)):
            return value
        raise InputError(
            f"the metric {name!r} is a {type(value).__name__}; it must be a number or a tensor",
        )

    return {name: plain(name, value) for name, value in totals.items()}
