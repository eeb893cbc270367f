"""Execute a plan: build a wheel in a temporary folder, and only then change the environment.

Used by `install`. The output of pip goes to a log, from which `buildlog` reads steps and errors.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from hvdtrain.errors import HvdtrainError, InputError
from hvdtrain.horovod_build import buildlog, recipe
from hvdtrain.horovod_build.build_plan import BuildPlan, Facts
from hvdtrain.system import signals
from hvdtrain.system.commands import own_environment, started

Print = Callable[[str], None]


class BuildFailed(HvdtrainError):
    """Horovod could not be built or installed."""


def build_and_install(facts: Facts, plan: BuildPlan, log: Path | None, echo: Print) -> None:
    """Build Horovod, and install it in place of any installed one.

    The log goes to `log`, else to a temporary file that is removed after a success. Raises
    BuildFailed with the compiler's first errors; the previous Horovod is then still installed.
    """
    prefix = "hvdtrain-install-horovod-"
    target: Path | int
    target, path = (log, str(log)) if log else tempfile.mkstemp(".log", prefix)
    try:
        file = open(target, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
    except OSError as error:
        raise InputError(f"--log {log} cannot be written: {error.strerror}") from None
    state = "is unchanged"
    try:
        show = BuildProgress(echo)
        # Ignore errors: a compiler that is still exiting may write while the folder is removed.
        folder = tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-", ignore_cleanup_errors=True)
        with file, folder as name:
            wheel = _build_wheel(facts, plan, Path(name).resolve(), file, show)
            # pip restores the old package after an error but not after Ctrl-C, so defer signals.
            with signals.deferred(*signals.STOP, signal.SIGHUP):
                show("install")
                command, failure = recipe.install_command(wheel), "Horovod's wheel does not install"
                _logged(command, own_environment(), file, show, failure)
                state = "is the new one, not checked yet"
    except (KeyboardInterrupt, SystemExit):
        echo(f"stopped; the installed Horovod {state}; log: {path}")
        raise
    except BuildFailed as error:
        raise BuildFailed(f"{error}\n{_explain(path)}\nfull log: {path}") from None
    if log is None:
        Path(path).unlink()


class BuildProgress:
    """Prints a line for each step of a build, once: parallel make reports some out of order."""

    def __init__(self, echo: Print) -> None:
        self._echo, self._start = echo, time.monotonic()
        self._steps: set[str | None] = {None}

    def __call__(self, step: str | None) -> None:
        """Print a step if it is new."""
        if step not in self._steps:
            self._steps.add(step)
            self._echo(f"{time.monotonic() - self._start:5.0f} s  {step}")


def _build_wheel(
    facts: Facts, plan: BuildPlan, folder: Path, log: IO[str], show: BuildProgress
) -> Path:
    base = own_environment()
    for path, text in recipe.cmake_files(plan, folder, base).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    env = recipe.build_environment(plan, facts, folder, base)
    _logged(recipe.wheel_command(folder / "wheel"), env, log, show, "Horovod does not build")
    return next((folder / "wheel").glob("horovod-*.whl"))


def _logged(
    command: list[str], env: dict[str, str], log: IO[str], show: BuildProgress, failure: str
) -> None:
    """Run a command, write its output to the log, and show its steps. Raises BuildFailed."""
    log.write(f"$ {' '.join(command)}\n")
    with started(command, env=env) as child:
        assert child.stdout is not None
        for line in child.stdout:
            log.write(line)
            show(buildlog.step_of(line))
        if child.wait() != 0:
            raise BuildFailed(f"{failure} (exit status {child.returncode})")


def _explain(log: str) -> str:
    """Return the first errors of a log and a hint, one per line."""
    with open(log, encoding="utf-8", errors="replace") as lines:
        errors = buildlog.first_errors(lines)
    advice = buildlog.hint(errors)
    found = [f"  {line}" for line in errors] or ["  no compiler error in the log"]
    return "\n".join([*found, *([f"hint: {advice}"] if advice else [])])
