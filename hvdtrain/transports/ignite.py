"""PyTorch-Ignite treats our process groups as Gloo's.

Used by `transports` when it is imported. ignite's `auto_model` wraps a model for the groups nccl,
gloo and mpi only: with "shm" each rank would train on its own, without an error. So ignite gets
another list of names, and another answer, whether it is imported before or later.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_NATIVE = "ignite.distributed.comp_models.native"


def add_name(name: str) -> None:
    """Let ignite accept this backend, and call it gloo. Not collective."""
    if _NATIVE in sys.modules:
        _add_to(sys.modules[_NATIVE], name)
    else:
        sys.meta_path.insert(0, _WhenImported(name))


def _add_to(native: ModuleType, name: str) -> None:
    model: Any = getattr(native, "_NativeDistModel", None)
    if model is None or name in model.available_backends:
        return
    model.available_backends += (name,)
    own_backend = model.backend

    def backend(self: Any) -> str:
        own = str(own_backend(self))
        return "gloo" if own == name else own

    model.backend = backend


class _WhenImported(MetaPathFinder):
    """Calls `_add_to` as soon as ignite's module has been executed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NATIVE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _add_to(module, self._name)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
