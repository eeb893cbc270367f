"""Command-line options made from the fields of TrainConfig: name, type, default and help text; and
where the values of options are from.

Used by the commands `train`, `compare`, `evaluate` and `predict`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import click

from hvdtrain.training.config import TrainConfig, flag

SOURCES = {
    click.core.ParameterSource.COMMANDLINE: "flag",
    click.core.ParameterSource.ENVIRONMENT: "environment",
    click.core.ParameterSource.DEFAULT_MAP: "file",
}
FIELDS = {item.name: item for item in dataclasses.fields(TrainConfig)}
_HINTS = typing.get_type_hints(TrainConfig)


def train_option(name: str, default: str = "") -> click.Option:
    """Return the click option of a field. `default`: what help says in place of the field's."""
    item, kind = FIELDS[name], kind_of(name)
    made: dict[str, Any] = {"default": item.default, "help": item.metadata["help"]}
    names = flag(name)
    if kind is bool:  # a flag counts before a variable, also one that takes it back
        opposite = name.removeprefix("no_") if name.startswith("no_") else f"no_{name}"
        names = f"{names}/{flag(opposite)}"
    elif typing.get_origin(kind) is tuple:
        made.update(multiple=True, metavar=item.metadata["metavar"])
    else:
        choices = item.metadata["choices"]
        made["type"] = click.Choice(choices) if choices else kind
    if default:
        made["help"] = made["help"].partition(" [default")[0]
    shown = default or item.default not in (None, (), False)
    return click.Option([names, name], show_default=shown, **made)


def origins_of(context: click.Context) -> dict[str, str]:
    """Return where the values of the given options are from, by name; without defaults."""
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
