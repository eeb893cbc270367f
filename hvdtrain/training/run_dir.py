"""The run directory: `run.json`, `metrics.jsonl` and checkpoints, the only link between training
and reports.

Rank 0 alone makes and writes it. `run.json` is replaced atomically, and written before the first
step, so that a killed run still has one: its outcome then stays "running", with a process that is
gone, and a resumed run corrects it to "killed".
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from hvdtrain.errors import InputError

FORMAT = 1


class RunDirectory:
    """One open run. Holds a lock on its directory, which the system drops even at kill -9."""

    def __init__(self, path: Path, resuming: bool) -> None:
        """Make and lock `path`. Raises InputError where it cannot be written, is in use, or holds a
        run already.
        """
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._metrics: TextIO | None = None
        self.run: dict[str, Any] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
        except OSError as error:
            raise InputError(f"cannot write the run directory {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise InputError(
                f"another run is writing to {path}; choose another --run-dir"
            ) from None
        if not resuming and (path / "run.json").exists():
            self._lock.close()
            raise InputError(
                f"{path} holds a run already; continue it with --resume auto, or choose another "
                f"--run-dir"
            )

    def start(self, about: dict[str, Any]) -> None:
        """Write run.json, with what is known of the earlier attempts of a resumed run."""
        earlier = self._earlier_attempts()
        process = {"pid": os.getpid(), "host": os.uname().nodename}
        self.run = {
            "format": FORMAT,
            "outcome": "running",
            "start": now(),
            "process": process,
            **about,
            "attempts": earlier,
        }
        self.write()

    def open_metrics(self, first_step: int) -> None:
        """Open metrics.jsonl. Lines after `first_step`, of steps that are now taken again, go."""
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            lines = metrics.read_text().splitlines()
            _replace(metrics, "".join(f"{line}\n" for line in lines if _step(line) <= first_step))
        self._metrics = metrics.open("a", buffering=1)

    def log(self, record: dict[str, Any]) -> None:
        """Append one object to metrics.jsonl."""
        if self._metrics is not None:
            self._metrics.write(json.dumps(record) + "\n")

    def update(self, **more: Any) -> None:
        """Add to run.json."""
        self.run.update(more)
        self.write()

    def finish(self, outcome: str, **more: Any) -> None:
        """Write how the run ended: `finished`, `failed`, `interrupted` or `terminated`."""
        self.update(outcome=outcome, end=now(), **more)

    def write(self) -> None:
        """Replace run.json atomically."""
        _replace(self.path / "run.json", json.dumps(self.run, indent=1, default=str) + "\n")

    def close(self) -> None:
        """Close metrics.jsonl and give up the lock. Twice is safe."""
        if self._metrics is not None:
            self._metrics.close()
        self._lock.close()

    def _earlier_attempts(self) -> list[dict[str, Any]]:
        try:
            before = json.loads((self.path / "run.json").read_text())
        except (OSError, ValueError):
            return []
        # We hold the lock, so a run that still says "running" is gone.
        outcome = "killed" if before.get("outcome") == "running" else before.get("outcome")
        keys = {"start", "end", "error", "resumed_from", "last_step", "process"}
        keys |= {"metrics", "params_sha256"}
        last = {key: before[key] for key in before if key in keys}
        return [*before.get("attempts", []), {**last, "outcome": outcome}]


def make_default(task: str, backend: str) -> Path:
    """Make `runs/<time>-<task>-<backend>`, with a number behind it where that is taken."""
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{Path(task.rpartition(':')[2]).stem}-{backend}".lower()
    for number in itertools.count(1):
        path = Path("runs") / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue  # another job of the same second
        except OSError as error:
            raise InputError(f"cannot write the run directory {path}: {error.strerror}") from None
        return path
    raise AssertionError("count() never ends")


def now() -> str:
    """The time, in UTC, in ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62  # the torn last line of a killed run


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.chmod(name, 0o644)
    os.replace(name, path)
