"""`hvdtrain train`, which is also what `hvdtrain` alone runs."""

from __future__ import annotations

import os
import sys
import typing
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.options import FIELDS, kind_of, train_option
from hvdtrain.errors import InputError
from hvdtrain.training.config import TrainConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "HVDTRAIN"
_SOURCES = {
    click.core.ParameterSource.COMMANDLINE: "flag",
    click.core.ParameterSource.ENVIRONMENT: "environment",
    click.core.ParameterSource.DEFAULT_MAP: "file",
}


def _read_file(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Make the keys of the TOML file the defaults of the other options."""
    if value is None:
        return
    try:
        table = tomllib.loads(Path(value).read_bytes().decode())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read --config {value}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"--config {value} is not TOML: {error}") from None
    table = {key.replace("-", "_"): item for key, item in table.items()}
    for key in table:
        _check_known(key, FIELDS, f"unknown key {key!r} in --config {value}")
    if isinstance(table.get("set"), dict):
        table["set"] = [f"{key}={item!r}" for key, item in table["set"].items()]
    for key, item in table.items():
        _check_type(key, item, f"--config {value}: {key} = {item!r}")
    ctx.default_map = table


def _check_type(key: str, item: object, where: str) -> None:
    """Raise InputError where click would convert silently, such as 2.5 epochs to 2."""
    kind = kind_of(key)
    if typing.get_origin(kind) is tuple:
        if not (isinstance(item, list) and all(isinstance(part, str) for part in item)):
            raise InputError(f'{where} is not a table, nor a list such as ["name=value"]')
        return
    # In Python a bool is an int; and a whole number is also a float.
    if type(item) is kind or (kind is float and type(item) is int):
        return
    name = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[kind]
    raise InputError(f"{where} is not {name}")


def _check_environment() -> None:
    known = {f"{PREFIX}_{name.upper()}": name for name in (*FIELDS, "config")}
    unknown = [name for name in os.environ if name.startswith(f"{PREFIX}_") and name not in known]
    if unknown:
        from hvdtrain.hvd.engine.settings import OWN  # imports torch, which is slow

        for name in unknown:
            _check_known(name, {**known, **OWN}, f"unknown environment variable {name}")


def _check_known(name: str, known: typing.Mapping[str, object], problem: str) -> None:
    if name in known:
        return
    close = get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"one of: {', '.join(known)}"
    raise InputError(f"{problem}; {hint}")


@click.command(
    "train",
    context_settings={"auto_envvar_prefix": PREFIX},
    epilog="Every option can also be set as HVDTRAIN_<NAME>, or as a key of the --config file; "
    "a flag counts before a variable, and a variable before the file.",
    params=[
        click.Option(
            ["--config"],
            is_eager=True,
            expose_value=False,
            callback=_read_file,
            metavar="FILE.toml",
            help="A file of these options, such as `epochs = 3`.",
        ),
        # torch.distributed.launch passes it to every rank; the environment says the same.
        click.Option(
            ["--local-rank"], type=int, hidden=True, expose_value=False, allow_from_autoenv=False
        ),
        *(train_option(name) for name in FIELDS),
    ],
)
@click.pass_context
def command(ctx: click.Context, /, **values: Any) -> None:
    """Train one task, on the world that the launcher started."""
    _check_environment()
    origins = {}
    for name in values:
        source = ctx.get_parameter_source(name)
        if source in _SOURCES:
            origins[name] = _SOURCES[source]
    config = TrainConfig(**values)
    config.check()
    run(config, origins)


def run(config: TrainConfig, origins: dict[str, str]) -> None:
    """Open the backend, load the task and train. Collective: every rank of the job calls."""
    from hvdtrain.backends import open_backend
    from hvdtrain.training.task import load_task
    from hvdtrain.training.trainer import Trainer

    options, agreed = config.backend_options(), config.agreed()
    with open_backend(config.backend, options=options, agree_on=agreed) as backend:
        with backend.together():
            task = load_task(config.task, config.set)
        Trainer(task, backend, config, origins).fit()
