"""Restarts: find the run directory and the error of the ranks that this launcher started before.

Used by the Trainer. `torchrun --max-restarts` starts all ranks again after a failure or a change of
the hosts (TORCHELASTIC_RESTART_COUNT does not change then), `hvdrun --max-restarts` after a failure
or the loss of a host. Neither passes the old run directory to the new ranks. So it is recorded in a
place that belongs to this job alone, and lasts as long as the job:

    torchrun   the agent's log folder on each host, in which TORCHELASTIC_ERROR_FILE lies:
               hvdtrain-run-0.json    the run directory, written once rank 0 has made it
               hvdtrain-end-3.json    why rank 3 has ended; a killed rank leaves none
    hvdrun     a variable of the launcher, HVDTRAIN_RESTART: the job's id, which is in run.json
               too, the number of restarts, and the cause
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.errors import Preempted, WorldError, one_line
from hvdtrain.job.world import World, detect, hvdrun_restart, launch_env
from hvdtrain.liveness.failure import cause_of
from hvdtrain.system import files

_RUN, _END = "hvdtrain-run-{}.json", "hvdtrain-end-{}.json"
_MAX_CAUSE = 200  # characters of an error's text


@dataclass(frozen=True)
class Restart:
    """A start of a run by a launcher that had started it before."""

    label: str
    """Such as "2 of 3"."""
    cause: str
    """Why the ranks before have ended, such as "rank 1 was killed"; empty if that is not known."""
    run_dir: Path | None
    """The run directory of the ranks before; None if they ended before they had made it."""
    made_on: str = ""
    """The host on which it was made."""

    def line(self, text: str) -> str:
        """Return the line about this restart."""
        return f"restart  {self.label}: {text}{f' ({self.cause})' if self.cause else ''}"


@dataclass(frozen=True)
class Start:
    """One start of a run by its launcher."""

    world: World
    job: str = ""
    """The job's id under hvdrun."""
    restart: Restart | None = None
    """On rank 0, if the launcher has started this run before."""
    notes: Mapping[str, Any] | None = None
    """What is kept beside the run directory under torchrun; equal on all ranks."""
    folder: Path | None = None
    """The log folder of this host's agent; None under other launchers, or without one."""
    index: int = 0
    """How many runs this process has had before."""

    def keep(self, path: Path) -> None:
        """Keep the run directory for the next start, on local rank 0. Not collective."""
        if self.folder is not None and self.world.local_rank == 0:
            about = {
                "run_dir": str(path.absolute()),
                "ranks": self.world.size,
                **(self.notes or {}),
            }
            _write(self.folder / _RUN.format(self.index), about)

    def keep_on_all_hosts(self, backend: Backend, path: Path | None) -> None:
        """Keep the run directory, `path` on rank 0, on every host. Collective."""
        if self.notes is not None:
            self.keep(backend.broadcast_object(path or Path()))

    def note_end(self, error: BaseException | None) -> None:
        """Keep why this rank ends, for the line of the next start. Not collective."""
        if self.folder is None:
            return
        kind, error = "failed", error and cause_of(error)
        if error is None:
            kind = "finished"
        elif isinstance(error, WorldError):
            kind = "lost a peer"
        elif isinstance(error, Preempted):
            kind = "preempted"
        elif isinstance(error, (SystemExit, KeyboardInterrupt)):
            kind = "ended"
        text = "" if error is None else one_line(error)[:_MAX_CAUSE]
        if error is not None and kind == "failed":
            text = f"{type(error).__name__}: {text}"
        _write(self.folder / _END.format(self.world.rank), {"kind": kind, "text": text})


def initial_start(world: World) -> Start:
    """Return a start that only notes why this rank ends, until `detect_restart` knows more."""
    return Start(world, folder=_agent_folder(launch_env()) if _may_be_restarted(world) else None)


def detect_restart(backend: Backend, wanted: str | None) -> Start:
    """Find out whether the launcher has started this run before. Collective.

    `wanted`: the `--run-dir`, if given. The first run of a process continues the first run of the
    process before it, the second the second.
    """
    world, env = backend.world, launch_env()
    if not _may_be_restarted(world):
        return Start(world)
    index = next(_counts.setdefault(os.getpid(), itertools.count()))
    if info := hvdrun_restart(env):
        restart, job = None, f"{info['job']}/{index}"
        if world.rank == 0 and info["number"]:
            label = f"{info['number']} of {info.get('of', '?')}"
            restart = Restart(label, str(info.get("cause", "")), _find(job, wanted))
        return Start(world, job, restart)
    folder = _agent_folder(env)
    kept: dict[str, Any] = {}
    ends: dict[int, dict[str, str]] = {}
    if folder is not None and world.local_rank == 0:
        kept, ends = _read(folder / _RUN.format(index)), _take_ends(folder)
    by_rank = backend.all_gather_object((kept, ends))
    # A host that has joined since keeps nothing; one that was away, an earlier start.
    before = max((one for one, _ in by_rank if one), key=_starts, default={})
    everyone = {rank: end for _, some in by_rank for rank, end in some.items()}
    number = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    notes = {"host": socket.gethostname(), "number": number, "starts": _starts(before) + 1}
    notes = backend.broadcast_object(notes)
    restart = None
    if world.rank == 0 and (before or (number != "0" and index == 0)):
        label = f"{number} of {env.get('TORCHELASTIC_MAX_RESTARTS', '?')}"
        if number == before.get("number", "0"):
            label = "after a change of the hosts"
        path = Path(before["run_dir"]) if before else None
        cause = _cause(everyone, before.get("ranks", world.size) if index == 0 else 0)
        if folder is None:
            cause = "unknown: torchrun has no log folder; give --run-dir and --resume auto"
        restart = Restart(label, cause, path, before.get("host", ""))
    return Start(world, "", restart, notes, folder, index)


def _starts(kept: Mapping[str, Any]) -> int:
    """Return how often the run had been started."""
    return int(kept.get("starts", 0))


_counts: dict[int, Iterator[int]] = {}  # by process id: a forked child counts its own runs


def _may_be_restarted(world: World) -> bool:
    """Return whether this is the whole world of torchrun or hvdrun, which may restart it."""
    return world.launcher == "torchrun" and world.size == detect().size


def _agent_folder(env: Mapping[str, str]) -> Path | None:
    """Return the log folder of torchrun's agent: its random name is that of no other job.

    It has attempt_<number>/<local rank>/error.json. None if torchrun writes no logs.
    """
    file = Path(env.get("TORCHELASTIC_ERROR_FILE", ""))
    if not file.parent.parent.name.startswith("attempt_"):  # that of hvdrun, for example
        return None
    folder = file.parents[2]
    return folder if folder.is_dir() else None


def _find(job: str, wanted: str | None) -> Path | None:
    """Return the run directory that a job has made: `wanted`, or one of those in runs/."""
    paths: Iterable[Path] = [Path(wanted)] if wanted else sorted(Path("runs").glob("*"))
    for path in paths:
        if _read(path / "run.json").get("job") == job:
            return path
    return None


def _take_ends(folder: Path) -> dict[int, dict[str, str]]:
    """Return, by rank, why the ranks of this host have ended, and delete the notes."""
    ends = {}
    for path in folder.glob(_END.format("*")):
        ends[int(path.stem.rpartition("-")[2])] = _read(path)
        with contextlib.suppress(OSError):
            path.unlink()
    return ends


def _cause(ends: dict[int, dict[str, str]], size: int) -> str:
    """Return why `size` ranks have ended, from what they have noted: the failure of one, else the
    ranks that noted nothing, since the others have only lost these.
    """
    by_kind: dict[str, list[str]] = {}
    for rank, end in sorted(ends.items()):
        by_kind.setdefault(end.get("kind", "?"), []).append(f"rank {rank}: {end.get('text')}")
    if failed := by_kind.get("failed"):
        return failed[0]
    silent = [str(rank) for rank in range(size) if rank not in ends]
    if silent and ends:  # else all have ended before training, with messages of their own
        noun = "rank" if len(silent) == 1 else "ranks"
        return f"{noun} {', '.join(silent)} had died"
    for kind in ("preempted", "lost a peer", "ended"):
        if kind in by_kind:
            return by_kind[kind][0].partition(": ")[2] if kind == "preempted" else by_kind[kind][0]
    return ""


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, about: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a full disk: the next start says that it knows no run
        files.write_atomically(path, json.dumps(about), sync=False)
