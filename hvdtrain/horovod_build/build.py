"""Execute a plan: build a wheel in a temporary folder, and only then change the environment.

Used by `install`. The output of pip goes to a log, from which `buildlog` reads steps and errors.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from hvdtrain.errors import HvdtrainError, InputError
from hvdtrain.horovod_build import buildlog, recipe
from hvdtrain.horovod_build.build_plan import BuildPlan, Facts
from hvdtrain.horovod_build.buildlog import Step
from hvdtrain.system import signals
from hvdtrain.system.commands import own_environment, started

Print = Callable[[str], None]
Show = Callable[[Step], None]


class BuildFailed(HvdtrainError):
    """Horovod could not be built or installed."""


def build_and_install(facts: Facts, plan: BuildPlan, log: Path | None, echo: Print) -> None:
    """Build Horovod, and install it in place of any installed one.

    The log goes to `log`, else to a temporary file that is removed after a success. Raises
    BuildFailed with the compiler's first errors; the previous Horovod is then still installed.
    """
    log_path = log or _temporary_log()
    try:
        file = open(log_path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
    except OSError as error:
        raise InputError(f"--log {log_path} cannot be written: {error.strerror}") from None
    replaced = False
    try:
        show = BuildProgress(echo)
        # Ignore errors: a compiler that is still exiting may write while the folder is removed.
        folder = tempfile.TemporaryDirectory(prefix="hvdtrain-horovod-", ignore_cleanup_errors=True)
        with file, folder as name:
            wheel = _build_wheel(facts, plan, Path(name).resolve(), file, show)
            # pip restores the old package after an error but not after Ctrl-C, so defer signals.
            with signals.deferred(*signals.STOP, signal.SIGHUP):
                show(Step("install", 100))
                command, failure = recipe.install_command(wheel), "Horovod's wheel does not install"
                _logged(command, own_environment(), file, show, failure)
                replaced = True
    except (KeyboardInterrupt, SystemExit):
        state = "is the new one, not checked yet" if replaced else "is as it was before"
        echo(f"stopped; Horovod here {state}; log: {log_path}")
        raise
    except BuildFailed as error:
        raise BuildFailed(f"{error}\n{_explain(log_path)}\nfull log: {log_path}") from None
    if log is None:
        log_path.unlink()


class BuildProgress:
    """Prints one line for each phase of a build, and for each quarter of the compilation."""

    def __init__(self, echo: Print, clock: Callable[[], float] = time.monotonic) -> None:
        self._echo = echo
        self._clock = clock
        self._start = clock()
        self._phase = ""
        self._quarter = 0

    def __call__(self, step: Step) -> None:
        """Print a step if it is new: parallel make may report percentages out of order."""
        quarter = max((q for q in (25, 50, 75) if q <= step.percent), default=0)
        if step.phase == self._phase and quarter <= self._quarter:
            return
        new_phase, self._phase, self._quarter = step.phase != self._phase, step.phase, quarter
        percent = f" {step.percent}%" if quarter and not new_phase else ""
        self._echo(f"{self._clock() - self._start:5.0f} s  {step.phase}{percent}")


def _build_wheel(facts: Facts, plan: BuildPlan, folder: Path, log: IO[str], show: Show) -> Path:
    base = own_environment()
    files = recipe.cmake_files(plan, folder, base.get("CMAKE_TOOLCHAIN_FILE"))
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    env = recipe.build_environment(plan, facts, folder, base)
    _logged(recipe.wheel_command(folder / "wheel"), env, log, show, "Horovod does not build")
    return next((folder / "wheel").glob("horovod-*.whl"))


def _logged(
    command: list[str], env: dict[str, str], log: IO[str], show: Show, failure: str
) -> None:
    """Run a command, write its output to the log, and show its steps. Raises BuildFailed."""
    log.write(f"$ {' '.join(command)}\n")
    with started(command, env=env) as child:
        assert child.stdout is not None
        for line in child.stdout:
            log.write(line)
            step = buildlog.step_of(line)
            if step:
                show(step)
        if child.wait() != 0:
            raise BuildFailed(f"{failure} (exit status {child.returncode})")


def _explain(log: Path) -> str:
    """Return the first errors of a log and a hint, one per line."""
    with open(log, encoding="utf-8", errors="replace") as lines:
        errors = buildlog.first_errors(lines)
    advice = buildlog.hint(errors)
    found = [f"  {line}" for line in errors] or ["  no compiler error in the log"]
    return "\n".join([*found, *([f"hint: {advice}"] if advice else [])])


def _temporary_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="hvdtrain-install-horovod-", suffix=".log")
    os.close(handle)
    return Path(name)
