"""Crash-safe checkpoints: a directory that is either complete or does not exist.

    step-00001000/  model.pt  optimizer.pt  trainer.pt  manifest.json  COMPLETE

The Trainer saves and resumes with it. A `Writer` uses a staging directory beside the final one, and
fsyncs every file: the parts, then a manifest of their sizes and SHA-256 hashes, then the marker
COMPLETE with the manifest's hash. One rename finishes it. State is the plain `state_dict()` of
model and optimizer, so that any backend at any world size can load it; it is always loaded with
`weights_only=True`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hvdtrain.errors import CheckpointError, one_line
from hvdtrain.system import files

FORMAT = 1
_MANIFEST = "manifest.json"
_MARKER = "COMPLETE"
_STAGING = ".staging-"
_TRASH = ".trash-"
_NAME = re.compile(r"step-(\d{8,})")


class Writer:
    """Writes one checkpoint, part by part: one at a time is in memory.

    One rank uses it, in a `with` block. If the block raises, what has been written is deleted.
    """

    def __init__(self, root: Path, step: int) -> None:
        self._final = path_of(root, step)
        self._staging = root / f"{_STAGING}{self._final.name}-{os.getpid()}"
        self._action = f"write the checkpoint {self._final}"
        self._written: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Writer:
        with _reported(self._action):
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging.mkdir(parents=True)
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)  # renamed by `finish`

    def add(self, name: str, value: Any) -> None:
        """Write `value` as `<name>.pt`.

        Raises CheckpointError if it cannot be written, or could not be loaded again.
        """
        path = self._staging / f"{name}.pt"
        with _reported(self._action):
            with _HashingFile(path) as file:
                torch.save(value, file)
                file.flush()
                os.fsync(file.fileno())
                self._written[path.name] = {
                    "bytes": file.tell(),
                    "sha256": file.digest.hexdigest(),
                }
            # mmap: no tensor is read. An object whose class torch.load refuses must be found here,
            # not when a crashed run is resumed.
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)

    def finish(self, about: Mapping[str, Any]) -> Path:
        """Write the manifest, with the entries of `about`, and the marker; rename the directory.

        Replaces a checkpoint of the same step. Returns the path. Raises CheckpointError; an old
        checkpoint of that step is then kept.
        """
        with _reported(self._action):
            manifest = {
                "format": FORMAT,
                "step": step_of(self._final),
                **about,
                "files": self._written,
            }
            text = json.dumps(manifest, indent=1).encode()
            files.write_atomically(self._staging / _MANIFEST, text)
            digest = hashlib.sha256(text).hexdigest()
            files.write_atomically(self._staging / _MARKER, f"{digest}\n")
            _fsync(self._staging)
            _put_in_place(self._staging, self._final)
        return self._final


def save(root: Path, step: int, parts: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
    """Write the checkpoint of `step` under `root` and return its path. One rank calls.

    `parts` maps a name to what torch.save writes as `<name>.pt`; `about` goes into the manifest.
    Replaces a checkpoint of the same step. Raises CheckpointError if it cannot be written, or could
    not be loaded again; an old checkpoint of that step is then kept.
    """
    with Writer(root, step) as writer:
        for name, value in parts.items():
            writer.add(name, value)
        return writer.finish(about)


def path_of(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step` under `root`, whether it exists or not."""
    return root / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.name.partition("-")[2])


def problem(path: Path, reads_all: bool = True) -> str | None:
    """Return None if `path` is a complete, undamaged checkpoint, else the problem.

    Reads every byte; unless `reads_all`, compares the sizes of the parts alone.
    """
    try:
        if not path.is_dir():
            return "it is not a directory" if path.exists() else "it does not exist"
        for name in (_MARKER, _MANIFEST):
            if not (path / name).is_file():
                return f"it is incomplete: {name} is missing"
        text = (path / _MANIFEST).read_bytes()
        if hashlib.sha256(text).hexdigest() != (path / _MARKER).read_text().strip():
            return f"{_MANIFEST} does not match its hash in {_MARKER}"
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            return f"it has format {manifest['format']}; this version reads {FORMAT}"
        if _NAME.fullmatch(path.name) and manifest["step"] != step_of(path):
            return f"its manifest names step {manifest['step']}"
        for name, measured in manifest["files"].items():
            file = path / name
            if Path(name).name != name:
                return f"its manifest names a file outside the checkpoint: {name!r}"
            if not file.is_file():
                return f"it is incomplete: {name} is missing"
            if (size := file.stat().st_size) != measured["bytes"]:
                return f"{name} has {size} bytes instead of {measured['bytes']}"
            if reads_all and _hash_of(file) != measured["sha256"]:
                return f"{name} is damaged: its bytes do not match their hash"
    except Exception as error:  # a manifest of any other shape can raise nearly anything
        return f"it cannot be read: {type(error).__name__}: {_one_line(error)}"
    return None


def part_names(path: Path) -> list[str]:
    """Return the names of the parts of a checkpoint. Raises CheckpointError."""
    return [Path(file).stem for file in _manifest(path)["files"]]


def load(path: Path, name: str) -> Any:
    """Load one part of a checkpoint, on the CPU, without running code from the file. Raises
    CheckpointError.
    """
    if name not in part_names(path):
        raise CheckpointError(f"the checkpoint {path} has no part {name!r}")
    return load_file(path / f"{name}.pt")


def load_file(path: Path) -> Any:
    """Load a file of torch.save, on the CPU, without running code from it. Not collective. Raises
    CheckpointError.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise nearly anything
        why = _one_line(error)
        if "weights_only" in why:  # torch's advice to load it in a way that may run code
            why = "it is damaged, or not a torch.save file with only tensors and numbers"
        elif " " not in why:  # such as the key of a KeyError
            why = f"it is damaged, or not a torch.save file ({type(error).__name__}: {why})"
        raise CheckpointError(f"cannot load {path}: {why}") from None


def newest(root: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest valid checkpoint under `root`, and of the newer ones why they are not
    valid. One rank calls.
    """
    skipped: dict[Path, str] = {}
    for path in reversed(list_checkpoints(root)):
        if why := problem(path):
            skipped[path] = why
        else:
            return path, skipped
    return None, skipped


def list_checkpoints(root: Path) -> list[Path]:
    """Return every checkpoint directory under `root`, valid or not, in order of steps."""
    return sorted((path for path in _entries(root) if _NAME.fullmatch(path.name)), key=step_of)


def prune(root: Path, keep: int) -> None:
    """Remove checkpoints older than the newest `keep`, and parts of killed runs. One rank calls.

    The steps that a kept one's manifest names as `kept_steps` are kept, too: whichever of them a
    run is resumed from, its best checkpoint is there.
    A checkpoint with a missing or truncated file does not count as one of the `keep`. Call it only
    after `save` has returned: then one valid checkpoint exists at any moment. Raises
    CheckpointError.
    """
    found = list_checkpoints(root)
    kept = [path for path in found if problem(path, reads_all=False) is None][-keep:]
    if kept:
        steps = {step for path in kept for step in _manifest(path).get("kept_steps", [])}
        for path in found[: found.index(kept[0])]:
            if step_of(path) not in steps:
                _move_to_trash(path)
    remove_leftovers(root)


def set_aside(root: Path, after: int) -> list[Path]:
    """Rename the checkpoints of steps after `after`, which a resumed run takes again.

    Returns the new paths. Without this, a damaged one would be the newest again at the next resume.
    Nothing is deleted. Raises CheckpointError.
    """
    moved = []
    for path in list_checkpoints(root):
        if step_of(path) > after:
            number, target = 1, path.with_name(f"aside-{path.name}")
            while os.path.lexists(target):
                number += 1
                target = path.with_name(f"aside-{path.name}-{number}")
            _rename(path, target)
            moved.append(target)
    return moved


def remove_leftovers(root: Path) -> None:
    """Remove staging and trash directories. Call it only while no other run writes here.

    A complete staging directory, whose save was killed just before its rename, is renamed instead
    if there is no checkpoint of that name.
    """
    for path in _entries(root):
        final = root / path.name.removeprefix(_STAGING).rpartition("-")[0]
        is_staging = path.name.startswith(_STAGING)
        if is_staging and not os.path.lexists(final) and problem(path) is None:
            _rename(path, final)
        elif is_staging or path.name.startswith(_TRASH):
            shutil.rmtree(path, ignore_errors=True)


def _entries(root: Path) -> list[Path]:
    """Return the entries of `root`, sorted; none if it is no directory.

    Raises CheckpointError if it cannot be read: a resumed run must not start afresh then.
    """
    with _reported("read the checkpoints"):
        return sorted(root.iterdir()) if root.is_dir() else []


def _manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint. Raises CheckpointError."""
    with _reported(f"read the manifest of {path}"):
        return {"files": {}, **json.loads(files.read(path / _MANIFEST))}


def _put_in_place(staging: Path, final: Path) -> None:
    """Rename `staging` to `final`.

    An old checkpoint is kept as trash until the new one is in place. If the process is killed in
    between, `remove_leftovers` finishes the rename.
    """
    trash = _move_to_trash(final) if os.path.lexists(final) else None
    try:
        staging.rename(final)
    except OSError:
        if trash is not None:
            trash.rename(final)
        raise
    _fsync(final.parent)  # only this makes the rename survive a power failure
    if trash is not None:
        shutil.rmtree(trash, ignore_errors=True)


def _move_to_trash(path: Path) -> Path:
    """Rename a checkpoint before it is deleted: a kill leaves none half deleted under its name."""
    trash = path.with_name(f"{_TRASH}{path.name}-{os.getpid()}")
    shutil.rmtree(trash, ignore_errors=True)
    _rename(path, trash)
    return trash


def _rename(path: Path, target: Path) -> None:
    with _reported(f"rename the checkpoint to {target}"):
        path.rename(target)


class _HashingFile(io.BufferedWriter):
    """Hashes the bytes passed to `write`: wrong bytes on the disk will not match."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return super().write(data)


def _hash_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _reported(action: str) -> Iterator[None]:
    """Raise CheckpointError in place of an exception of the block, which cannot do `action`."""
    try:
        yield
    except Exception as error:  # a damaged manifest, or pickling a part, raises nearly anything
        raise CheckpointError(f"cannot {action}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    """Return the cause of an error in one line: that of the OSError behind it, if there is one."""
    cause: BaseException | None = error
    while cause is not None:  # a full disk is the context of an error of torch
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}: {cause.filename}" if cause.filename else cause.strerror
        cause = cause.__context__
    text = one_line(error)
    # torch's own text is long, and advises to load the file with weights_only=False.
    refused = re.search(r"GLOBAL (\S+)", text)
    return f"it holds {refused[1]}, which may run code when loaded" if refused else text
