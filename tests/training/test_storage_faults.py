"""Full disks, disks without permission, errors and crashes: some valid checkpoint always loads.

The disks are real file systems, mounted by a forked process in a mount namespace of its own. Errors
that no file system gives at will (a quota, a bad sector) are injected into the calls of Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.errors import CheckpointError, InputError
from hvdtrain.training import checkpoint
from hvdtrain.training.run_dir import RunDirectory
from tests.training.test_checkpoint import assert_loads, names, save

PAGE = 4096
STEPS = ["step-00000010", "step-00000020"]


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


# Disks


def forked(function: Callable[[Path], None], root: Path) -> None:
    """Call a function in a forked process; raise what it raises."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        pool.submit(function, root).result()


LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWUSER, PRIVATE = 0x20000, 0x10000000, 0x44000


def call(name: str, *arguments: Any) -> None:
    if getattr(LIBC, name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def enter_mount_namespace() -> None:
    """Unprivileged users get it within a user namespace."""
    call("unshare", NEWNS if os.geteuid() == 0 else NEWNS | NEWUSER)
    call("mount", b"none", b"/", None, PRIVATE, None)


def fill(root: Path) -> None:
    """Save beside a file that leaves one page more each time, until there is room."""
    enter_mount_namespace()
    disk = root.parent
    disk.mkdir()
    call("mount", b"tmpfs", bytes(disk), b"tmpfs", 0, b"size=400k")
    save(root, 10)
    save(root, 20)
    filler = disk / "filler"
    filler.write_bytes(bytes(os.statvfs(disk).f_bavail * PAGE))
    refused = 0
    while text := refusal(partial(save, root, 20 if refused % 3 == 0 else 30)):
        assert text.startswith(f"cannot write the checkpoint {root}/step-000000"), text
        assert "No space left on device" in text
        assert names(root) == STEPS
        assert_some_is_valid(root)
        refused += 1
        os.truncate(filler, filler.stat().st_size - PAGE)
    assert refused > 4
    checkpoint.prune(root, 1)  # which makes room
    save_and_prune(root, 40)
    filler.write_bytes(bytes(os.statvfs(disk).f_bavail * PAGE + filler.stat().st_size))
    assert "No space left" in refusal(lambda: save_and_prune(root, 50))
    assert names(root) == ["step-00000040"]
    assert_some_is_valid(root, 40)
    text = refusal(lambda: RunDirectory(disk / "run", resuming=False).start({"x": "y" * PAGE}))
    assert "cannot write the run directory" in text
    assert "No space left on device" in text


def test_a_full_disk(tmp_path: Path) -> None:
    forked(fill, tmp_path / "disk" / "checkpoints")


def drop_override() -> None:
    """Give up what lets root ignore mode bits, as `setpriv --inh-caps -dac_override` does."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice 32 bits
    call("capget", header, sets)
    for k in range(3):
        sets[k] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    call("capset", header, sets)


def obey_mode_bits(root: Path) -> None:
    drop_override()
    newest = root / "step-00000020"
    os.chmod(newest / "model.pt", 0)
    path, skipped = checkpoint.newest(root)
    assert path == root / "step-00000010"
    assert "Permission denied" in skipped[newest]
    os.chmod(newest / "model.pt", 0o400)
    os.chmod(root, 0o500)
    for action in (
        lambda: save(root, 20),
        lambda: save(root, 30),
        lambda: checkpoint.prune(root, 1),
        lambda: checkpoint.set_aside(root, 10),
    ):
        assert "Permission denied" in refusal(action)
    assert names(root) == STEPS
    assert_some_is_valid(root)
    os.chmod(root, 0)
    assert "cannot read" in refusal(lambda: checkpoint.newest(root))
    os.chmod(root, 0o700)
    os.chmod(newest, 0o500)  # its files cannot be removed, but it can be replaced
    save_and_prune(root, 30)
    assert_some_is_valid(root, 30)
    os.chmod(root.parent, 0o500)
    text = refusal(lambda: RunDirectory(root.parent / "run", resuming=False))
    assert "Permission denied" in text


def test_mode_bits(root: Path) -> None:
    try:
        forked(obey_mode_bits, root)
    finally:
        for folder in (root.parent, root, *root.rglob("step-*")):
            folder.chmod(0o700)


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
    "quota, once": OSError(errno.EDQUOT, "Disk quota exceeded"),
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
            if calls == n or (calls > n and how != "quota, once"):  # noqa: B023
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


def test_a_checkpoint_that_is_saved_has_its_name_for_sure(root: Path) -> None:
    disk = UnsyncedDisk(root)
    with hooked(disk.record):
        save(root, 30)
    assert disk.renames == []
