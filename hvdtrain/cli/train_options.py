"""Command-line options made from the fields of TrainConfig: name, type, default and help text.

Used by the commands `train` and `compare`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import click

from hvdtrain.training.config import TrainConfig, flag

FIELDS = {item.name: item for item in dataclasses.fields(TrainConfig)}
_HINTS = typing.get_type_hints(TrainConfig)


def train_option(name: str) -> click.Option:
    """Return the click option of a field."""
    item, kind = FIELDS[name], kind_of(name)
    made: dict[str, Any] = {"default": item.default, "help": item.metadata["help"]}
    if kind is bool:
        made["is_flag"] = True
    elif typing.get_origin(kind) is tuple:
        made.update(multiple=True, metavar=item.metadata["metavar"])
    else:
        choices = item.metadata["choices"]
        made["type"] = click.Choice(choices) if choices else kind
    return click.Option([flag(name), name], show_default=item.default not in (None, ()), **made)


def kind_of(name: str) -> Any:
    """Return the type of a field; `int | None` gives int."""
    hint = _HINTS[name]
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint
