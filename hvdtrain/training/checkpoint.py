"""Crash-safe checkpoints: a directory that is either whole or not there.

    step-00001000/  model.pt  optimizer.pt  trainer.pt  manifest.json  COMPLETE

Written to a fresh staging directory beside it, every file fsynced, a manifest of sizes and SHA-256
hashes, then the marker COMPLETE with the manifest's own hash, then one rename. State is saved raw,
as the model's and optimizer's own `state_dict()`, so that any backend at any world size can load
it; always with `weights_only=True`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hvdtrain.errors import CheckpointError

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
    Replaces a checkpoint of the same step. Raises CheckpointError where it cannot be written; what
    was there then stays.
    """
    final = root / f"step-{step:08d}"
    staging = root / f"{_STAGING}{final.name}-{os.getpid()}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        files = {}
        for name, value in parts.items():
            path = staging / f"{name}.pt"
            torch.save(value, path)
            files[path.name] = _measure(path)
            _sync(path)
        manifest = {"format": FORMAT, "step": step, **about, "files": files}
        text = json.dumps(manifest, indent=1)
        _write(staging / _MANIFEST, text)
        _write(staging / _MARKER, _hash(text.encode()) + "\n")
        _sync(staging)
        if final.exists():
            _discard(final)
        staging.rename(final)
        _sync(root)
    except (OSError, RuntimeError) as error:  # torch.save turns a full disk into a RuntimeError
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointError(f"cannot write the checkpoint {final}: {_one_line(error)}") from error
    return final


def problem(path: Path) -> str | None:
    """None where `path` is a whole, undamaged checkpoint, else what is wrong with it. Reads every
    byte.
    """
    try:
        if not path.is_dir():
            return "it is not a directory" if path.exists() else "it does not exist"
        if not (path / _MARKER).is_file():
            return f"it is incomplete: no {_MARKER} marker"
        text = (path / _MANIFEST).read_bytes()
        if _hash(text) != (path / _MARKER).read_text().strip():
            return f"{_MANIFEST} does not match its hash in {_MARKER}"
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            return f"it has format {manifest['format']}; this version reads {FORMAT}"
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
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"it cannot be read: {_one_line(error)}"
    return None


def load(path: Path, name: str) -> Any:
    """Load one part of a checkpoint, on the CPU. Raises CheckpointError; runs no code of the
    file's.
    """
    try:
        return torch.load(path / f"{name}.pt", map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise CheckpointError(f"cannot load {path / name}.pt: {_one_line(error)}") from None


def newest(root: Path) -> tuple[Path | None, list[Skipped]]:
    """Find the newest valid checkpoint under `root`, and those passed over on the way. One rank
    calls.
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
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep`, and what a killed run left half-written. One rank calls.

    Only after `save` has returned, so that one valid checkpoint is there at any moment.
    """
    for path in steps(root)[:-keep]:
        _discard(path)
    sweep(root)


def set_aside(root: Path, after: int) -> list[Path]:
    """Rename the checkpoints of steps beyond `after`, which a resumed run takes anew; nothing is
    lost.

    Returns the new paths. A damaged one would otherwise count as the newest again.
    """
    moved = []
    for path in steps(root):
        if int(path.name.partition("-")[2]) > after:
            number, target = 1, path.with_name(f"aside-{path.name}")
            while target.exists():
                number += 1
                target = path.with_name(f"aside-{path.name}-{number}")
            moved.append(path.rename(target))
    return moved


def sweep(root: Path) -> None:
    """Remove staging and trash directories. Only while no other run writes here."""
    if root.is_dir():
        for path in root.iterdir():
            if path.name.startswith((_STAGING, _TRASH)):
                shutil.rmtree(path, ignore_errors=True)


def _discard(path: Path) -> None:
    """Rename, then delete: a kill in between leaves no half-deleted one under a valid name."""
    trash = path.with_name(f"{_TRASH}{path.name}-{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        path.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


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
    return " ".join(str(error).split()) or type(error).__name__
