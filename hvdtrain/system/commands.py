"""Run other programs, with a time limit, and stop them with all that they have started.

Used by `horovod_build`, `launch`, `compare` and `doctor`. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.system.processes import stop_tree

GRACE_S = 5.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True)
class CommandResult:
    """The result of a child. `code` is None after a timeout, 127 if the program cannot start."""

    code: int | None
    stdout: str
    stderr: str = ""

    @property
    def output(self) -> str:
        """Both streams, standard error last."""
        return f"{self.stdout}\n{self.stderr}".strip()


def own_environment() -> dict[str, str]:
    """Return a copy of the environment with this interpreter's folder first on PATH."""
    folders = os.path.dirname(sys.executable), os.environ.get("PATH") or os.defpath
    return os.environ | {"PATH": os.pathsep.join(folders)}


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    timeout_s: float = 60.0,
    cwd: str = os.sep,
) -> CommandResult:
    """Run a command until it exits or its time is up; return its output. Never raises OSError."""
    try:
        with started(command, env=env, stderr=subprocess.PIPE, cwd=cwd) as child:
            try:
                out, err = child.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                stop_tree(child)
                # Read the rest, for a limited time: a detached process may hold the pipe open.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    out, err = child.communicate(timeout=GRACE_S)
                    return CommandResult(None, out, err)
                return CommandResult(None, "")
            return CommandResult(child.returncode, out, err)
    except OSError as error:
        return CommandResult(127, "", str(error))


@contextlib.contextmanager
def started(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    stderr: int = subprocess.STDOUT,
    cwd: str = os.sep,
) -> Iterator[subprocess.Popen[str]]:
    """Start a command in its own session; if it still runs after the block, stop its whole tree.

    By default its working directory is /, so that no local file shadows a Python module.
    """
    child = subprocess.Popen(
        command,
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            stop_tree(child)
        for pipe in (child.stdout, child.stderr):
            if pipe:
                pipe.close()


def last_line(text: str) -> str:
    """Return the most useful line of an output: the last one with an exception, else the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b: ", line)]
    return (errors or lines or ["no output"])[-1]
