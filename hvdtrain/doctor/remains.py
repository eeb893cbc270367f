"""A check of `hvdtrain doctor`: files that jobs have left behind, and that no process uses."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.limits import SHM

# By folder: the prefixes of such files. torchrun leaves a folder even after a success.
PREFIXES = {
    SHM: ("vader_segment.", "sm_segment.", "mpich_shm_", "torch_", "sem.mp-"),
    tempfile.gettempdir(): ("torchelastic_", "hvdtrain-run-", "hvdtrain-horovod-"),
}
_YOUNG_S = 60.0  # the process that uses such a file may not have named it yet


def remains(ranks: int) -> Finding:
    """List what killed jobs have left in /dev/shm and in the temporary folder."""
    found = sorted(find_remains())
    if not found:
        return Finding("ok", "nothing")
    in_memory = [path for path in found if path.parent == Path(SHM)]
    text = f"left by ended jobs ({len(found)}): {', '.join(map(str, found[:3]))}"
    text += f" and {len(found) - 3} more" * (len(found) > 3)
    return Finding("warning" if in_memory else "note", text, "hvdtrain doctor --clean")


def clean() -> list[Path]:
    """Remove what `find_remains` finds; return it."""
    found = find_remains()
    for path in found:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return found


def find_remains() -> list[Path]:
    """Return the files of this user that no process maps, opens or names, visible or not."""
    paths = [path for folder, names in PREFIXES.items() for path in _named(folder, names)]
    used = b"\0".join(_uses()) if paths else b""
    return [path for path in paths if os.fsencode(path) not in used and not _may_be_open(path)]


def _may_be_open(path: Path) -> bool:
    """Return whether a process may write to a file, or have it mapped so: also one of another
    container that shares /dev/shm, which /proc does not show. Folders have no such answer.

    The kernel grants a read lease only if nobody has the file open for writing (fcntl(2)).
    """
    if not path.is_file() or path.is_symlink():
        return False
    try:
        with path.open("rb") as file:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:  # it is open; or this file system knows no leases
        return True
    return False


def _named(folder: str, prefixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield this user's files in `folder` that have such a name, and are not young."""
    with suppress(OSError):
        for path in Path(folder).iterdir():
            with suppress(OSError):
                state = path.lstat()
                is_own = os.geteuid() in (0, state.st_uid)
                if (
                    path.name.startswith(prefixes)
                    and is_own
                    and time.time() - state.st_mtime > _YOUNG_S
                ):
                    yield path


def _uses() -> Iterator[bytes]:
    """Yield what processes map, have opened, and have in their command or environment.

    torchrun's ranks do not open its folder before they fail: they have its name in a variable.
    """
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("maps", "cmdline", "environ"):
            with suppress(OSError):
                yield (process / name).read_bytes()
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    yield os.fsencode(os.readlink(descriptor))
