"""The options of the commands: how they are declared, where their values are from, unknown names.

Used by the commands with more than a few. Those of `train` are made from the fields of TrainConfig.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from hvdtrain.errors import InputError, did_you_mean
from hvdtrain.training.config import TrainConfig, flag

PATH = click.Path(path_type=Path)
SOURCES = {
    ParameterSource.COMMANDLINE: "flag",
    ParameterSource.ENVIRONMENT: "environment",
    ParameterSource.DEFAULT_MAP: "file",
}
FIELDS = {item.name: item for item in dataclasses.fields(TrainConfig)}
_HINTS = typing.get_type_hints(TrainConfig)


def option(names: str, text: str | None = None, **more: Any) -> click.Option:
    """Return a click option. `names`: its flags, and the name of its value if none of them is."""
    return click.Option(names.split(), help=text, **more)


count = partial(option, type=click.IntRange(min=1), metavar="N")


def check_known(name: str, known: Collection[str], problem: str) -> None:
    """Raise InputError, with the closest name or all that are known, for a name that is not."""
    if name not in known:
        hint = did_you_mean(name, known).rstrip() or f"one of: {', '.join(known)}"
        raise InputError(f"{problem}; {hint}")


def train_option(name: str, default: str = "") -> click.Option:
    """Return the click option of a field. `default`: what help says in place of the field's."""
    item, kind = FIELDS[name], kind_of(name)
    names, text = flag(name), item.metadata["help"]
    made: dict[str, Any] = {}
    if kind is bool:  # a flag counts before a variable, also one that takes it back
        opposite = name.removeprefix("no_") if name.startswith("no_") else f"no_{name}"
        names = f"{names}/{flag(opposite)}"
    elif typing.get_origin(kind) is tuple:
        made.update(multiple=True, metavar=item.metadata["metavar"])
    else:
        choices = item.metadata["choices"]
        made["type"] = click.Choice(choices) if choices else kind
    if default:
        text = text.partition(" [default")[0]
    made["show_default"] = default or item.default not in (None, (), False)
    return option(f"{names} {name}", text, default=item.default, **made)


def origins() -> dict[str, str]:
    """Return where the values of the options of this call are from, by name; without defaults."""
    context = click.get_current_context()
    return {
        name: SOURCES[source]
        for name in context.params
        if (source := context.get_parameter_source(name)) in SOURCES
    }


def kind_of(name: str) -> Any:
    """Return the type of a field; `int | None` gives int, and `int | str` gives str."""
    hint = _HINTS[name]
    if isinstance(hint, types.UnionType):
        return [part for part in typing.get_args(hint) if part is not type(None)][-1]
    return hint
