"""`hvdtrain evaluate`: the metrics of trained weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.cli.command_options import PATH, option, origins, train_option
from hvdtrain.cli.train import PREFIX, check_environment
from hvdtrain.errors import InputError, printable
from hvdtrain.training import run_dir
from hvdtrain.training.config import TrainConfig

if TYPE_CHECKING:
    from hvdtrain.training.weights import Weights

# What a run says, unless an option does.
_OF_RUN = "task set seed precision opt_level batch_size".split()
# What may differ from one launch to the next.
_OF_LAUNCH = "backend transport device threads workers timeout".split()


def _config_of(found: Weights, given: dict[str, Any], launch: TrainConfig) -> TrainConfig:
    """Return the options of the run that wrote the weights, with those that are given, and those of
    this launch. Raises InputError if the run does not say what the task is, and no option does.
    """
    values: dict[str, Any] = {}
    with run_dir.checked((found.run_dir or found.path) / "run.json"):
        if found.run:
            before = found.run["config"]
            values = {name: before[name] for name in _OF_RUN if name in before}
            # Whichever option it is from.
            values["batch_size"] = (
                before.get("eval_batch_size") or found.run["ledger"]["micro_batch"]
            )
        values |= {**given, "set": (*values.get("set", ()), *given.get("set", ()))}
        if "task" not in values:
            raise InputError(f"{found.path} does not name its task; give --task")
        config = dataclasses.replace(launch, **values)
        config.check()
    return config


def _check_task_of_run(task: str, found: Weights, is_quiet: bool) -> None:
    """Print which file a task of run.json is. Raises InputError unless it is built in, or below the
    current folder and outside the run: a run that was received must not choose the code.
    """
    from hvdtrain.tasks import TASKS
    from hvdtrain.training import user_module

    if task in TASKS:
        return
    assert found.run_dir is not None  # else no run.json names a task
    files, here, run = user_module.files_of(task), Path.cwd(), found.run_dir.resolve()
    if not files or not all(f.is_relative_to(here) and not f.is_relative_to(run) for f in files):
        where = f" ({files[-1]})" if files else ""
        raise InputError(
            f"the run.json of {found.run_dir} names the task {task}{where}, which is not below "
            f"the current folder; if you trust that file, give --task {task}"
        )
    click.echo(printable(f"task     {task} of run.json: {files[-1]}"), err=is_quiet)


@click.command(
    "evaluate",
    context_settings={"auto_envvar_prefix": PREFIX},
    params=[
        click.Argument(["path"], metavar="RUN", type=PATH),
        # Not from the environment: HVDTRAIN_EMA is the decay of a training run.
        option(
            "--best",
            "The checkpoint that --keep-best kept.",
            is_flag=True,
            allow_from_autoenv=False,
        ),
        option(
            "--ema",
            "The average of the weights that a run with --ema has evaluated.",
            is_flag=True,
            allow_from_autoenv=False,
        ),
        option("--json as_json", "Print JSON, in one line.", is_flag=True),
        *(train_option(name, "the run's") for name in _OF_RUN),
        *(train_option(name) for name in _OF_LAUNCH),
    ],
    epilog="RUN is a run directory (its newest checkpoint), a checkpoint, or a file of weights "
    "(model.pt, model.safetensors), which needs --task.",
)
def command(path: Path, best: bool, ema: bool, as_json: bool, **values: Any) -> None:
    """Evaluate trained weights: the metrics of the task's evaluation data.

    \b
    hvdtrain evaluate runs/20260101-120000-digits-ddp
    torchrun --nproc-per-node 2 -m hvdtrain evaluate model.pt --task my.py:MyTask

    \b
    exit code 0   evaluated
              2   the weights are missing, damaged, or from another model
    """
    from hvdtrain.backends import open_backend
    from hvdtrain.system.files import finite
    from hvdtrain.training import weights
    from hvdtrain.training.console import describe
    from hvdtrain.training.inference import Inference
    from hvdtrain.training.task import load_task

    check_environment()
    launch = TrainConfig(**{name: values[name] for name in _OF_LAUNCH})
    launch.check()
    by_name = origins()
    given = {name: values[name] for name in _OF_RUN if name in by_name}
    agreed = {**launch.agreed(), "RUN": str(path), **given}
    with open_backend(launch.backend, options=launch.backend_options(), agree_on=agreed) as backend:
        found, config = None, launch
        with backend.share_errors():
            if backend.world.rank == 0:  # it alone reads and prints
                found = weights.find(path, best, ema)
                config = _config_of(found, given, launch)
                if "task" not in given:
                    _check_task_of_run(config.task, found, as_json)
        config = backend.broadcast_object(config)
        with backend.share_errors():
            task = load_task(config.task, config.set)
        inference = Inference(task, backend, config, found)
        if found is not None:
            ranks = f"{backend.world.size} rank{'s' * (backend.world.size > 1)}"
            over = backend.transport and f" over {backend.transport}"
            what = f"{config.task}, {ranks}, {backend.name}{over}"
            what += ", average of --ema" * found.ema
            click.echo(printable(f"weights  {found.path} ({what})"), err=as_json)
        metrics = {f"eval_{name}": value for name, value in inference.evaluate().items()}
        if found is not None:
            click.echo(json.dumps(finite(metrics)) if as_json else f"done     {describe(metrics)}")
