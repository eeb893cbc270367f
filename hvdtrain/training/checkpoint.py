"""Crash-safe checkpoints: a directory that is either whole or not there.

    step-00001000/  model.pt  optimizer.pt  trainer.pt  manifest.json  COMPLETE

Written to a fresh staging directory beside it, every file fsynced, a manifest of sizes and SHA-256
hashes, then the marker COMPLETE with the manifest's own hash, then one rename. State is saved raw,
as the model's and optimizer's own `state_dict()`, so that any backend at any world size can load
it; always with `weights_only=True`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.errors import CheckpointError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

FORMAT = 1
_MANIFEST = "manifest.json"
_MARKER = "COMPLETE"
_STAGING = ".staging-"
_TRASH = ".trash-"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why."""

    path: Path
    reason: str


def save(root: Path, step: int, parts: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
    """Write the checkpoint of `step` under `root` and return its path. One rank calls.

    `parts` maps a name to what torch.save writes as `<name>.pt`; `about` goes into the manifest.
    Replaces a checkpoint of the same step. Raises CheckpointError where it cannot be written, or
    could not be loaded again; what was there then stays.
    """
    final = root / f"step-{step:08d}"
    staging = root / f"{_STAGING}{final.name}-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        files = {f"{name}.pt": _write_part(staging, name, value) for name, value in parts.items()}
        manifest = {"format": FORMAT, "step": step, **about, "files": files}
        text = json.dumps(manifest, indent=1)
        _write(staging / _MANIFEST, text)
        _write(staging / _MARKER, _hash(text.encode()) + "\n")
        _sync(staging)
        _put_in_place(staging, final)
    except Exception as error:  # pickling a part can raise nearly anything
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(f"cannot write the checkpoint {final}: {_one_line(error)}") from error
    return final


def problem(path: Path) -> str | None:
    """None where `path` is a whole, undamaged checkpoint, else what is wrong with it.

    Reads every byte.
    """
    try:
        if not path.is_dir():
            return "it is not a directory" if path.exists() else "it does not exist"
        if not (path / _MARKER).is_file():
            return f"it is incomplete: no {_MARKER} marker"
        if not (path / _MANIFEST).is_file():
            return f"{_MANIFEST} is missing"
        text = (path / _MANIFEST).read_bytes()
        if _hash(text) != (path / _MARKER).read_text().strip():
            return f"{_MANIFEST} does not match its hash in {_MARKER}"
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            return f"it has format {manifest['format']}; this version reads {FORMAT}"
        if _NAME.fullmatch(path.name) and manifest["step"] != _step(path):
            return f"its manifest is of step {manifest['step']}"
        for name, measured in manifest["files"].items():
            if Path(name).name != name:
                return f"its manifest names a file outside of it: {name!r}"
            if not (path / name).is_file():
                return f"{name} is missing"
            found = _measure(path / name)
            if found["bytes"] != measured["bytes"]:
                return f"{name} has {found['bytes']} bytes instead of {measured['bytes']}"
            if found["sha256"] != measured["sha256"]:
                return f"{name} is damaged: its bytes do not match their hash"
    except Exception as error:  # a manifest of any other shape can raise nearly anything
        return f"it cannot be read: {type(error).__name__}: {_one_line(error)}"
    return None


def load(path: Path, name: str) -> Any:
    """Load one part of a checkpoint, on the CPU.

    Raises CheckpointError; runs no code of the file's.
    """
    try:
        if f"{name}.pt" not in json.loads((path / _MANIFEST).read_bytes())["files"]:
            raise CheckpointError(f"the checkpoint {path} has no part {name!r}")
        return torch.load(path / f"{name}.pt", map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointError(f"cannot load {path / name}.pt: {_one_line(error)}") from None


def newest(root: Path) -> tuple[Path | None, list[Skipped]]:
    """Find the newest valid checkpoint under `root`, and those passed over on the way.

    One rank calls.
    """
    skipped: list[Skipped] = []
    for path in reversed(steps(root)):
        why = problem(path)
        if why is None:
            return path, skipped
        skipped.append(Skipped(path, why))
    return None, skipped


def steps(root: Path) -> list[Path]:
    """Every checkpoint directory under `root`, valid or not, in order of steps."""
    return sorted((path for path in _entries(root) if _NAME.fullmatch(path.name)), key=_step)


def prune(root: Path, keep: int) -> None:
    """Remove what is older than the newest `keep`, and what a killed run left. One rank calls.

    One with a file missing or cut short does not count as one of them. Only after `save` has
    returned, so that one valid checkpoint is there at any moment. Raises CheckpointError.
    """
    found = steps(root)
    whole = [path for path in found if _looks_whole(path)]
    if whole:
        for path in found[: found.index(whole[-keep:][0])]:
            _discard(path)
    sweep(root)


def set_aside(root: Path, after: int) -> list[Path]:
    """Rename the checkpoints of steps beyond `after`, which a resumed run takes anew; nothing is
    lost.

    Returns the new paths. A damaged one would otherwise count as the newest again. Raises
    CheckpointError.
    """
    moved = []
    for path in steps(root):
        if _step(path) > after:
            number, target = 1, path.with_name(f"aside-{path.name}")
            while os.path.lexists(target):
                number += 1
                target = path.with_name(f"aside-{path.name}-{number}")
            _rename(path, target)
            moved.append(target)
    return moved


def sweep(root: Path) -> None:
    """Remove staging and trash directories. Only while no other run writes here.

    A whole one whose save was killed just before the last rename gets its name instead.
    """
    for path in _entries(root):
        if path.name.startswith(_STAGING):
            final = root / path.name.removeprefix(_STAGING).rpartition("-")[0]
            if not os.path.lexists(final) and problem(path) is None:
                _rename(path, final)
    for path in _entries(root):
        if path.name.startswith((_STAGING, _TRASH)):
            shutil.rmtree(path, ignore_errors=True)


def _entries(root: Path) -> list[Path]:
    """What is in `root`; nothing where it is no directory.

    Raises CheckpointError where it cannot be read, lest a resumed run start afresh.
    """
    try:
        return sorted(root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"cannot read {root}: {error.strerror}") from None


def _step(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _put_in_place(staging: Path, final: Path) -> None:
    """Rename `staging` to `final`.

    An old one stays until the new one is there; `sweep` finishes this after a kill.
    """
    trash = final.with_name(f"{_TRASH}{final.name}-{os.getpid()}")
    replaces = os.path.lexists(final)
    if replaces:
        shutil.rmtree(trash, ignore_errors=True)
        final.rename(trash)
    try:
        staging.rename(final)
    except OSError:
        if replaces:
            trash.rename(final)
        raise
    _sync(final.parent)
    shutil.rmtree(trash, ignore_errors=True)


def _discard(path: Path) -> None:
    """Rename, then delete: a kill in between leaves no half-deleted one under a valid name."""
    trash = path.with_name(f"{_TRASH}{path.name}-{os.getpid()}")
    shutil.rmtree(trash, ignore_errors=True)
    _rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _rename(path: Path, target: Path) -> None:
    try:
        path.rename(target)
    except OSError as error:
        raise CheckpointError(f"cannot rename {path} to {target}: {error.strerror}") from None


def _looks_whole(path: Path) -> bool:
    """Whether everything that the manifest lists is there, at its size:

    `problem` without the hashes of the files.
    """
    try:
        text = (path / _MANIFEST).read_bytes()
        files = json.loads(text)["files"].items()
        return _hash(text) == (path / _MARKER).read_text().strip() and all(
            (path / name).stat().st_size == measured["bytes"] for name, measured in files
        )
    except Exception:  # see `problem`
        return False


class _MeasuredFile(io.BufferedWriter):
    """Measures the bytes as they were meant, whatever the disk makes of them."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._digest = hashlib.sha256()
        self._bytes = 0

    def write(self, data: ReadableBuffer) -> int:
        self._digest.update(data)
        self._bytes += memoryview(data).nbytes
        return super().write(data)

    def measures(self) -> dict[str, Any]:
        return {"bytes": self._bytes, "sha256": self._digest.hexdigest()}


def _write_part(folder: Path, name: str, value: Any) -> dict[str, Any]:
    """Write `<name>.pt` and return its measures.

    Raises whatever a part that cannot be loaded again raises.
    """
    path = folder / f"{name}.pt"
    with _MeasuredFile(path) as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    # Mapped, so that this reads no tensor. An object of a class that a load refuses must not wait
    # for the day of the crash.
    torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return file.measures()


def _measure(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _one_line(error: BaseException) -> str:
    cause: BaseException | None = error
    while cause is not None:  # torch hides a full disk behind an error of its own
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}: {cause.filename}" if cause.filename else cause.strerror
        cause = cause.__context__
    text = " ".join(str(error).split()) or type(error).__name__
    # torch's own text goes on at length, and advises to trust the file.
    refused = re.search(r"GLOBAL (\S+)", text)
    return f"it holds {refused[1]}, which may run code when loaded" if refused else text
