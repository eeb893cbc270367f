"""The secret of the job: bytes that this user's ranks have, and no other user of the machine.

Used wherever bytes of another process are trusted: the store (`signed_store`), connections between
ranks (`peer_sockets`), and every pickle that ranks exchange. The secret is never sent nor stored in
any of them; a key for each purpose is derived from it, and HMAC-SHA256 with that key is the proof.

The secret is, in this order:
    HVDTRAIN_JOB_SECRET         hvdrun passes a random one through the stdin of its supervisors
    ~/.config/hvdtrain/secret   mode 0600, created once: ranks under torchrun, srun ... have
                                it on one host, and on all hosts that share the home
    /tmp/hvdtrain-UID/secret    (or in TMPDIR) in a folder of mode 0700, without a home to write to
Under mpirun rank 0 draws one for the job, which MPI sends to the others. Imports no torch.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.errors import LaunchError, WorldError

VARIABLE = "HVDTRAIN_JOB_SECRET"
SECRET_BYTES = TAG_BYTES = 32
ADVICE = (
    f"copy ~/.config/hvdtrain/secret to all hosts (scp), or set {VARIABLE} to the same value on "
    "all of them (openssl rand -hex 32)"
)
STRANGER = f"another user, or a host with another secret; {ADVICE}"
_MIN_CHARACTERS = 16
_known: list[bytes] = []  # at most one


class NotOfThisJob(WorldError):
    """Bytes that do not prove the job's secret: of another user, or of a host with another one."""


def secret() -> bytes:
    """Return the 32 bytes of the secret: once read, it stays that of this process, whatever a
    script does to its environment. Raises LaunchError if none is hidden from other users.
    """
    if not _known:
        _known.append(_find())
    return _known[0]


def _find() -> bytes:
    if text := os.environ.get(VARIABLE, ""):
        if len(text) < _MIN_CHARACTERS:
            raise LaunchError(
                f"{VARIABLE} has only {len(text)} characters; set it to the output of "
                "openssl rand -hex 32"
            )
        return hashlib.sha256(text.encode()).digest()
    fallback = Path(tempfile.gettempdir()) / f"hvdtrain-{os.geteuid()}"
    try:
        home = Path(os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser())
        folder = home / "hvdtrain"
    except RuntimeError:  # no HOME, and no such user in passwd
        folder = fallback
    return _of_user(folder, fallback)


def variable_of(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variable for the ranks of a launcher with this environment: its own, or a new one.

    It must not be on a command line, which every user of the host can read.
    """
    return {VARIABLE: env.get(VARIABLE) or secrets.token_hex(SECRET_BYTES)}


def adopt(rank0s: bytes) -> None:
    """Use rank 0's secret from now on. It arrived on a channel that strangers cannot write to."""
    _known[:] = [rank0s]


def tag(purpose: str, *parts: bytes | memoryview) -> bytes:
    """Return the proof of the secret for these bytes: HMAC-SHA256 with the key of a purpose."""
    key = hmac.digest(secret(), f"hvdtrain {purpose}".encode(), "sha256")
    proof = hmac.new(key, digestmod="sha256")
    for part in parts:
        proof.update(len(part).to_bytes(8, "big"))
        proof.update(part)
    return proof.digest()


def is_tag(given: bytes | memoryview, purpose: str, *parts: bytes | memoryview) -> bool:
    """Return whether `given` proves the secret for these bytes."""
    return hmac.compare_digest(given, tag(purpose, *parts))


def sign(obj: Any, dumps: Callable[[Any], bytes] = pickle.dumps) -> bytes:
    """Return the pickle of an object behind the proof that a rank of this job has written it."""
    data = dumps(obj)
    return tag("object", data) + data


def unsign(data: Any, whose: str = "another rank") -> Any:
    """Return the object that `sign` was given; `data` is its bytes, or a NumPy array of them.

    Raises NotOfThisJob before anything is unpickled.
    """
    given, pickled = memoryview(data)[:TAG_BYTES], memoryview(data)[TAG_BYTES:]
    if not is_tag(given, "object", pickled):
        raise NotOfThisJob(f"an object of {whose} {not_proven()}")
    return pickle.loads(pickled)


def not_proven() -> str:
    """Return the predicate of bytes without proof, and what to do."""
    return (
        f"is not signed with this job's secret on {socket.gethostname()}: it comes from {STRANGER}"
    )


# The file


def _of_user(folder: Path, fallback: Path) -> bytes:
    """Return the secret in the file of this user, which is created if it does not exist."""
    # A home of another user (sudo keeps HOME) must get no file of ours, and has none for us.
    above = next(path for path in folder.parents if os.path.exists(path))
    if above.stat().st_uid == os.geteuid():
        try:
            return _read_or_create(folder)
        except OSError as error:
            # Another secret, in place of one that exists, would keep this rank out of its job.
            if os.path.lexists(path := folder / "secret"):
                raise LaunchError(
                    f"{path} cannot be read ({error.strerror}); make it a plain file of mode 0600, "
                    f"or set {VARIABLE}"
                ) from None
    try:
        return _read_or_create(fallback)
    except OSError as error:
        raise LaunchError(
            f"cannot store the job's secret in {folder} or in {fallback} "
            f"({error.strerror}); {ADVICE}"
        ) from None


def _read_or_create(folder: Path) -> bytes:
    """Return the secret in a folder of this user. Raises OSError if it cannot be created, and
    LaunchError if another user has or can read it.
    """
    path = folder / "secret"
    with suppress(FileNotFoundError):
        return _read(path)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder.lstat(), folder, stat.S_ISDIR, 0o022)
    with tempfile.NamedTemporaryFile("w", dir=folder) as file:  # of mode 0600
        file.write(secrets.token_hex(32))
        file.flush()
        os.fsync(file.fileno())
        with suppress(FileExistsError):  # another rank was first: its secret counts
            os.link(file.name, path)
    for _ in range(20):
        with suppress(FileNotFoundError):  # NFS may know for a moment that there is none
            return _read(path)
        time.sleep(0.1)
    return _read(path)


def _read(path: Path) -> bytes:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        _check_private(path.parent.lstat(), path.parent, stat.S_ISDIR, 0o022)
        _check_private(os.fstat(file.fileno()), path, stat.S_ISREG, 0o077)
        text = file.read(4096)
    if len(text) < _MIN_CHARACTERS:
        raise LaunchError(f"{path} holds no secret; remove it, and the next start creates one")
    return hashlib.sha256(text.strip()).digest()


def _check_private(
    status: os.stat_result, path: Path, is_kind: Callable[[int], bool], forbidden: int
) -> None:
    """Raise LaunchError unless only this user can read a file, or write to a folder."""
    if not is_kind(status.st_mode) or status.st_uid != os.geteuid():
        raise LaunchError(f"{path} belongs to another user; remove it, or set {VARIABLE}")
    if status.st_mode & forbidden:
        raise LaunchError(
            f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):o}); remove it and "
            f"start again, or set {VARIABLE}"
        )
