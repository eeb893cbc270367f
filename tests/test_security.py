"""What other users of a machine, and strangers on its network, cannot reach."""

from __future__ import annotations

import ast
import os
import stat
import sys
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


def calls() -> list[tuple[str, str, str]]:
    """Every call in the package, and every class with bases: the module, what is called or
    inherited from, and the text of the call.
    """
    return [
        (name.partition(".")[2], ast.unparse(used), ast.unparse(node))
        for name, module in modules().items()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call | ast.ClassDef)
        for used in ([node.func] if isinstance(node, ast.Call) else node.bases)
    ]


def callers(names: str) -> set[str]:
    """The modules that call functions, or inherit from classes, whose names end so."""
    return {module for module, called, _ in calls() if called.endswith((*names.split(),))}


def test_who_unpickles() -> None:
    assert callers("pickle.loads pickle.load Unpickler") == set(UNPICKLES)
    # What torch and Horovod send as objects, they unpickle without a proof.
    theirs = "_object_list dist.all_gather_object _hvd.broadcast_object _hvd.allgather_object"
    assert callers(theirs) == set()


def test_files_of_torch_run_no_code() -> None:
    loads = [(module, call) for module, called, call in calls() if called == "torch.load"]
    assert len(loads) > 1
    assert [m for m, call in loads if "weights_only=True" not in call] == []


def test_who_listens() -> None:
    assert callers("create_server TCPServer HTTPServer") == set(LISTENS)


def test_nothing_widens_the_permissions_of_a_file() -> None:
    assert callers("chmod umask mktemp os.system") == set()
    assert "shell=True" not in "".join(file.read_text() for file in ROOT.rglob("*.py"))


def test_shared_memory_is_of_this_user_alone() -> None:
    """Its inode has no mode that could forbid it: only /proc of the owner's process leads there."""
    require("setpriv", root=True)
    with open(create_memfd(4096)) as file:
        map_peer(os.getpid(), file.fileno(), 4096).bytes.fill_(7)
        read = ["head", "-c1", f"/proc/{os.getpid()}/fd/{file.fileno()}"]
        other = "setpriv --reuid 65534 --regid 65534 --clear-groups".split()
        assert "Permission denied" in run([*other, *read]).output
        assert run(read).output == "\7"


def test_a_run_directory_follows_the_umask(tmp_path: Path) -> None:
    umask = 0o027
    folder = tmp_path / "run"
    task = f"--task {failing.__file__}:Failing --run-dir {folder} --max-steps 2"
    program = f"import os; os.umask({umask}); from hvdtrain.cli import main; main()"
    command = [sys.executable, "-c", program, "--backend", "single", *task.split()]
    succeed(run(warm(command)))
    made = [folder, *folder.rglob("*")]
    assert {"run.json", "model.pt"} <= {path.name for path in made}
    for path in made:
        full = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == full & ~umask, path


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for this user's secret."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(job_secret.VARIABLE, raising=False)
    return tmp_path / "hvdtrain"


def test_a_secret_that_cannot_be_read_is_not_replaced_by_another(config: Path) -> None:
    """The ranks of another host, which can read theirs, would refuse this one."""
    config.mkdir()
    (config / "secret").symlink_to("elsewhere")
    with pytest.raises(LaunchError, match="hvdtrain/secret cannot be read"):
        job_secret._find()


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
    inner: Any = HashStore()
    store = SignedStore(inner)
    store.set("key", "value")
    assert store.get("key") == b"value"
    signed = inner.get("key")
    for key, value in (("another", signed), ("key", signed[:-1] + b"X"), ("unsigned", b"v" * 64)):
        inner.set(key, value)
        with pytest.raises(Unsigned):
            store.get(key)
        with pytest.raises(Unsigned):
            store.multi_get([key])


def test_an_address_without_proof_is_not_used() -> None:
    """Rank 0's, which its host, another user of it, or the launcher's server may have changed."""
    text = b'[["10.9.9.9"], 1, "token"]'
    world = World(1, 2, 0, 1, 1, 2, "horovodrun", "a test")
    for given in (bytes(job_secret.TAG_BYTES), job_secret.tag("store", text)):
        sent = iter([b"prefix", given + text])
        with pytest.raises(NotOfThisJob):
            open_store_over(world, 0.1, lambda own, sent=sent: next(sent))  # type: ignore[misc]


@pytest.mark.parametrize(("name", "mode"), [("secret", 0o640), ("", 0o777)])
def test_a_secret_that_others_could_read_or_replace_is_refused(
    config: Path, name: str, mode: int
) -> None:
    assert job_secret._find() == job_secret._find()
    (config / name).chmod(mode)
    with pytest.raises(LaunchError, match="open to other users"):
        job_secret._find()
