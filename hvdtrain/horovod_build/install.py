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
from hvdtrain.horovod_build.build_plan import BuildPlan, Choices, Facts, decide, shortfall
from hvdtrain.horovod_build.check import CheckFailed, check, probe
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
    if options.check and options != Options(check=True):
        raise InputError("--check builds nothing, so it takes no other option")
    with signals.raised_as_exit(signal.SIGTERM, signal.SIGHUP):
        if options.check:
            _check(echo)
            return
        facts = gather()
        plan = decide(facts, options.choices)
        describe(facts, plan, echo)
        reason = _reason_to_build(facts, plan, options, echo)
        if reason is None and not options.dry_run:
            echo("the installed Horovod satisfies the options: nothing to do (--force rebuilds it)")
            return
        if plan.missing:
            raise BackendUnavailable("missing here: " + "\nmissing here: ".join(plan.missing))
        if options.dry_run:
            _dry_run(facts, plan, reason, echo)
            return
        echo(f"building Horovod {recipe.HOROVOD_VERSION}: {reason}; this takes some minutes")
        build_and_install(facts, plan, options.log, echo)
        _check(echo)


def describe(facts: Facts, plan: BuildPlan, echo: Print) -> None:
    """Print one line for each fact and decision."""
    nccl = plan.nccl.library if plan.nccl else ""
    rows = {
        "torch": facts.torch.version or "missing",
        "compiler": facts.cxx.command,
        "cmake": facts.cmake.command,
        "MPI": f"no: {plan.without_mpi}" if plan.without_mpi else facts.mpicxx.command,
        "NCCL": f"no: {plan.without_nccl}" if plan.without_nccl else nccl,
        "jobs": f"{plan.jobs} ({facts.cpus} cores, {facts.memory_gib:.0f} GiB of memory)",
    }
    for name, text in rows.items():
        echo(f"{name:<12} {text}")


def _reason_to_build(facts: Facts, plan: BuildPlan, options: Options, echo: Print) -> str | None:
    """Return why the installed Horovod must be replaced, or None. Its check prints rows."""
    installed = installed_horovod()
    if options.force or installed is None:
        return "--force" if options.force else "none is installed"
    if problem := installed.problem(facts.torch.version):
        return problem.partition("; run:")[0]  # without the advice to run this command
    built = probe()
    if isinstance(built, str):
        return f"the installed one does not import ({built})"
    if lack := shortfall(built, plan, options.choices):
        return f"the installed one is built {lack}"
    failed = "" if options.dry_run else check(installed, echo)  # a dry run starts no ranks
    return f"the installed one fails its check ({failed})" if failed else None


def _dry_run(facts: Facts, plan: BuildPlan, reason: str | None, echo: Print) -> None:
    """Print what a build would write, set and run."""
    echo(f"would build: {reason}" if reason else "would do nothing; with --force it would do this:")
    folder = Path("BUILD")  # stands for a temporary folder
    base = own_environment()
    for path, text in recipe.cmake_files(plan, folder, base).items():
        echo(f"\n# {path}\n{text.rstrip()}")
    echo("\n# environment")
    env = recipe.build_environment(plan, facts, folder, base)
    for name in sorted({*env, *base}):
        if name not in env:
            echo(f"unset {name}")
        elif env[name] != os.environ.get(name):
            echo(f"{name}={shlex.quote(env[name])}")
    echo("\n# commands")
    echo(shlex.join(recipe.wheel_command(folder / "wheel")))
    echo(shlex.join(recipe.install_command(folder / "wheel" / "horovod-*.whl")))
    echo(f"{INSTALL} --check")


def _check(echo: Print) -> None:
    """Check the installed Horovod. Raises CheckFailed, or BackendUnavailable when there is none."""
    installed = installed_horovod()
    if installed is None:
        raise BackendUnavailable(f"Horovod is not installed; run: {INSTALL}")
    echo("check: imports Horovod and runs 2 ranks under each launcher\n")
    if failed := check(installed, echo):
        again = f"{INSTALL} --force rebuilds it"
        raise CheckFailed(f"Horovod is installed but does not work: {failed}; {again}")
