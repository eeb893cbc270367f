"""Importing what `--task` and `--callback` name: a class in a user's module or file.

`load_task` and `load_callback` use `load_named`, which looks it up in what `load_module` imports.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hvdtrain.errors import InputError


def load_named(spec: str, what: str, kind: str, is_wanted: Callable[[object], bool]) -> Any:
    """Return what `spec` names, `module:NAME` or `file.py:NAME`. Not collective.

    `what`: the option, `kind`: what `is_wanted` looks for, in messages. Raises InputError if it is
    not there, and lists what the module has.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise InputError(f"--{what} {spec!r} is not module:Class or file.py:Class")
    try:
        module = load_module(where, what)
    except SyntaxError as error:  # in this module, or in one that it imports
        place = f"{error.filename or where}, line {error.lineno or 1}"
        text = (error.text or "").strip()
        raise InputError(f"{place}: {error.msg}{f': {text:.80}' if text else ''}") from None
    found = getattr(module, name, None)
    if not is_wanted(found):
        own = ", ".join(
            key
            for key, value in vars(module).items()
            if is_wanted(value) and value.__module__ == module.__name__
        )
        raise InputError(f"{where} has no {kind} named {name!r}; it has: {own or 'none'}")
    return found


def files_of(spec: str) -> list[Path]:
    """Return the files that `load_named` would execute for `spec`, with symbolic links resolved,
    without importing anything; an empty list if it would find none. Not collective.
    """
    where = spec.rpartition(":")[0]
    if where.endswith(".py"):
        return [Path(where).resolve()]
    found, folders = [], [str(Path.cwd()), *sys.path]
    for part in where.split("."):
        module = PathFinder.find_spec(part, folders)
        if module is None:
            return []
        found += [Path(module.origin).resolve()] if module.has_location and module.origin else []
        folders = module.submodule_search_locations or []
    return found


def load_module(name: str, what: str) -> Any:
    """Import the module `name`, or the file if it ends in `.py`. Not collective.

    `what`: what is looked for in it, for messages. Raises InputError if it is not there, or cannot
    be imported under its own name; a SyntaxError, and an exception of its code, propagates.
    """
    if name.endswith(".py"):
        return _load_file(name, what)
    _add_to_path(Path.cwd())  # only `python -m` has put it on sys.path
    try:
        return import_module(name)
    except (ValueError, TypeError):
        raise InputError(f"{name!r} is not the name of a module") from None
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # another import in it has failed: its traceback shows where
        raise InputError(f"no module named {error.name!r} for the {what} {name!r}") from None


def _load_file(name: str, what: str) -> Any:
    """Import a user's file by its stem, unless it is imported already and has not changed since.

    Raises InputError if it is not there, cannot be imported by a name, or has the name of another
    module. `__user_file__` of the module is its path and when it was changed.
    """
    path = Path(name).resolve()
    if not path.is_file():
        raise InputError(f"no {what} file {name!r} in {Path.cwd()}")
    if not path.stem.isidentifier():
        raise InputError(
            f"the {what} file {name!r} has a name that Python cannot import; rename it, with only "
            "letters, digits and _"
        )
    known: Any = sys.modules.get(path.stem)
    stamp = path, path.stat().st_mtime_ns
    if hasattr(known, "__user_file__"):
        if known.__user_file__ == stamp:
            return known  # a task and a callback in one file
        del sys.modules[path.stem]  # an earlier file of the same name
    _add_to_path(path.parent)
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(path.stem)
    except ValueError:  # of a module without one, as `__main__` may be
        spec = None
    # Loader processes import the module by its name: the name must lead to this very file.
    origin = "elsewhere" if spec is None else spec.origin
    if origin is None or Path(origin).resolve() != path:
        if known is not None:
            sys.modules[path.stem] = known
        raise InputError(
            f"the {what} file {name!r} has the name of a module that Python imports from {origin}; "
            f"rename the file"
        )
    module = import_module(path.stem)
    module.__user_file__ = stamp  # type: ignore[attr-defined]
    return module


def _add_to_path(folder: Path) -> None:
    """Append `folder` to sys.path, permanently: loader processes import a task's module, too."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
