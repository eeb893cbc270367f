"""`hvdtrain train`, which `hvdtrain` without a command runs too."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.command_options import FIELDS, check_known, kind_of, option, origins, train_option
from hvdtrain.compare import probe
from hvdtrain.errors import InputError
from hvdtrain.job import elastic_world, job_secret
from hvdtrain.job.world import RESTART_VARIABLE, detect
from hvdtrain.liveness import failure
from hvdtrain.system import cores, files
from hvdtrain.training import run_dir
from hvdtrain.training.config import SECTIONS, TrainConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "HVDTRAIN"
NEXT = """\
next     2 ranks:   torchrun --nproc-per-node 2 -m hvdtrain
         compare:   hvdtrain compare
         own task:  hvdtrain init my.py"""
"""What `hvdtrain` alone prints at its end."""


def _read_file(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Set the keys of the TOML file as the defaults of the other options: a click callback."""
    if value is None:
        return
    try:
        text = files.read(Path(value)).decode()
        # As the same texts on the command line, which click converts and checks.
        ctx.default_map = {}
        for name, item in tomllib.loads(text).items():
            key = name.replace("-", "_")
            check_known(key, FIELDS, f"unknown key {key!r} in --config {value}")
            if key == "set" and isinstance(item, dict):
                item = [f"{name}={setting!r}" for name, setting in item.items()]
            if isinstance(FIELDS[key].default, tuple):  # it may be given several times
                ctx.default_map[key] = [*map(str, item if isinstance(item, list) else [item])]
            else:
                ctx.default_map[key] = str(item)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read --config {value}: {error}") from None
    except RecursionError:
        raise InputError(f"--config {value} is not TOML: nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError, or a number of too many digits
        raise InputError(f"--config {value} is not TOML: {error}") from None


def check_environment() -> None:
    """Raise InputError for a variable HVDTRAIN_* that is none of an option."""
    known = [f"{PREFIX}_{name.upper()}" for name in (*FIELDS, "config")]
    # Of hvdrun, of a job, of hvdtrain compare; the last one shows every frame of an error.
    known += [
        RESTART_VARIABLE,
        cores.VARIABLE,
        *elastic_world.VARIABLES,
        job_secret.VARIABLE,
        probe.VARIABLE,
        failure.DEBUG_VARIABLE,
        f"{PREFIX}_PURE_PYTHON",  # of transports/page.py, which imports torch
    ]
    for name in os.environ:
        if name.startswith(f"{PREFIX}_") and name not in known:
            from hvdtrain.hvd.engine.settings import OWN  # imports torch, which is slow

            check_known(name, dict.fromkeys((*known, *OWN)), f"unknown environment variable {name}")


class _InSections(click.Command):
    """A command whose help shows the options in the sections of TrainConfig."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each section, the common options first."""
        rows = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        others = " ".join(n for n in rows if n and n not in FIELDS)
        for title, names in {**SECTIONS, "Other options": others}.items():
            with formatter.section(title):
                formatter.write_dl([row for name in names.split() if (row := rows[name])])


@click.command(
    "train",
    _InSections,
    context_settings={"auto_envvar_prefix": PREFIX},
    epilog="Every option can also be set as HVDTRAIN_<NAME>, or as a key of the --config file. "
    "A flag overrides a variable, and a variable overrides the file.",
    params=[
        option(
            "--config",
            "A TOML file of these options, such as `epochs = 3`.",
            is_eager=True,
            expose_value=False,
            callback=_read_file,
            metavar="FILE.toml",
        ),
        # torch.distributed.launch passes it to every rank; LOCAL_RANK has the same value.
        option("--local-rank", type=int, hidden=True, expose_value=False, allow_from_autoenv=False),
        *(train_option(name) for name in FIELDS),
    ],
)
def command(**values: Any) -> None:
    """Train one task on the ranks that the launcher started."""
    check_environment()
    given = origins()
    if values["resume"] in ("auto", "must") and values["run_dir"]:
        before = options_before(Path(values["run_dir"]), {*given})
        values |= before
        given |= dict.fromkeys(before, "run.json")
    config = TrainConfig(**values)
    config.check()
    # `failure.guard` handles the others, so that Ctrl-C and a SIGTERM after it count as one.
    with failure.ended_by(signal.SIGUSR1, signal.SIGUSR2):
        run(config, given)
    if not given and detect().launcher == "none":
        click.echo(NEXT)


def options_before(path: Path, given: set[str]) -> dict[str, Any]:
    """Return the options of a run that is resumed: those that are not its defaults, not given now,
    and not about where the ranks run. Empty if there is no run yet.
    """
    left_out = {*given, *SECTIONS["Where it runs"].split(), *"backend run_dir resume quiet".split()}
    for pair in ({"epochs", "max_steps"}, {"batch_size", "global_batch_size"}):
        if pair & given:
            left_out |= pair  # one decides about the other
    try:
        config = run_dir.read(path).get("config")
    except InputError:
        return {}
    if not isinstance(config, dict):
        return {}
    return {
        name: value
        for name, item in FIELDS.items()
        if name in config and name not in left_out
        if (value := _from_json(name, config[name])) != item.default
    }


def _from_json(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return float(value) if kind_of(name) is float and value is not None else value  # "inf"


def run(config: TrainConfig, given: dict[str, str]) -> None:
    """Open the backend, load the task and train; `given`: where options are from. Collective: every
    rank calls it.
    """
    from hvdtrain.backends import choose, open_backend
    from hvdtrain.training import methods
    from hvdtrain.training.task import load_task

    methods.check(config, choose(config.backend, detect())[0])
    from hvdtrain.training.trainer import Trainer

    with open_backend(
        config.backend, options=config.backend_options(), agree_on=config.agreed()
    ) as backend:
        with backend.share_errors():
            task = load_task(config.task, config.set)
        trainer = Trainer(task, backend, config, given)
        if config.quiet:
            trainer.set_up(record=False)
            for _ in trainer.steps():
                pass
        else:
            trainer.fit()
