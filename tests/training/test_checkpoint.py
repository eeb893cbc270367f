"""Whatever happens to a checkpoint, a whole one is found and loads.

What happens while one is written: test_storage_faults.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hvdtrain.errors import CheckpointError
from hvdtrain.training import checkpoint
from tests.messages import Message
from tests.runs import Values, saved_steps

Damage = Callable[[Path], None]
FILES = ("model.pt", "optimizer.pt", "trainer.pt", "manifest.json", "COMPLETE")


def parts(step: int) -> Values:
    return {
        "model": {"weight": torch.full((40, 10), float(step)), "bias": torch.tensor(step)},
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"lr": 0.1}]},
        "trainer": {"step": step, "schedule": None},
    }


def save(root: Path, step: int) -> Path:
    return checkpoint.save(root, step, parts(step), {"world_size": 2})


def assert_loads(path: Path, step: int) -> None:
    assert checkpoint.problem(path) is None
    wanted = parts(step)
    loaded = {name: checkpoint.load(path, name) for name in wanted}
    torch.testing.assert_close(loaded, wanted, rtol=0, atol=0)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_round_trip(root: Path) -> None:
    path, skipped = checkpoint.newest(root)
    assert path == root / "step-00000020"
    assert not skipped
    assert_loads(path, 20)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest.items() >= {"format": 1, "step": 20, "world_size": 2}.items()
    assert set(names(path)) == set(FILES)


def test_steps_are_ordered_by_number(tmp_path: Path) -> None:
    for step in (200_000_000, 5, 99_999_999):
        save(tmp_path / "checkpoints", step)
    assert saved_steps(tmp_path) == [5, 99_999_999, 200_000_000]


def test_saving_the_same_step_replaces_it(root: Path) -> None:
    path = checkpoint.save(root, 20, parts(21), {})
    assert_loads(path, 21)
    assert names(root) == ["step-00000010", "step-00000020"]


# Damage


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


DAMAGES: dict[str, Damage] = {
    "a bit": flip_bit,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
}
REPLACEMENTS: dict[str, Damage] = {
    "deleted": lambda path: None,
    "a folder": Path.mkdir,
    "a loop of links": lambda path: path.symlink_to(path.name),
    "a FIFO": os.mkfifo,
}


@pytest.mark.parametrize("damage", [*DAMAGES, *REPLACEMENTS])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_named(root: Path, name: str, damage: str) -> None:
    """At any byte: tests/test_fuzz.py."""
    newest = root / "step-00000020"
    if damage in REPLACEMENTS:
        (newest / name).unlink()
    {**DAMAGES, **REPLACEMENTS}[damage](newest / name)
    path, skipped = checkpoint.newest(root)
    assert path == root / "step-00000010"
    assert list(skipped) == [newest]
    # A manifest is what its hash says or it is not, whichever of the two was damaged.
    assert name in skipped[newest]
    assert_loads(path, 10)


def test_swapped_directories_are_found(root: Path) -> None:
    """Else the run would go on from step 10 and count it as step 20."""
    old, new = root / "step-00000010", root / "step-00000020"
    shutil.rmtree(new)
    old.rename(new)
    assert checkpoint.problem(new) == "its manifest names step 10"
    best = new.rename(root / "best")
    assert_loads(best, 10)  # a name of the user's own says nothing


def seal(path: Path, manifest: object) -> None:
    """Write a manifest, and a marker that agrees with it."""
    text = json.dumps(manifest) if not isinstance(manifest, str) else manifest
    (path / "manifest.json").write_text(text)
    (path / "COMPLETE").write_text(hashlib.sha256(text.encode()).hexdigest())


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "not json",
        "[" * 100_000,
        '{"format": 1, "step": 20}',
        '{"format": 1, "step": 20, "files": ["model.pt"]}',
        '{"format": 1, "step": 20, "files": {"model.pt": {}}}',
        '{"format": 1, "step": 20, "files": {"model.pt": "x"}}',
        # Names outside of its folder.
        *(
            json.dumps({"format": 1, "step": 20, "files": {name: {"bytes": 1, "sha256": "0"}}})
            for name in ("../model.pt", "/etc/passwd", "a/b.pt", "..")
        ),
    ],
    ids=lambda text: text[:50],
)
def test_a_misshapen_manifest_is_a_reason(root: Path, text: str) -> None:
    newest = root / "step-00000020"
    seal(newest, text)
    path, skipped = checkpoint.newest(root)
    assert path == root / "step-00000010"
    assert skipped[newest]
    assert "\n" not in skipped[newest]
    checkpoint.prune(root, keep=1)
    assert_loads(path, 10)


def test_another_format_is_named(root: Path) -> None:
    seal(root / "step-00000020", {"format": 2, "tensors": []})
    assert checkpoint.problem(root / "step-00000020") == "it has format 2; this version reads 1"


def test_odd_entries_are_skipped(root: Path) -> None:
    others = ".staging-step-00000060-1 .trash-step-00000070-1 aside-step-00000080 step-9"
    for name in ("step-00000030", *others.split()):
        (root / name).mkdir()
    (root / "step-00000030" / "COMPLETE").touch()
    (root / "step-00000040").symlink_to("step-00000040")
    (root / "step-00000050").write_text("a file")
    path, skipped = checkpoint.newest(root)
    assert path == root / "step-00000020"
    assert {path.name: why for path, why in skipped.items()} == {
        "step-00000050": "it is not a directory",
        "step-00000040": "it does not exist",
        "step-00000030": "it is incomplete: manifest.json is missing",
    }


def test_nothing_there(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "none") == (None, {})
    assert checkpoint.newest(tmp_path) == (None, {})
    checkpoint.prune(tmp_path / "none", keep=1)
    checkpoint.remove_leftovers(tmp_path / "none")


# What a load refuses


@pytest.mark.parametrize(
    "data", [None, b"hello", b"vm-17\n", b""], ids=["code", "hello", "vm-17", "empty"]
)
def test_a_file_with_code_or_of_something_else(
    data: bytes | None, tmp_path: Path, message: Message
) -> None:
    proof, path = tmp_path / "it-ran", tmp_path / "model.pt"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, (f"touch {proof}",)

    torch.save({"weight": Evil()}, path)
    if data is not None:
        path.write_bytes(data)
    with message.raises(CheckpointError) as caught:
        checkpoint.load_file(path)
    assert "weights_only" not in str(caught.value), "torch's advice to trust it"
    assert not proof.exists()


def test_a_file_that_is_not_in_the_manifest_is_not_loaded(root: Path) -> None:
    path = root / "step-00000020"
    torch.save({"weight": torch.ones(1)}, path / "extra.pt")
    with pytest.raises(CheckpointError, match="has no part 'extra'"):
        checkpoint.load(path, "extra")


@pytest.mark.parametrize(
    ("value", "text"),
    [(np.float64(1), "numpy"), (lambda: None, "[Pp]ickle")],
    ids=["numpy", "lambda"],
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


def test_a_file_in_place_of_a_step_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-00000010").symlink_to("nowhere")
    assert_loads(save(tmp_path, 10), 10)


# Pruning and setting aside


def test_prune_keeps_the_newest(root: Path) -> None:
    for step in (30, 40):
        save(root, step)
    for keep in (2, 5):
        checkpoint.prune(root, keep)
        assert names(root) == ["step-00000030", "step-00000040"]


def test_prune_keeps_the_best_of_each_kept_one(root: Path) -> None:
    for step, best in ((30, 10), (40, 10), (50, 40), (60, 60)):
        checkpoint.save(root, step, parts(step), {"kept_steps": [best]})
        checkpoint.prune(root, keep=2)
    # Whether a run is resumed from 50 or from 60, its best one is there.
    assert names(root) == ["step-00000040", "step-00000050", "step-00000060"]


@pytest.mark.parametrize("name", FILES)
def test_prune_never_takes_the_only_valid_one(root: Path, name: str) -> None:
    (root / "step-00000020" / name).unlink()
    checkpoint.prune(root, keep=1)
    path, _ = checkpoint.newest(root)
    assert path == root / "step-00000010"
    save(root, 30)
    checkpoint.prune(root, keep=1)
    assert names(root) == ["step-00000030"]


def test_prune_of_damaged_ones_alone_removes_nothing(root: Path) -> None:
    for path in checkpoint.list_checkpoints(root):
        (path / "COMPLETE").unlink()
    checkpoint.prune(root, keep=1)
    assert names(root) == ["step-00000010", "step-00000020"]


def test_set_aside_loses_nothing(root: Path) -> None:
    (root / "step-00000020" / "COMPLETE").unlink()
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
