"""Task: the model, optimizer, data and loss that a user writes; and `load_task`, which finds it.

A task has no code for ranks, devices, precision or backends: the Trainer and the backend have.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from ast import literal_eval
from collections.abc import Iterable
from contextlib import suppress
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, DistributedSampler, default_collate

from hvdtrain.errors import InputError, did_you_mean, one_line
from hvdtrain.tasks import TASKS
from hvdtrain.training.config import split_setting
from hvdtrain.training.metrics import Mean, Sum, WeightedMean, is_metric_object
from hvdtrain.training.user_module import load_named

Batch = Any
"""The collated samples: tensors in tuples, lists or dicts, on the device of the model."""


class Task(ABC):
    """Model, optimizer, data and loss. Constructor arguments come from `--set name=value`."""

    about_data: str = ""
    """One line for reports: whether the data are real or synthetic, and their source."""

    schedule_unit: str = "step"
    """`step` or `epoch`: when the scheduler that `schedule` returns is stepped. A ReduceLROnPlateau
    is stepped after every evaluation, whatever this says.
    """

    schedule_metric: str = "loss"
    """The metric of the evaluation that a ReduceLROnPlateau is stepped with."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the model, on the CPU. Called once, with the same random state on every rank.

        Modules in eval mode, such as frozen BatchNorm layers, stay so while the others train. A
        model that is in eval mode as a whole, as `from_pretrained` of transformers returns it,
        is trained.
        """

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the optimizer of `model`, which is on its device already."""

    @abstractmethod
    def datasets(self) -> tuple[Dataset[Any], Dataset[Any] | dict[str, Dataset[Any]] | None]:
        """Return the training data and the evaluation data, if any: a dataset, or several by name,
        such as `{"clean": a, "noisy": b}`, whose metrics are then `clean_accuracy` and so on.

        Called on every rank; each then loads its share. The data must be equal on all ranks. A
        dataset has `len()` and an index, or is an IterableDataset: then each rank iterates over it,
        and takes its items in turn. If it has a method `rank_shard(rank, size)`, that returns the
        rank's own part, of any length, instead; `hvdtrain.shard_bounds` divides a file or table.
        """

    @abstractmethod
    def loss(self, net: nn.Module, batch: Batch) -> Tensor | tuple[Tensor, Tensor | float]:
        """Return the mean loss over the samples of `batch`, a scalar.

        Or return `(loss, weight)`, always: the mean over `weight` tokens or samples, which then is
        the factor of this batch in the mean over all micro-batches and ranks of a step. The weight
        is a number, or a tensor with one; 0 if nothing in the batch counts.

        It must call `net`, which may be a wrapper of the model, exactly once.
        """

    _logged: Mean | None = None

    def log(self, name: str, value: Tensor | float) -> None:
        """Record a number of one micro-batch; call it in `loss`. Its mean since the last line of
        metrics, over the micro-batches and ranks that give it, is in metrics.jsonl and TensorBoard.

        Not collective, and does not wait for the device. An evaluation records nothing.
        """
        if self._logged is not None:
            self._logged.add({name: torch.as_tensor(value)}, 1.0)

    def metrics(self, net: nn.Module, batch: Batch) -> dict[str, Any]:
        """Return the metrics of `batch`, by name: means over its samples, as tensors.

        Evaluation weights means by the number of samples. A value can also be
        `WeightedMean(value, weight)`, a mean over tokens, for example; `Sum(tensor)`, which is
        summed over all batches and ranks (counts, a confusion matrix); or an updated metric of
        torchmetrics, or of its protocol: see hvdtrain/training/metrics.py.
        """
        loss = self.loss(net, batch)
        return {"loss": WeightedMean(*loss) if isinstance(loss, tuple) else loss}

    def sampler(self, dataset: Dataset[Any], seed: int) -> Iterable[Any] | None:
        """Return a sampler, or a batch sampler, of the training data; None: shuffle by the seed.

        Called at the start of every epoch, on every rank, with the epoch's seed; torch's random
        generators are seeded with it too. The ranks divide the order between themselves, so it must
        be that of all data, equal on all ranks. `set_epoch` is called if there is one. A batch of a
        batch sampler is one micro-batch of one rank.
        """
        return None

    def derived_metrics(self, totals: dict[str, Any]) -> dict[str, Any]:
        """Return more metrics, which follow from those of the whole evaluation (F1 from counts,
        perplexity from the mean loss). Called on rank 0, with numbers and tensors on the CPU.
        """
        return {}

    def schedule(
        self, optimizer: Optimizer, steps_per_epoch: int, total_steps: int
    ) -> LRScheduler | None:
        """Return a scheduler, stepped after each `schedule_unit`; None: the options choose."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the task's own state for checkpoints: tensors, numbers and strings, in dicts and
        lists. It must call no collective. Rank 0's is saved, and given to all ranks.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `state_dict` returned, in a run that is resumed, before its first step."""

    def collate(self, samples: list[Any]) -> Batch:
        """Return a batch made from a list of samples. The default is torch's default_collate."""
        try:
            return default_collate(samples)
        except (TypeError, RuntimeError) as error:
            raise InputError(
                f"the samples of the dataset do not make a batch: {one_line(error)}; give "
                "the task a method collate(samples)"
            ) from None

    def loader_options(self) -> dict[str, Any]:
        """Return further arguments of the data's DataLoaders, such as `prefetch_factor`."""
        return {}


class CheckedTask(Task):
    """A wrapper of a task that checks what its methods return.

    Each method raises InputError with its name, what it returned and what it must return. An
    exception from the task's own code propagates unchanged.
    """

    def __init__(self, task: Task) -> None:
        """Raises InputError for what is no Task, such as the class of one."""
        if not isinstance(task, Task):
            given = f"the class {task.__name__}" if isinstance(task, type) else repr(task)
            raise InputError(f"a Trainer needs a Task, such as MyTask(), but was given {given:.60}")
        self.wrapped = task
        self._has_weights: bool | None = None  # whether losses have weights; None: none was seen
        self.has_schedule = type(task).schedule is not Task.schedule
        self.has_sampler = type(task).sampler is not Task.sampler

    def model(self) -> nn.Module:
        """Return the task's model: an unwrapped module, which the backend wraps."""
        model = self.wrapped.model()
        if not isinstance(model, nn.Module):
            self._refuse("model", "a torch.nn.Module", model)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            self._refuse("model", "the bare model, which the backend wraps", model)
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return the task's optimizer."""
        optimizer = self.wrapped.optimizer(model)
        if not isinstance(optimizer, Optimizer):
            self._refuse("optimizer", "one torch.optim.Optimizer", optimizer)
        return optimizer

    def datasets(self) -> tuple[Dataset[Any], dict[str, Dataset[Any]]]:
        """Return the task's training data, and its evaluation data by name: "" is that of a single
        one. `size_of` checks each later.
        """
        given = self.wrapped.datasets()
        if not (isinstance(given, (tuple, list)) and len(given) == 2):
            self._refuse(
                "datasets", "two values: the training data, and the evaluation data or None", given
            )
        train, evaluation = given
        if not isinstance(evaluation, dict):
            return train, {} if evaluation is None else {"": evaluation}
        for name in evaluation:
            if not (isinstance(name, str) and name.isidentifier()):
                self._refuse("datasets", "evaluation data by name, such as 'clean'", name)
        return train, evaluation

    def sampler(self, dataset: Dataset[Any], seed: int) -> Iterable[Any] | None:
        """Return the task's sampler, or None."""
        sampler = self.wrapped.sampler(dataset, seed)
        if sampler is not None and not hasattr(sampler, "__iter__"):
            self._refuse("sampler", "a sampler, a batch sampler or None", sampler)
        if isinstance(sampler, DistributedSampler):
            self._refuse("sampler", "a sampler of all data, which the ranks divide", sampler)
        return sampler

    def loss(
        self, net: nn.Module, batch: Batch, logged: Mean | None = None
    ) -> Tensor | tuple[Tensor, float]:
        """Return the task's loss: one floating-point number that depends on the parameters; with
        its weight, if the task returns one. `logged` takes the numbers that it logs.
        """
        object.__setattr__(self.wrapped, "_logged", logged)  # also of a frozen dataclass
        try:
            loss: Any = self.wrapped.loss(net, batch)
        finally:
            object.__setattr__(self.wrapped, "_logged", None)
        has_weight = isinstance(loss, tuple) and len(loss) == 2
        if self._has_weights not in (None, has_weight):
            self._refuse("loss", "a weight with every loss, or with none", loss)
        self._has_weights = has_weight
        loss, weight = loss if has_weight else (loss, 0.0)
        if not (_is_number(loss) and loss.requires_grad):
            self._refuse("loss", f"{_NUMBER}, which backward() can start from", loss)
        if isinstance(weight, Tensor) and weight.numel() == 1:
            weight = weight.item()  # waits for a GPU, once for each micro-batch
        number = float(weight) if isinstance(weight, Real) else -1.0
        if not 0 <= number < float("inf"):
            self._refuse("loss", "a finite weight of the loss that is not negative", weight)
        return (loss, number) if has_weight else loss

    def metrics(self, net: nn.Module, batch: Batch) -> dict[str, Any]:
        """Return the task's metrics: for each name a tensor with one number, a Sum or a metric."""
        metrics = self.wrapped.metrics(net, batch)
        if not isinstance(metrics, dict):
            self._refuse("metrics", "a dict of tensors by name", metrics)
        for name, value in metrics.items():
            if not isinstance(name, str):
                self._refuse("metrics", "a dict with names as keys", name)
            is_known = isinstance(value, (Sum, WeightedMean)) or is_metric_object(value)
            if not (is_known or _is_number(value)):
                if type(self.wrapped).metrics is Task.metrics:  # it is what `loss` has returned
                    self._refuse("loss", _NUMBER, value)
                what = f"as {name!r} {_NUMBER} (or a WeightedMean, a Sum, or a metric object)"
                self._refuse("metrics", what, value)
        return metrics

    def derived_metrics(self, totals: dict[str, Any]) -> dict[str, Any]:
        """Return what the task derives from the metrics of the whole evaluation."""
        derived = self.wrapped.derived_metrics(totals)
        if not isinstance(derived, dict):
            self._refuse("derived_metrics", "a dict of numbers or tensors by name", derived)
        return derived

    def schedule(
        self, optimizer: Optimizer, steps_per_epoch: int, total_steps: int
    ) -> LRScheduler | None:
        """Return the task's scheduler of `optimizer`, or None."""
        unit = self.wrapped.schedule_unit
        if unit not in ("step", "epoch"):
            raise InputError(
                f"{type(self.wrapped).__name__}.schedule_unit is {unit!r}; it must be 'step' or "
                "'epoch'"
            )
        own = self.wrapped.schedule(optimizer, steps_per_epoch, total_steps)
        if own is None:
            return None
        if not isinstance(own, LRScheduler):
            self._refuse("schedule", "a scheduler of torch.optim.lr_scheduler, or None", own)
        if own.optimizer is not optimizer:
            self._refuse("schedule", "a scheduler of the optimizer that it is given", own)
        return own

    def loader_options(self) -> dict[str, Any]:
        """Return the arguments of DataLoader that the task gives, and its `collate`."""
        return {"collate_fn": self.wrapped.collate, **self.wrapped.loader_options()}

    def _refuse(self, method: str, wanted: str, given: object) -> NoReturn:
        raise InputError(
            f"{type(self.wrapped).__name__}.{method} must return {wanted}; it returned "
            f"{_describe(given)}"
        )


_NUMBER = "a real tensor with one number, the mean over the batch"


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def _describe(value: object) -> str:
    """Return a short description of a value, such as `None` or `a list of length 2`."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        without = "" if value.requires_grad else ", without a gradient"
        return f"a tensor of {kind} of shape {tuple(value.shape)}{without}"
    name = type(value).__name__
    article = "an" if name[0].lower() in "aeiou" else "a"
    if isinstance(value, (list, tuple, dict)):
        return f"{article} {name} of length {len(value)}"
    if isinstance(value, (int, float, str)):
        return f"{article} {name}, {value!r:.40}"
    return f"{article} {name}"


def load_task(spec: str, settings: tuple[str, ...] = ()) -> Task:
    """Create the task that `spec` names: built-in, `module:Class` or `file.py:Class`.

    `settings` are its constructor arguments as "name=value"; a value is a Python literal, or else a
    string. Not collective. Raises InputError if the task cannot be found, is incomplete, or does
    not take the arguments.
    """
    where = TASKS.get(spec, spec)
    if ":" not in where:
        package, dot, last = spec.rpartition(".")
        hint = did_you_mean(spec, TASKS)
        if dot:
            hint = f"which class of the file? {spec}:Class; "
            hint = hint if last == "py" else f"did you mean '{package}:{last}'? "
        raise InputError(
            f"unknown task {spec!r}; {hint}one of: {', '.join(TASKS)}, module:Class, or "
            f"file.py:Class"
        )
    cls: type[Task] = load_named(
        where,
        "task",
        "Task subclass",
        lambda value: isinstance(value, type) and issubclass(value, Task),
    )
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise InputError(f"the task {spec!r} lacks the methods: {missing}")
    arguments: dict[str, Any] = dict(map(split_setting, settings))
    for name, text in arguments.items():
        # MemoryError, RecursionError: nested too deeply
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            arguments[name] = literal_eval(text)
    signature = inspect.signature(cls)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        names = [name for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
        takes = ", ".join(names) or "no arguments"
        unknown = [name for name in arguments if name not in names]
        hint = did_you_mean(unknown[0], names) if unknown else ""
        raise InputError(f"task {spec!r}: {error}; {hint}it takes: {takes}") from None
    task = cls(**arguments)
    methods = """model optimizer datasets sampler loss metrics derived_metrics schedule collate
        loader_options"""
    for name in methods.split():
        wanted = list(inspect.signature(getattr(Task, name)).parameters)[1:]
        try:
            inspect.signature(getattr(task, name)).bind(*wanted)
        except TypeError as error:
            raise InputError(
                f"{cls.__name__}.{name} is called as {name}({', '.join(wanted)}): {error}"
            ) from None
    return task


def name_of(task: Task) -> str:
    """Return the name by which `load_task` finds the class of a task."""
    cls = type(task)
    module = cls.__module__
    if module == "__main__":
        module = getattr(sys.modules[module], "__file__", None) or module
    where = f"{module}:{cls.__qualname__}"
    return next((name for name, known in TASKS.items() if known == where), where)
