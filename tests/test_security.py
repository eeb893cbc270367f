"""What other users of a machine, and strangers on its network, cannot reach."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from hvdtrain.errors import LaunchError
from hvdtrain.job import job_secret
from hvdtrain.job.job_secret import NotOfThisJob
from hvdtrain.job.rendezvous import open_store_over
from hvdtrain.job.signed_store import SignedStore, Unsigned
from hvdtrain.job.world import World
from hvdtrain.transports.shm_sync import create_memfd, map_peer
from tests.environments import require
from tests.forkserver import warm
from tests.launch import failing
from tests.launching import run, succeed
from tests.test_architecture import ROOT, modules

# Who may unpickle, and why the bytes are no stranger's.
UNPICKLES = {
    "_torch.flight_record": "this process's own record",
    "compare.run.arm_process": "a Unix socket in a private folder",
    "launch.function_call": "the `value_server` of the calling process, and what it has received",
    "job.job_secret": "signed with the secret of the job",
}
# Who opens a port.
LISTENS = {
    "liveness.peer_sockets": "which authenticates every connection",
    "launch.value_server": "each request has the secret that the ranks have by stdin",
}


def calls() -> list[tuple[str, str, ast.Call]]:
    """Every call in the package: the module, what is called, and the call."""
    return [
        (name.partition(".")[2], ast.unparse(node.func), node)
        for name, module in modules().items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
    ]


def test_who_unpickles() -> None:
    loads = ("pickle.loads", "pickle.load", "cloudpickle.loads", "cloudpickle.load", "Unpickler")
    assert {module for module, called, _ in calls() if called.endswith(loads)} == set(UNPICKLES)
    # What torch and Horovod send as objects, they unpickle without a proof.
    theirs = "_object_list dist.all_gather_object _hvd.broadcast_object _hvd.allgather_object"
    assert [
        (module, called) for module, called, _ in calls() if called.endswith((*theirs.split(),))
    ] == []


def test_files_of_torch_run_no_code() -> None:
    loads = [(module, call) for module, called, call in calls() if called == "torch.load"]
    assert len(loads) > 1
    assert [m for m, call in loads if "weights_only=True" not in ast.unparse(call)] == []


def test_who_listens() -> None:
    server = ("create_server", "TCPServer", "HTTPServer")
    found = {module for module, called, _ in calls() if called.endswith(server)}
    for name, module in modules().items():
        classes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
        if any(ast.unparse(base).endswith(server) for node in classes for base in node.bases):
            found.add(name.partition(".")[2])
    assert found == set(LISTENS)


def test_nothing_widens_the_permissions_of_a_file() -> None:
    wide = ("chmod", "umask", "mktemp", "os.system")
    assert [(module, called) for module, called, _ in calls() if called.endswith(wide)] == []
    assert "shell=True" not in "".join(file.read_text() for file in ROOT.rglob("*.py"))


def test_shared_memory_is_of_this_user_alone() -> None:
    """Its inode has no mode that could forbid it: only /proc of the owner's process leads there."""
    require("setpriv", root=True)
    fd = create_memfd(4096)
    try:
        map_peer(os.getpid(), fd, 4096).bytes.fill_(7)
        place = f"/proc/{os.getpid()}/fd/{fd}"
        other = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
        read = subprocess.run([*other, "head", "-c1", place], capture_output=True, text=True)
        assert "Permission denied" in read.stderr, read
        assert subprocess.run(["head", "-c1", place], capture_output=True).stdout == b"\7"
    finally:
        os.close(fd)


def test_a_run_directory_follows_the_umask(tmp_path: Path) -> None:
    umask = 0o027
    folder = tmp_path / "run"
    task = ["--backend", "single", "--task", f"{failing.__file__}:Failing", "--run-dir", folder]
    program = f"import os; os.umask({umask}); from hvdtrain.cli import main; main()"
    command = [sys.executable, "-c", program, *map(str, task), "--max-steps", "2"]
    succeed(run(warm(command)))
    made = [folder, *folder.rglob("*")]
    assert {"run.json", "model.pt"} <= {path.name for path in made}
    for path in made:
        full = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == full & ~umask, path


def test_a_secret_that_cannot_be_read_is_not_replaced_by_another(tmp_path: Path) -> None:
    """The ranks of another host, which can read theirs, would refuse this one."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match="home/secret cannot be read"):
        job_secret._of_user(tmp_path / "home", tmp_path / "fallback")
    assert not (tmp_path / "fallback").exists()


def test_a_signed_store_can_be_cloned() -> None:
    """As torch does where it splits a group."""
    store = SignedStore(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    store.set("key", "value")
    copy: Any = store.clone()
    assert copy.get("key") == b"value"


def test_an_object_without_proof_is_not_unpickled() -> None:
    signed = job_secret.sign(["a value"])
    assert job_secret.unsign(signed) == ["a value"]
    for position in (0, job_secret.TAG_BYTES, len(signed) - 2):
        changed = bytearray(signed)
        changed[position] ^= 1
        with pytest.raises(NotOfThisJob):
            job_secret.unsign(changed)


def test_a_proof_is_of_parts_and_not_of_their_bytes_alone() -> None:
    proof = job_secret.tag("test", b"ab", b"c")
    assert job_secret.is_tag(proof, "test", b"ab", b"c")
    for purpose, *parts in (("test", b"a", b"bc"), ("test", b"abc"), ("other", b"ab", b"c")):
        assert not job_secret.is_tag(proof, purpose, *parts), (purpose, parts)


def test_a_value_of_the_store_proves_its_key_and_its_bytes() -> None:
    inner = HashStore()
    store = SignedStore(inner)
    store.set("key", "value")
    assert store.get("key") == b"value"
    signed = inner.get("key")
    changed = signed[:-1] + b"X"
    for key, value in (("another key", signed), ("key", changed), ("unsigned", b"v" * 64)):
        inner.set(key, value)  # type: ignore[arg-type]
        for read in (store.get, lambda key: store.multi_get([key])):
            with pytest.raises(Unsigned):
                read(key)


def _sends(message: bytes) -> Callable[[bytes], bytes]:
    """Return a broadcast of rank 0's message, as another rank has it: first the prefix of keys."""
    messages = iter([b"prefix", message])
    return lambda own: next(messages)


def test_an_address_without_proof_is_not_used() -> None:
    """Rank 0's, which its host, another user of it, or the launcher's server may have changed."""
    text = b'[["10.9.9.9"], 1, "token"]'
    world = World(1, 2, 0, 1, 1, 2, "horovodrun", "a test")
    for given in (bytes(job_secret.TAG_BYTES), job_secret.tag("store", text)):
        with pytest.raises(NotOfThisJob):
            open_store_over(world, 0.1, _sends(given + text))


@pytest.mark.parametrize(("name", "mode"), [("secret", 0o640), ("", 0o777)])
def test_a_secret_that_others_could_read_or_replace_is_refused(
    tmp_path: Path, name: str, mode: int
) -> None:
    own = job_secret._of_user(tmp_path / "home", tmp_path / "fallback")
    assert own == job_secret._of_user(tmp_path / "home", tmp_path / "fallback")
    (tmp_path / "home" / name).chmod(mode)
    with pytest.raises(LaunchError, match="open to other users"):
        job_secret._of_user(tmp_path / "home", tmp_path / "fallback")
