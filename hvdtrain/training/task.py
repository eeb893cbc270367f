"""What the user trains. A task knows nothing of ranks, devices, precision or backends."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from ast import literal_eval
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from hvdtrain.errors import InputError
from hvdtrain.tasks import TASKS

Batch = Any
"""What the dataset's samples collate to: tensors, in tuples, lists or dicts, on the device of the
model.
"""


class Task(ABC):
    """Model, optimizer, data and loss. Constructor arguments come from `--set name=value`."""

    about_data: str = ""
    """What the data are, in a line for reports: real or synthetic, and from where."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Make the model, on the CPU. Called once, with the same random state on every rank."""

    @abstractmethod
    def optimizer(self, model: nn.Module) -> Optimizer:
        """Make the optimizer of `model`, which is on its device already."""

    @abstractmethod
    def datasets(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        """Return the training data and the evaluation data, if any. Both need `len()`.

        Called on every rank; each then loads its share. The data must be the same everywhere.
        """

    @abstractmethod
    def loss(self, net: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the samples of `batch`, a scalar.

        Calls `net` once, which may be a wrapper.
        """

    def metrics(self, net: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return, by name, means over the samples of `batch`: evaluation weights them by sample
        counts.
        """
        return {"loss": self.loss(net, batch)}

    def schedule(
        self, optimizer: Optimizer, steps_per_epoch: int, total_steps: int
    ) -> LRScheduler | None:
        """Return a scheduler that is stepped once per optimizer step, or None for the options'."""
        return None

    def collate(self, samples: list[Any]) -> Batch:
        """Make a batch of a list of samples. The default is torch's."""
        from torch.utils.data import default_collate

        return default_collate(samples)


def load_task(spec: str, settings: tuple[str, ...] = ()) -> Task:
    """Make the task that `spec` names: built-in, `module:Class` or `file.py:Class`. Not collective.

    `settings` are its constructor arguments as "name=value"; a value is a Python literal, or else a
    string. Raises InputError for what cannot be found, and for arguments that the constructor does
    not take.
    """
    where = TASKS.get(spec, spec)
    module_name, colon, class_name = where.rpartition(":")
    if not colon:
        close = get_close_matches(spec, TASKS, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(
            f"unknown task {spec!r}; {hint}one of: {', '.join(TASKS)}, module:Class, or "
            f"file.py:Class"
        )
    if not module_name or not class_name:
        raise InputError(f"the task {spec!r} is not module:Class or file.py:Class")
    module = _load_module(module_name)
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        found = [n for n, c in vars(module).items() if _is_own_task(c, module)]
        hint = f"; it has: {', '.join(found)}" if found else ""
        raise InputError(f"{module_name} has no Task subclass named {class_name!r}{hint}")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise InputError(f"the task {spec!r} lacks the methods: {missing}")
    arguments = dict(_parse_setting(setting) for setting in settings)
    _check_arguments(spec, cls, arguments)
    return cls(**arguments)


def _is_own_task(value: object, module: ModuleType) -> bool:
    return (
        isinstance(value, type) and issubclass(value, Task) and value.__module__ == module.__name__
    )


def _load_module(name: str) -> ModuleType:
    if name.endswith(".py"):
        return _load_file(name)
    _add_to_path(Path.cwd())  # the console script does not have it, unlike `python -m`
    try:
        return import_module(name)
    except (ValueError, TypeError):
        raise InputError(f"{name!r} is not the name of a module") from None
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if not (missing and (name == missing or name.startswith(f"{missing}."))):
            raise  # the task's own import of something else: its traceback says where
        raise InputError(f"no module named {missing!r} for the task {name!r}") from None


def _load_file(name: str) -> ModuleType:
    path = Path(name).resolve()
    if not path.is_file():
        raise InputError(f"no task file {name!r} here ({Path.cwd()})")
    if not path.stem.isidentifier():
        raise InputError(f"the task file {name!r} has no name that Python can import; rename it")
    known = sys.modules.get(path.stem)
    if known is not None and hasattr(known, "__task_file__"):
        del sys.modules[path.stem]  # the task file of an earlier load
    _add_to_path(path.parent)
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(path.stem)
    if spec is None or spec.origin is None or Path(spec.origin).resolve() != path:
        if known is not None:
            sys.modules[path.stem] = known
        other = spec.origin if spec is not None else "elsewhere"
        raise InputError(
            f"the task file {name!r} has the name of a module that Python imports from {other}; "
            f"rename the file"
        )
    module = import_module(path.stem)
    module.__task_file__ = str(path)  # type: ignore[attr-defined]
    return module


def _add_to_path(folder: Path) -> None:
    """Last on the path, and for good: loader processes import a task's module by its name."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _parse_setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise InputError(f"--set {text!r} is not name=value")
    try:
        return name, literal_eval(value)
    except (ValueError, SyntaxError, TypeError):
        return name, value


def _check_arguments(spec: str, cls: type[Task], arguments: dict[str, Any]) -> None:
    signature = inspect.signature(cls)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        names = [name for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD]
        takes = ", ".join(names) or "no arguments"
        unknown = [name for name in arguments if name not in names]
        close = get_close_matches(unknown[0], names, 1) if unknown else []
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise InputError(f"task {spec!r}: {error}{hint} (it takes: {takes})") from None
