"""Every error that hvdtrain raises on purpose, and the exit code a command ends with.

    HvdtrainError(RuntimeError)   1   the root; never raised itself
      InputError                  2   an option, file, task or dataset that cannot be used
      LaunchError                 2   the launcher's environment is incomplete or contradictory
      BackendUnavailable          2   not installed, not built, or another launcher is needed
      WorldMismatch               2   ranks disagree: on the world, configuration or versions
      CheckpointError             2   missing, damaged, or of another model
      TrainingDiverged            3   the loss is not finite
      WorldError                  4   a peer has gone, or did not come in time
      BuildFailed, CheckFailed    1   of `hvdtrain install-horovod` (see hvdtrain.horovod_build)

An error outside this tree is a bug, ours or the task's: it ends with its traceback and exit code 1;
one that a task's code raised without the frames of libraries.
Ctrl-C ends with 130, SIGTERM with 143; a rank whose launcher has ended sends itself SIGTERM. Each
message says what happened, with the values, and what to do, in one line.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class HvdtrainError(RuntimeError):
    """The root of the tree. `exit_code` is what the command ends with."""

    exit_code = 1
    everywhere = False
    """True once every rank raises this same error, so that rank 0 alone needs to print it."""
    in_step = False
    """True where the ranks had met before: others that raise the same do so at about the same time.
    """


class InputError(HvdtrainError):
    """An option, a file, a task or a dataset that cannot be used."""

    exit_code = 2


class LaunchError(HvdtrainError):
    """The launcher's environment variables are incomplete or contradict one another."""

    exit_code = 2


class BackendUnavailable(HvdtrainError):
    """A backend that is not installed, not built, or that this launcher cannot carry."""

    exit_code = 2


class WorldMismatch(HvdtrainError):
    """Ranks disagree on the world, the configuration or the versions."""

    exit_code = 2


class CheckpointError(HvdtrainError):
    """A checkpoint that is missing, damaged, or of another model."""

    exit_code = 2


class TrainingDiverged(HvdtrainError):
    """The loss is not finite."""

    exit_code = 3


class WorldError(HvdtrainError):
    """A peer has gone, or did not come in time."""

    exit_code = 4
    launcher_ended = False
    """True where it is the launcher that has gone, so that none would end the other ranks."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'x'? " for the closest of the known names, whatever its case, or ""."""
    by_lower = {other.lower(): other for other in known}
    close = get_close_matches(name.lower(), by_lower, 1)
    return f"did you mean {by_lower[close[0]]!r}? " if close else ""
