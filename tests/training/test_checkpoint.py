"""Whatever happens to a checkpoint, or while one is written, a whole one is found and loads."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.errors import CheckpointError
from hvdtrain.training import checkpoint

Damage = Callable[[Path], None]
FILES = ("model.pt", "optimizer.pt", "trainer.pt", "manifest.json", "COMPLETE")


def parts(step: int) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((40, 10), float(step)), "bias": torch.tensor(step)},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]},
        "trainer": {"step": step, "epoch": 1, "scaler": {}, "schedule": None},
    }


def save(root: Path, step: int) -> Path:
    return checkpoint.save(root, step, parts(step), {"world_size": 2})


def assert_loads(path: Path, step: int) -> None:
    assert checkpoint.problem(path) is None
    assert checkpoint.load(path, "trainer")["step"] == step
    assert torch.equal(checkpoint.load(path, "model")["weight"], torch.full((40, 10), float(step)))
    assert checkpoint.load(path, "optimizer")["param_groups"] == [{"lr": 0.1}]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint directory with the steps 10 and 20."""
    root = tmp_path / "checkpoints"
    save(root, 10)
    save(root, 20)
    return root


def test_round_trip(root: Path) -> None:
    path, skipped = checkpoint.newest(root)
    assert path == root / "step-00000020"
    assert not skipped
    assert_loads(path, 20)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["world_size"]) == (1, 20, 2)
    assert set(names(path)) == set(FILES)


def test_the_folder_above_is_made_too(tmp_path: Path) -> None:
    """As a script's own loop needs it: save(Path("runs/gan"), ...)."""
    assert_loads(save(tmp_path / "runs" / "gan", 10), 10)


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    for step in (200_000_000, 5, 99_999_999):
        save(tmp_path, step)
    assert [int(path.name[5:]) for path in checkpoint.list_checkpoints(tmp_path)] == [
        5,
        99999999,
        200000000,
    ]


def test_saving_the_same_step_replaces_it(root: Path) -> None:
    path = checkpoint.save(root, 20, parts(21), {})
    assert_loads(path, 21)
    assert names(root) == ["step-00000010", "step-00000020"]


# Damage


def flip_bit(offset: float) -> Damage:
    """Flip a bit at a share of the file's length."""

    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(offset * (len(data) - 1))] ^= 4
        path.write_bytes(data)

    return damage


def truncate_by_one(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def truncate_to_zero(path: Path) -> None:
    os.truncate(path, 0)


def delete(path: Path) -> None:
    path.unlink()


def append_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_symlink_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Damage] = {
    "first bit": flip_bit(0),
    "bit in the middle": flip_bit(0.5),
    "last bit": flip_bit(1),
    "one byte short": truncate_by_one,
    "empty": truncate_to_zero,
    "one byte long": append_byte,
    "deleted": delete,
    "directory": make_directory,
    "symlink loop": make_symlink_loop,
    "fifo": make_fifo,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_named(root: Path, name: str, damage: str) -> None:
    newest = root / "step-00000020"
    # One newline after the hash is whitespace, and a blank is one, too.
    harmless = name == "COMPLETE" and damage == "one byte short"
    DAMAGES[damage](newest / name)
    why = checkpoint.problem(newest)
    if harmless:
        assert why is None
        return
    assert why is not None
    # A manifest is what its hash says or it is not, whichever of the two was damaged.
    assert name in why
    path, skipped = checkpoint.newest(root)
    assert path == root / "step-00000010"
    assert skipped == [checkpoint.Skipped(newest, why)]
    assert_loads(path, 10)


def test_swapped_files_are_found(root: Path) -> None:
    old, new = root / "step-00000010", root / "step-00000020"
    swapped = (new / "model.pt").read_bytes()
    (new / "model.pt").write_bytes((old / "model.pt").read_bytes())
    (old / "model.pt").write_bytes(swapped)
    path, skipped = checkpoint.newest(root)
    assert path is None
    assert [item.path for item in skipped] == [new, old]
    assert all("model.pt" in item.reason for item in skipped)


def test_swapped_directories_are_found(root: Path) -> None:
    """Else the run would go on from step 10 and count it as step 20."""
    old, new = root / "step-00000010", root / "step-00000020"
    shutil.rmtree(new)
    old.rename(new)
    assert checkpoint.problem(new) == "its manifest is of step 10"
    best = new.rename(root / "best")
    assert_loads(best, 10)  # a name of the user's own says nothing


def seal(path: Path, manifest: object) -> None:
    """Write a manifest, and a marker that agrees with it."""
    text = json.dumps(manifest) if not isinstance(manifest, str) else manifest
    (path / "manifest.json").write_text(text)
    (path / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest())


MISSHAPEN = [
    "[]",
    "null",
    "3",
    "{}",
    "not json",
    "[" * 100_000,
    '{"format": 1}',
    '{"format": 1, "step": 20}',
    '{"format": 1, "step": 20, "files": []}',
    '{"format": 1, "step": 20, "files": ["model.pt"]}',
    '{"format": 1, "step": 20, "files": {"model.pt": null}}',
    '{"format": 1, "step": 20, "files": {"model.pt": {}}}',
    '{"format": 1, "step": 20, "files": {"model.pt": [1, "x"]}}',
    '{"format": 1, "step": 20, "files": {"model.pt": "x"}}',
]


@pytest.mark.parametrize("text", MISSHAPEN, ids=lambda text: text[:40])
def test_a_misshapen_manifest_is_a_reason(root: Path, text: str) -> None:
    newest = root / "step-00000020"
    seal(newest, text)
    path, skipped = checkpoint.newest(root)
    assert path == root / "step-00000010"
    assert skipped[0].path == newest
    assert skipped[0].reason
    assert "\n" not in skipped[0].reason
    checkpoint.prune(root, keep=1)
    assert_loads(path, 10)


@pytest.mark.parametrize("name", ["../model.pt", "/etc/passwd", "a/b.pt", "..", "", "x\0y"])
def test_a_manifest_names_nothing_outside(root: Path, name: str) -> None:
    newest = root / "step-00000020"
    measured = {"bytes": 1, "sha256": "0"}
    seal(newest, {"format": 1, "step": 20, "files": {name: measured}})
    why = checkpoint.problem(newest)
    assert why is not None
    assert ("outside" in why) or ("is missing" in why)


def test_another_format_is_named(root: Path) -> None:
    seal(root / "step-00000020", {"format": 2, "tensors": []})
    assert checkpoint.problem(root / "step-00000020") == "it has format 2; this version reads 1"


def test_odd_entries_are_skipped(root: Path) -> None:
    (root / "step-00000030").mkdir()
    (root / "step-00000030" / "COMPLETE").touch()
    (root / "step-00000040").symlink_to("step-00000040")
    (root / "step-00000050").write_text("a file")
    (root / ".staging-step-00000060-1").mkdir()
    (root / ".trash-step-00000070-1").mkdir()
    (root / "aside-step-00000080").mkdir()
    (root / "step-9").mkdir()
    path, skipped = checkpoint.newest(root)
    assert path == root / "step-00000020"
    assert [(item.path.name, item.reason) for item in skipped] == [
        ("step-00000050", "it is not a directory"),
        ("step-00000040", "it does not exist"),
        ("step-00000030", "manifest.json is missing"),
    ]


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "none") == (None, [])
    assert checkpoint.newest(tmp_path) == (None, [])
    checkpoint.prune(tmp_path / "none", keep=1)
    checkpoint.remove_leftovers(tmp_path / "none")


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root ignores permission bits."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


def test_no_permission() -> None:
    """An unreadable directory must not look like an empty one: the run would start afresh."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        root = Path(folder) / "checkpoints"
        path = save(root, 10)
        os.chmod(path, 0o700)
        os.chmod(path / "model.pt", 0o000)
        with unprivileged():
            if os.access(path / "model.pt", os.R_OK, effective_ids=True):
                pytest.skip("permission bits count for nothing here")
            found, skipped = checkpoint.newest(root)
            assert found is None
            assert "Permission denied" in skipped[0].reason
            with pytest.raises(CheckpointError, match="cannot write.*Permission denied"):
                save(root, 20)
            with pytest.raises(CheckpointError, match="cannot rename.*Permission denied"):
                checkpoint.set_aside(root, 0)
        os.chmod(root, 0o000)
        with unprivileged(), pytest.raises(CheckpointError, match="cannot read.*Permission"):
            checkpoint.newest(root)


# What a load refuses


class Evil:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.proof}",)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_malicious_pickle_does_not_run(root: Path, how: str) -> None:
    proof = root.parent / "it-ran"
    path = root / "step-00000020"
    if how == "torch":
        torch.save({"weight": Evil(proof)}, path / "model.pt")
    else:
        (path / "model.pt").write_bytes(pickle.dumps(Evil(proof), protocol=2))
    manifest = json.loads((path / "manifest.json").read_text())
    data = (path / "model.pt").read_bytes()
    manifest["files"]["model.pt"] = {
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    seal(path, manifest)
    assert checkpoint.problem(path) is None
    with pytest.raises(CheckpointError, match=r"cannot load .*model\.pt: .*system") as caught:
        checkpoint.load(path, "model")
    assert not proof.exists()
    assert "Please use" not in str(caught.value)  # torch's advice to trust it
    assert "trust" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_in_the_manifest_is_not_loaded(root: Path) -> None:
    path = root / "step-00000020"
    torch.save({"weight": torch.ones(1)}, path / "extra.pt")
    with pytest.raises(CheckpointError, match="has no part 'extra'"):
        checkpoint.load(path, "extra")


@pytest.mark.parametrize(
    ("value", "text"),
    [(np.float64(1), "numpy"), (lambda: None, "[Pp]ickle"), (Path("x"), "pathlib")],
    ids=["numpy", "lambda", "path"],
)
def test_a_part_that_could_not_be_loaded_is_not_saved(root: Path, value: object, text: str) -> None:
    """It must be said at the first checkpoint, not on the day of the crash."""
    with pytest.raises(CheckpointError, match=f"cannot write the checkpoint.*{text}") as caught:
        checkpoint.save(root, 30, {**parts(30), "trainer": {"best": value}}, {})
    assert "\n" not in str(caught.value)
    assert names(root) == ["step-00000010", "step-00000020"]
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        checkpoint.save(root, 20, parts(30), {"about": object()})
    assert_loads(root / "step-00000020", 20)


# Kills: the process ends right before the n-th call that changes the disk


CALLS = "mkdir rename replace rmdir unlink fsync open".split()


def end_before_call(n: int, action: Callable[[], object]) -> bool:
    """Run `action` in a forked process that ends at once instead of its n-th call. True: it did."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 77
    try:
        left = n

        def counted(real: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    os._exit(77)
                return real(*args, **kwargs)

            return call

        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        file_type = checkpoint._MeasuredFile
        file_type.write = counted(file_type.write)  # type: ignore[method-assign]
        Path.open = counted(Path.open)  # type: ignore[method-assign]
        Path.write_text = counted(Path.write_text)  # type: ignore[method-assign]
        action()
        os._exit(0)
    finally:
        os._exit(1)


def save_and_prune(root: Path, step: int) -> None:
    save(root, step)
    checkpoint.prune(root, 1)


SCENARIOS: dict[str, Callable[[Path], object]] = {
    "next step": lambda root: save_and_prune(root, 30),
    "same step": lambda root: save_and_prune(root, 20),
    "only one there": lambda root: save(root, 20),
    "prune": lambda root: checkpoint.prune(root, 1),
    "set aside": lambda root: checkpoint.set_aside(root, 5),
    "leftovers": checkpoint.remove_leftovers,
}


@pytest.mark.parametrize(
    "scenario",
    [s if s == "prune" else pytest.param(s, marks=pytest.mark.exhaustive) for s in SCENARIOS],
)
def test_killed_at_any_moment(
    tmp_path: Path, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # counted, but it takes its time
    template = tmp_path / "template"
    save(template, 20)
    if scenario != "only one there":
        save(template, 10)
        save(template, 5)
    if scenario == "leftovers":
        shutil.copytree(template / "step-00000005", template / ".trash-step-00000005-1")
        shutil.move(template / "step-00000020", template / ".staging-step-00000020-1")
    n, killed = 0, True
    while killed:
        n += 1
        root = tmp_path / str(n)
        shutil.copytree(template, root)
        killed = end_before_call(n, lambda root=root: SCENARIOS[scenario](root))  # type: ignore[misc]
        checkpoint.remove_leftovers(root)  # as a resumed run does first
        path, _ = checkpoint.newest(root)
        assert path is not None, f"nothing valid after a kill before call {n}"
        assert_loads(path, int(path.name[5:]))
        if scenario != "set aside":
            assert path.name >= "step-00000020", f"went back after a kill before call {n}"
        save(root, 40)
        checkpoint.prune(root, 1)
        left = [name for name in names(root) if not name.startswith("aside-")]
        assert left == ["step-00000040"], f"after a kill before call {n}"
        shutil.rmtree(root)
    expected = {"set aside": 2, "prune": 6, "leftovers": 6}
    assert n > expected.get(scenario, 30), "too few calls counted"


# A full disk


def test_a_full_disk_at_any_size(root: Path) -> None:
    """A limit on file sizes makes every write beyond it fail, as a full disk would."""
    sizes = [(root / "step-00000020" / name).stat().st_size for name in FILES]
    limits = {0, 1, 64, 500, *range(0, max(sizes) - 1, 397), max(sizes) - 1}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in sorted(limits):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(CheckpointError) as caught:
                save(root, 20 if limit % 2 else 30)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        text = str(caught.value)
        assert text.startswith(f"cannot write the checkpoint {root}"), text
        assert "File too large" in text, text
        assert "\n" not in text
        assert names(root) == ["step-00000010", "step-00000020"]
    assert_loads(root / "step-00000020", 20)
    assert_loads(save(root, 30), 30)


def test_a_file_at_the_path_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot write the checkpoint .*File exists"):
        save(tmp_path / "checkpoints", 10)


def test_a_file_in_place_of_a_step_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-00000010").symlink_to("nowhere")
    assert_loads(save(tmp_path, 10), 10)


def test_a_failed_replacement_restores_the_old_checkpoint(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.rename

    def failing(source: Path, target: Path) -> None:
        if Path(source).name.startswith(".staging"):
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(CheckpointError, match="Input/output error"):
        checkpoint.save(root, 20, parts(21), {})
    monkeypatch.undo()
    assert_loads(root / "step-00000020", 20)
    assert names(root) == ["step-00000010", "step-00000020"]


# Pruning and setting aside


def test_prune_keeps_the_newest(root: Path) -> None:
    for step in (30, 40):
        save(root, step)
    checkpoint.prune(root, keep=2)
    assert names(root) == ["step-00000030", "step-00000040"]
    checkpoint.prune(root, keep=5)
    assert names(root) == ["step-00000030", "step-00000040"]


def test_prune_keeps_the_best_of_each_kept_one(root: Path) -> None:
    for step, best in ((30, 10), (40, 10), (50, 40), (60, 60)):
        checkpoint.save(root, step, parts(step), {"kept_steps": [best]})
        checkpoint.prune(root, keep=2)
    # Whether a run is resumed from 50 or from 60, its best one is there.
    assert names(root) == ["step-00000040", "step-00000050", "step-00000060"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["empty", "one byte long", "deleted", "directory"])
def test_prune_never_takes_the_only_valid_one(root: Path, name: str, damage: str) -> None:
    DAMAGES[damage](root / "step-00000020" / name)
    checkpoint.prune(root, keep=1)
    path, _ = checkpoint.newest(root)
    assert path == root / "step-00000010"
    save(root, 30)
    checkpoint.prune(root, keep=1)
    assert names(root) == ["step-00000030"]


def test_prune_of_damaged_ones_alone_removes_nothing(root: Path) -> None:
    for path in checkpoint.list_checkpoints(root):
        delete(path / "COMPLETE")
    checkpoint.prune(root, keep=1)
    assert names(root) == ["step-00000010", "step-00000020"]


def test_set_aside_loses_nothing(root: Path) -> None:
    delete(root / "step-00000020" / "COMPLETE")
    assert checkpoint.set_aside(root, after=10) == [root / "aside-step-00000020"]
    save(root, 20)
    assert checkpoint.set_aside(root, after=10) == [root / "aside-step-00000020-2"]
    assert names(root) == ["aside-step-00000020", "aside-step-00000020-2", "step-00000010"]
    assert checkpoint.problem(root / "aside-step-00000020-2") is None
    checkpoint.prune(root, keep=1)
    assert len(names(root)) == 3


def test_stale_staging_of_this_very_process_is_no_obstacle(root: Path) -> None:
    """In a container every run has the same process id."""
    for prefix in (".staging-", ".trash-"):
        stale = root / f"{prefix}step-00000020-{os.getpid()}"
        stale.mkdir()
        (stale / "half.pt").touch()
    assert_loads(save(root, 20), 20)
    assert names(root) == ["step-00000010", "step-00000020"]
