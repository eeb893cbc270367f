"""The command `hvdtrain install-horovod`, from the facts to the final table. Used by `cli`."""

from __future__ import annotations

import os
import shlex
import signal
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.errors import BackendUnavailable, InputError
from hvdtrain.horovod_build import INSTALL, installed_horovod, recipe
from hvdtrain.horovod_build.build import Print, build_and_install
from hvdtrain.horovod_build.build_plan import BuildPlan, Choices, Facts, Tool, decide, shortfall
from hvdtrain.horovod_build.check import CheckFailed, Row, check, failures, probe
from hvdtrain.horovod_build.facts import gather
from hvdtrain.system import signals
from hvdtrain.system.commands import own_environment


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    choices: Choices = field(default_factory=Choices)
    force: bool = False
    check: bool = False
    dry_run: bool = False
    log: Path | None = None


def install_horovod(options: Options, echo: Print = print) -> None:
    """Build, install and check Horovod, unless the installed one satisfies the options.

    Raises BackendUnavailable if the machine lacks a requirement, InputError for invalid options,
    BuildFailed if the build or installation fails, CheckFailed if the installed Horovod does.
    """
    _validate(options)
    with signals.raised_as_exit(signal.SIGTERM, signal.SIGHUP):
        if options.check:
            _check(echo)
            return
        facts = gather()
        plan = decide(facts, options.choices)
        for line in describe(facts, plan):
            echo(line)
        if options.dry_run:
            _require(plan)
        reason, rows = _reason_to_build(facts, plan, options)
        if options.dry_run:
            _dry_run(facts, plan, reason, echo)
        elif reason is None:
            echo("Horovod here does all that was asked: nothing to do (--force builds it anew)")
            _conclude(rows, echo)
        else:
            _require(plan)
            echo(f"building Horovod {recipe.HOROVOD_VERSION}: {reason}; this takes some minutes")
            build_and_install(facts, plan, options.log, echo)
            _check(echo)


def describe(facts: Facts, plan: BuildPlan) -> list[str]:
    """Return one line for each fact and decision."""
    torch = facts.torch
    abi = "" if torch is None or torch.cxx11_abi else ", old C++ ABI"
    kind = torch and (f"CUDA {torch.cuda}" if torch.cuda else torch.hip or "CPU")
    return [
        f"torch        {f'{torch.version} ({kind}{abi})' if torch else 'missing'}",
        f"compiler     {_tool(facts.cxx)}",
        f"cmake        {_tool(facts.cmake)}",
        f"MPI          {plan.mpi_note}",
        f"GPU          {plan.gpu_note}",
        f"jobs         {plan.jobs} ({facts.cpus} cores, {facts.memory_gib:.0f} GiB of memory)",
    ]


def _tool(tool: Tool) -> str:
    return f"{tool.command} ({tool.about})" if tool.works else "missing"


def _validate(options: Options) -> None:
    others = {
        "--force": options.force,
        "--dry-run": options.dry_run,
        "--log": options.log is not None,
        "--jobs": options.choices.jobs is not None,
    }
    given = [name for name, is_given in others.items() if is_given]
    if options.check and given:
        raise InputError(f"--check builds nothing, so {given[0]} has no place beside it")
    if options.log is not None and not options.log.parent.is_dir():
        raise InputError(f"--log {options.log}: the folder {options.log.parent} does not exist")


def _require(plan: BuildPlan) -> None:
    if plan.missing:
        raise BackendUnavailable("missing here: " + "\nmissing here: ".join(plan.missing))


def _reason_to_build(
    facts: Facts, plan: BuildPlan, options: Options
) -> tuple[str | None, list[Row]]:
    """Return why the installed Horovod must be replaced, or None; and its check, if it was run."""
    installed = installed_horovod()
    if options.force or installed is None or facts.torch is None:
        return "--force" if options.force else "none is installed", []
    problem = installed.problem(facts.torch.version)
    if problem:
        return problem.partition("; run:")[0], []  # without the advice to run this command
    built = probe()
    if isinstance(built, str):
        return f"the installed one does not import ({built})", []
    lack = shortfall(built, plan, options.choices)
    if lack:
        return f"the installed one is built {lack}", []
    if options.dry_run:  # starts no ranks
        return None, []
    rows = check(installed)
    failed = failures(rows)
    return (f"the installed one fails its check ({failed})" if failed else None), rows


def _dry_run(facts: Facts, plan: BuildPlan, reason: str | None, echo: Print) -> None:
    """Print what a build would write, set and run."""
    echo(f"would build: {reason}" if reason else "would do nothing: Horovod here will do; --force:")
    folder = Path("BUILD")  # stands for a temporary folder
    base = own_environment()
    for path, text in recipe.cmake_files(plan, folder, base.get("CMAKE_TOOLCHAIN_FILE")).items():
        echo(f"\n# {path}\n{text.rstrip()}")
    echo("\n# environment")
    env = recipe.build_environment(plan, facts, folder, base)
    for name in sorted(name for name in env if env[name] != os.environ.get(name)):
        echo(f"{name}={shlex.quote(env[name])}")
    for name in sorted(set(base) - set(env)):
        echo(f"unset {name}")
    echo("\n# commands")
    echo(shlex.join(recipe.wheel_command(folder / "wheel")))
    echo(shlex.join(recipe.install_command(folder / "wheel" / "horovod-*.whl")))
    echo(f"{INSTALL} --check")


def _check(echo: Print) -> None:
    """Check the installed Horovod. Raises CheckFailed, or BackendUnavailable when there is none."""
    installed = installed_horovod()
    if installed is None:
        raise BackendUnavailable(f"Horovod is not installed; run: {INSTALL}")
    echo("check: imports Horovod and runs 2 ranks under each launcher")
    _conclude(check(installed), echo)


def _conclude(rows: list[Row], echo: Print) -> None:
    echo("")
    for row in rows:
        echo(str(row))
    failed = failures(rows)
    if failed:
        again = "" if INSTALL in failed else f"; {INSTALL} --force builds it anew"
        raise CheckFailed(f"Horovod is installed and does not work: {failed}{again}")
