"""Run a command as its user would, with an outer limit, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

# What a launcher, or a test before this one, may have left in our own environment.
_FOREIGN = tuple(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_ ROLE_ MASTER_ TORCHELASTIC_ OMPI_ PMIX_ "
    "PMI_ MPI_ MV2_ SLURM_ HOROVOD_ HVDTRAIN_ OMP_ TORCH_".split()
)


@dataclass(frozen=True)
class Finished:
    """How a command ended: its exit code, everything it printed, and how long it took."""

    code: int
    output: str
    seconds: float

    def lines(self, containing: str) -> list[str]:
        """The lines of the output that contain a text."""
        return [line for line in self.output.splitlines() if containing in line]


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without any launcher's variables, with the virtual environment first on
    PATH.

    Open MPI refuses root and more ranks than cores unless told otherwise; test machines are both.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    env["PATH"] = f"{BIN}{os.pathsep}{env.get('PATH', '')}"
    env["OMPI_ALLOW_RUN_AS_ROOT"] = env["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    env["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    return {**env, **(extra or {})}


@contextlib.contextmanager
def started(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start a command in a process group of its own; at the end kill what is left of it.

    Yields the process and the file that its output, stdout and stderr together, goes to.
    """
    with tempfile.NamedTemporaryFile(prefix="hvdtrain-test-", suffix=".log") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd or ROOT,
            env=clean_env(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process, Path(log.name)
        finally:
            if process.poll() is None:
                # mpirun and horovodrun clear what their ranks left in /dev/shm, if they are let.
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            kill_session(process.pid)
            process.wait()


def run(
    command: Sequence[str | Path],
    timeout: float = 60,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Run a command to its end. Fails the test, with the output, where it takes longer than
    `timeout` seconds.
    """
    begin = time.monotonic()
    with started(command, cwd, env) as (process, log):
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{' '.join(map(str, command))} took over {timeout} s:\n{log.read_text()}"
            ) from None
        seconds = time.monotonic() - begin
        output = log.read_text(errors="replace")
        left = _stragglers(process.pid)
        assert not left, f"{' '.join(map(str, command))} left processes behind: {left}\n{output}"
        return Finished(code, output, seconds)


def _stragglers(session: int) -> dict[int, str]:
    """What is left of a session whose leader has ended, after a moment of grace."""
    deadline = time.monotonic() + 3
    while (left := members(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def members(session: int) -> dict[int, str]:
    """The living processes of the session that process `session` leads, with their commands."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            state, _, _, own_session = _stat(entry)
            if own_session == session and state != "Z":
                found[int(entry.name)] = _command(entry)
    return found


def descendants(ancestor: int) -> dict[int, str]:
    """The living processes that descend from `ancestor`, with their commands."""
    parents = {int(e.name): _stat(e) for e in Path("/proc").iterdir() if e.name.isdigit()}
    found: dict[int, str] = {}
    for pid, (state, parent, _, _) in parents.items():
        while parent in parents and parent != ancestor:
            parent = parents[parent][1]
        if parent == ancestor and state != "Z":
            found[pid] = _command(Path("/proc") / str(pid))
    return found


def kill_session(session: int) -> None:
    """Kill every process of a session, in whatever process group."""
    for pid in members(session):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _stat(entry: Path) -> tuple[str, int, int, int]:
    """State, parent, process group and session of a process."""
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[1]), int(fields[2]), int(fields[3])
    except (OSError, IndexError, ValueError):
        return "Z", 0, 0, 0  # it has just ended


def _command(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "?"
