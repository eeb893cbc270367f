"""Run a command as a user would, with a time limit, and leave none of its processes behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

# Prefixes of variables that a launcher, or an earlier test, may have left in our environment.
_FOREIGN = tuple(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_ ROLE_ MASTER_ TORCHELASTIC_ OMPI_ PMIX_ "
    "PMI_ MPI_ MV2_ SLURM_ HOROVOD_ HVDTRAIN_ OMP_ TORCH_ PALS_ FLUX_ JSM_ PET_ PBS_ LSB_ NSLOTS "
    "NODE_RANK".split()
)


@dataclass(frozen=True)
class Finished:
    """The end of a command: its exit code and its whole output."""

    code: int
    output: str

    def lines(self, containing: str) -> list[str]:
        """Return the lines of the output that contain a text."""
        return [line for line in self.output.splitlines() if containing in line]


def succeed(finished: Finished) -> str:
    """Return the output of a command that must succeed."""
    assert finished.code == 0, finished.output
    return finished.output


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return this environment without any launcher's variables, and with the virtual environment
    first on PATH.

    Open MPI by default refuses to run as root, more ranks than cores, or without ssh: test machines
    need all of these.
    Of the launchers, torchrun alone limits a rank's threads to one; those of Horovod's ranks would
    wait for each other ten times as long, because Horovod polls on the cores that they need.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    env["PATH"] = f"{BIN}{os.pathsep}{env.get('PATH', '')}"
    env["OMPI_MCA_plm_rsh_agent"] = "ssh : rsh : false"
    env |= variables(
        "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
        "OMPI_MCA_rmaps_base_oversubscribe=1 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1"
    )
    return {**env, **(extra or {})}


def variables(text: str) -> dict[str, str]:
    """Return the variables of a text in which each word is a NAME=VALUE."""
    return dict(word.split("=", 1) for word in text.split())


class Started(subprocess.Popen[bytes]):
    """A running command; `marker` is a variable in the environment of all its processes, `log` the
    file with its output.
    """

    marker: str
    log: Path

    @property
    def text(self) -> str:
        """All output until now."""
        return self.log.read_text(errors="replace")

    def wait_until(self, is_true: Callable[[], object], what: str, seconds: float = 90) -> None:
        """Wait for a condition. Fail, with the output, if the command ends before."""

        def holds() -> object:
            assert self.poll() is None, self.text
            return is_true()

        wait_until(holds, what, seconds, self.log)

    def ends(self, code: int, seconds: float = 60) -> str:
        """Wait for its end. Return its output. Fail, with it, for another exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(seconds)
        assert self.returncode == code, self.text
        return self.text


@contextlib.contextmanager
def started(
    command: Sequence[str | Path],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[Started, Path]]:
    """Start a command in a session of its own; at the end of the block, kill what is left of it.

    Yields the process and the file with its output, stdout and stderr together.
    """
    with tempfile.NamedTemporaryFile(prefix="hvdtrain-test-", suffix=".log") as log:
        marker = f"TEST_COMMAND={uuid.uuid4().hex}"
        process = Started(
            [str(part) for part in command],
            cwd=cwd or ROOT,
            env={**clean_env(env), "TEST_COMMAND": marker.partition("=")[2]},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        process.marker, process.log = marker, Path(log.name)
        try:
            yield process, process.log
        finally:
            if process.poll() is None:
                # SIGTERM first: mpirun and horovodrun then remove their ranks' files in /dev/shm.
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
            kill(process.marker)
            process.wait()


def run(
    command: Sequence[str | Path],
    timeout: float = 120,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Finished:
    """Run a command to its end. Fail the test, with the output, if it takes longer than `timeout`
    seconds or leaves processes behind.
    """
    with started(command, cwd, env) as (process, _):
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{' '.join(map(str, command))} took over {timeout} s:\n{process.text}"
            ) from None
        left = stragglers(process.marker)
        assert not left, f"{' '.join(map(str, command))} left processes: {left}\n{process.text}"
        return Finished(code, process.text)


@contextlib.contextmanager
def started_all(
    *commands: tuple[Sequence[str | Path], Mapping[str, str]],
) -> Iterator[list[tuple[Started, Path]]]:
    """Start several commands, each with its variables, as `started` does."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(started(line, env=env)) for line, env in commands]


def run_all(*commands: tuple[Sequence[str | Path], Mapping[str, str]], seconds: float = 60) -> str:
    """Run several commands at once. Each must succeed. Return the output of all."""
    with started_all(*commands) as running:
        return "".join(process.ends(0, seconds) for process, _ in running)


def started_ranks(
    lines: Sequence[Sequence[str]], **env: str
) -> contextlib.AbstractContextManager[list[tuple[Started, Path]]]:
    """Start one rank with each command, as `started` does, with the variables that torchrun sets.

    No launcher: it would end the other ranks when one dies.
    """
    shared = {"WORLD_SIZE": str(len(lines)), **free_address(), **env}
    return started_all(
        *(
            (line, {"RANK": str(rank), "LOCAL_RANK": str(rank), **shared})
            for rank, line in enumerate(lines)
        )
    )


def exit_code(ranks: Sequence[tuple[Started, Path]], rank: int, deadline: float) -> int:
    """Wait for a rank. Fail the test, with the output of all, if it runs at the deadline."""
    process, _ = ranks[rank]
    try:
        return process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        texts = "\n".join(each.text for each, _ in ranks)
        raise AssertionError(f"rank {rank} did not end:\n{texts}") from None


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that no process listens on."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in opened:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in opened]


def free_address() -> dict[str, str]:
    """Return the variables of an address on this host where ranks can meet."""
    return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_ports(1)[0])}


def program(path: Path, text: str = "") -> Path:
    """Write a shell script that can be called; return its path."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def first_on_path(folder: Path) -> dict[str, str]:
    """Return the variables with which a command finds the programs of a folder before others."""
    return {"PATH": f"{folder}{os.pathsep}{clean_env()['PATH']}"}


def wait_for(log: Path, text: str, times: int = 1, seconds: float = 60) -> None:
    """Wait until the output of a command contains a text, as often as `times`."""

    wait_until(
        lambda: log.read_text(errors="replace").count(text) >= times,
        f"{times} times {text!r}",
        seconds,
        log,
    )


def wait_until(
    is_true: Callable[[], object], what: str, seconds: float = 60, log: Path | None = None
) -> None:
    """Wait for a condition. Fail the test, with what it waited for and the output of a command."""
    deadline = time.monotonic() + seconds
    while not is_true():
        output = "" if log is None else f":\n{log.read_text(errors='replace')}"
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}{output}"
        time.sleep(0.005)


def stragglers(marker: str) -> dict[int, str]:
    """Return the processes that a command has left behind, which have some time to end."""
    deadline = time.monotonic() + 60
    while (left := members(marker)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def members(marker: str) -> dict[int, str]:
    """Return the live processes that a command has started, at any depth, with their commands.

    They are found by a variable in their environment: torchrun's ranks are in sessions of their
    own, and lose their parent when it is killed.
    """
    found = {}
    for pid in psutil.pids():
        if marker.encode() in _read(Path(f"/proc/{pid}/environ")):
            found[pid] = command_of(pid)
    return found


def descendants(ancestor: int) -> dict[int, str]:
    """Return the live processes that descend from `ancestor`, with their commands."""
    children = psutil.Process(ancestor).children(recursive=True)
    return {child.pid: line for child in children if (line := command_of(child.pid))}


@contextlib.contextmanager
def no_shared_memory_left(but: str = "\0") -> Iterator[None]:
    """Fail if the block leaves files in /dev/shm that no process uses, but for those that begin so.

    Other workers of pytest-xdist, and other programs, may use some of their own. A resource tracker
    of multiprocessing, which removes semaphores, ends some time after their users: it gets time.
    """
    shared = Path("/dev/shm")
    before = {*shared.iterdir()}
    yield
    deadline = time.monotonic() + 60
    while left := [
        path
        for path in {*shared.iterdir()} - before
        if not path.name.startswith(but) and not _in_use(path)
    ]:
        assert time.monotonic() < deadline, f"shared memory stayed behind: {left}"
        time.sleep(0.1)


def _in_use(path: Path) -> bool:
    if path.name.startswith(("mpich_shm_", "sm_segment.")):  # of MPICH, of Open MPI 5
        return True  # an aborted rank's, of another test: see conftest.py
    if path.name.startswith("vader_"):  # another job's mpirun removes what its ranks have left
        names = (_read(entry / "comm") for entry in Path("/proc").glob("[0-9]*"))
        return is_mapped(path) or b"mpirun\n" in names
    return is_mapped(path)


def is_mapped(path: Path) -> bool:
    """Return whether a live process has mapped this file."""
    name = os.fsencode(path)
    return any(name in _read(entry / "maps") for entry in Path("/proc").glob("[0-9]*"))


def kill(marker: str) -> None:
    """Kill every process that a command has started, with SIGKILL.

    horovodrun's resource tracker gets ten seconds: it ends after the others, and removes their
    semaphores.
    """
    deadline = time.monotonic() + 10
    # Repeated until none is left: a process may fork before it is killed.
    while found := members(marker):
        for pid, line in found.items():
            if "resource_tracker" not in line or time.monotonic() > deadline:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def command_of(pid: int) -> str:
    """Return the command line of a process; "" if it has ended."""
    words = _read(Path(f"/proc/{pid}/cmdline"))
    return words.replace(b"\0", b" ").decode(errors="replace").strip()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # the process has just ended
