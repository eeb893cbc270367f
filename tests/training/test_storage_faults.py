"""Full disks, bad disks and crashes: some valid checkpoint always loads.

Errors and kills are injected into each call of Python that changes the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hvdtrain.errors import CheckpointError, InputError
from hvdtrain.training import checkpoint
from tests.training.test_checkpoint import assert_loads, names, save


def save_and_prune(root: Path, step: int, keep: int = 1) -> None:
    save(root, step)
    checkpoint.prune(root, keep)


def refusal(action: Callable[[], object]) -> str:
    """Return the one line that an action ends with; "" if it succeeds."""
    try:
        action()
    except (CheckpointError, InputError) as error:
        text = str(error)
    else:
        text = ""
    assert "\n" not in text
    return text


def assert_some_is_valid(root: Path, least: int = 20) -> None:
    path, _ = checkpoint.newest(root)
    assert path is not None, names(root)
    step = int(path.name[5:])
    assert step >= least, names(root)
    assert_loads(path, step)


# Errors and crashes, at every call that changes the disk


CALLS = "mkdir rename replace rmdir unlink fsync open".split()


@contextmanager
def hooked(before: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `before(name, arguments)` at the start of each call that changes the disk."""
    with pytest.MonkeyPatch.context() as patch:

        def hook(owner: Any, name: str) -> None:
            real = getattr(owner, name)

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                before(name, args)
                return real(*args, **kwargs)

            patch.setattr(owner, name, wrapped)

        for name in CALLS:
            hook(os, name)
        for name in ("write", "flush"):
            hook(checkpoint._HashingFile, name)
        yield


SCENARIOS: dict[str, Callable[[Path], object]] = {
    "next step": lambda root: save_and_prune(root, 30),
    "same step": lambda root: save_and_prune(root, 20),
    "set aside": lambda root: checkpoint.set_aside(root, 10),
    "leftovers": checkpoint.remove_leftovers,
}
LEAST_CALLS = {"next step": 26, "same step": 26, "set aside": 2, "leftovers": 6}
"""Numbers of calls that are counted at least, if the hooks are where the calls are."""


class PowerFailure(BaseException):
    """Ends an action, as a kill does. It is no Exception: nothing catches it."""


class UnsyncedDisk:
    """What a disk holds for sure: the files up to their last fsync, and their names as they were at
    the last fsync of a folder. A power failure may lose the rest.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        found = (file.stat() for file in root.rglob("*") if file.is_file())
        self.sizes = {about.st_ino: about.st_size for about in found}
        self.renames: list[tuple[Path, Path]] = []

    def record(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "rename":
            self.renames.append((Path(arguments[0]), Path(arguments[1])))
        elif name == "fsync":
            about = os.fstat(arguments[0])
            self.sizes[about.st_ino] = about.st_size
            if about.st_ino == self.root.stat().st_ino:
                self.renames.clear()

    def fail(self) -> None:
        for source, target in reversed(self.renames):
            if target.exists() and not source.exists():
                target.rename(source)
        for file in self.root.rglob("*"):
            if file.is_file():
                about = file.stat()
                os.truncate(file, min(about.st_size, self.sizes.get(about.st_ino, 0)))


FAULTS: dict[str, BaseException] = {
    "full disk, once": OSError(errno.ENOSPC, "No space left on device"),
    "bad disk, from then on": OSError(errno.EIO, "Input/output error"),
    "kill": PowerFailure(),
    "power failure": PowerFailure(),
}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=[pytest.mark.exhaustive] * (how[0] in "bk"))  # a bad disk, a kill
        for how in FAULTS
    ],
)
def test_a_fault_at_any_call(
    root: Path, scenario: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves on the disk what has been written; a power failure, what has been synced. A run
    resumed then finds a valid checkpoint, and leaves nothing of what has ended early.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # counted, but it takes its time
    template = root.rename(root.with_name("template"))
    if scenario == "leftovers":  # a run that was killed between two renames
        shutil.move(template / "step-00000020", template / ".staging-step-00000020-1")
        shutil.copytree(template / "step-00000010", template / ".trash-step-00000020-1")
    n = calls = 0
    while calls >= n:
        n, calls = n + 1, 0
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(template, root)
        disk = UnsyncedDisk(root)

        def fail(name: str, arguments: tuple[Any, ...]) -> None:
            nonlocal calls
            calls += 1
            if calls == n or (calls > n and how != "full disk, once"):  # noqa: B023
                raise FAULTS[how]
            disk.record(name, arguments)  # noqa: B023

        with hooked(fail), contextlib.suppress(PowerFailure):
            text = refusal(lambda: SCENARIOS[scenario](root))
            assert not text or FAULTS[how].args[1] in text, text
        if how == "power failure":
            disk.fail()
        checkpoint.remove_leftovers(root)  # as a resumed run does first
        assert_some_is_valid(root, 10 if scenario == "set aside" else 20)
        save_and_prune(root, 40)
        assert [name for name in names(root) if not name.startswith("aside")] == ["step-00000040"]
    assert n >= LEAST_CALLS[scenario]


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a resumed run would start from step 0. A checkpoint with such a file is skipped."""

    def denied(path: Path) -> NoReturn:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    hash_of = checkpoint._hash_of
    monkeypatch.setattr(
        checkpoint, "_hash_of", lambda file: (denied if "-00000020" in str(file) else hash_of)(file)
    )
    path, skipped = checkpoint.newest(root)
    assert path == root / "step-00000010"
    assert "Permission denied" in str(skipped)
    monkeypatch.setattr(Path, "iterdir", denied)
    text = refusal(lambda: checkpoint.newest(root))
    assert text == f"cannot read the checkpoints: Permission denied: {root}"
