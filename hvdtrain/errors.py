"""Every error that hvdtrain raises on purpose, and the exit code that a command ends with.

    HvdtrainError(RuntimeError)   1   the root; never raised itself
      InputError                  2   an option, file, task or dataset that cannot be used
      LaunchError                 2   the launcher's environment is incomplete or contradictory
      BackendUnavailable          2   not installed, not built, or another launcher is needed
      WorldMismatch               2   ranks disagree: on the world, configuration or versions
      CheckpointError             2   missing, damaged, or of another model
      TrainingDiverged            3   the loss is not finite
      WorldError                  4   a peer died, or did not arrive in time
      BuildFailed, CheckFailed    1   of `hvdtrain install-horovod` (see hvdtrain.horovod_build)
      RankFailed                      of `hvdtrain launch`: the rank's own (see hvdtrain.launch)
      JobStopped                      of `hvdtrain launch`: 128 + the signal's number

Any other exception is a bug, in hvdtrain or in the task. The command prints its traceback (for an
exception from a task's code, without the frames of libraries) and ends with exit code 1.
Ctrl-C ends with 130, SIGTERM with 143; a rank whose launcher has ended sends itself SIGTERM. A run
that a signal ends after a checkpoint raises Preempted, which is no error. Each message is one line:
what happened, the values, and what to do. Imports no torch.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from difflib import get_close_matches


class HvdtrainError(RuntimeError):
    """The root of the tree. `exit_code` is the exit code of the command."""

    exit_code = 1
    on_all_ranks = False
    """True if every rank raises this same error, so that rank 0 alone prints it."""
    after_open = False
    """True if all ranks had opened the backend before: several ranks then raise at about the same
    time.
    """

    def __init__(
        self,
        *args: object,
        on_all_ranks: bool = False,
        option: str | None = None,
        value: object = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(*args)
        self.on_all_ranks = on_all_ranks
        self.option = option
        """What cannot be used: an option such as "--epochs", a variable, or a task's method."""
        self.value = value
        """The value of it that cannot be used."""
        self.rank = rank
        """The rank that caused the error, which may be another than the one that raises it."""


class InputError(HvdtrainError):
    """An option, a file, a task or a dataset that cannot be used."""

    exit_code = 2


class LaunchError(HvdtrainError):
    """The launcher's environment variables are incomplete or contradict one another."""

    exit_code = 2


class BackendUnavailable(HvdtrainError):
    """A backend that is not installed, not built, or does not work under this launcher."""

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


class TooSlow(HvdtrainError):
    """`hvdtrain compare --fail-slower` has found an arm that is slower than allowed."""

    exit_code = 6


class WorldError(HvdtrainError):
    """A peer died, or did not arrive in time."""

    exit_code = 4
    lost_peer = True
    launcher_ended = False
    """True if the lost peer is the launcher: then no one would end the other ranks."""


class Preempted(SystemExit):
    """A signal has ended the run, on every rank after the same step. `code` is the exit code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code)
        self.text = text

    def __str__(self) -> str:
        return self.text


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without the C++ stack that torch appends; the name
    of its class if it has no text.
    """
    return str(error).strip().partition("\n")[0] or type(error).__name__


def one_line(error: BaseException) -> str:
    """Return an error's whole text in one line; the name of its class if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def add_note(error: BaseException, note: str) -> None:
    """Add a line to what is printed of an error: PEP 678, on Python 3.10 too."""
    error.__notes__ = [*notes_of(error), note]  # type: ignore[attr-defined]


def notes_of(error: BaseException) -> list[str]:
    """Return the lines that `add_note` has added."""
    notes: list[str] = getattr(error, "__notes__", [])
    return notes


def printable(text: str, line_ends: bool = True) -> str:
    """Return a text with control characters as escapes, such as `\\x1b`: a terminal obeys them, and
    a text from a file that somebody else has made may hold any. Tabs stay, and `line_ends`.
    """
    if text.isprintable():
        return text
    kept = "\t\n" if line_ends else "\t"
    return "".join(
        c.encode("unicode_escape").decode() if _is_control(c) and c not in kept else c for c in text
    )


def _is_control(character: str) -> bool:
    # Controls, formats (such as the change of the direction of writing), surrogates, line ends.
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "did you mean 'x'? " for the closest known name, ignoring case, or ""."""
    by_lower = {other.lower(): other for other in known}
    close = get_close_matches(name.lower(), by_lower, 1)
    return f"did you mean {by_lower[close[0]]!r}? " if close else ""


class PeerLost(RuntimeError):
    """A rank has exited, or did not arrive in time. What it was part of cannot be used any more."""

    lost_peer = True
    """True of errors that another rank has caused: that rank ends first, and names the cause."""
