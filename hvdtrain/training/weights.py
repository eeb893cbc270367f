"""Trained weights: find them in a run, a checkpoint or a file; load them into a model; write them.

Used by `--init-from` and by the commands `evaluate`, `predict` and `export`. One rank reads and
writes. Weights are a plain `state_dict()`, without the prefixes of wrappers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.errors import BackendUnavailable, CheckpointError, InputError, one_line
from hvdtrain.optim.model_sync import uncompiled
from hvdtrain.system import files
from hvdtrain.training import checkpoint, run_dir

SUFFIXES = (".pt", ".pth", ".safetensors")
"""Of the files that `write` writes."""
_WRAPPER = "module."


@dataclass(frozen=True)
class Weights:
    """Where trained weights are: in a checkpoint, or in a file."""

    path: Path
    run: dict[str, Any] = field(default_factory=dict)
    """The run.json of the run that wrote them; empty if it is not there."""
    ema: bool = False
    """Whether the average of `--ema` is meant, in place of the weights themselves."""
    run_dir: Path | None = None
    """The run directory that `run` was read from."""


def find(path: Path, best: bool = False, ema: bool = False) -> Weights:
    """Return the weights at `path`: the newest checkpoint of a run directory, or with `best` the
    one that `--keep-best` kept; else a checkpoint, or a file. Reads every byte of a checkpoint.
    `ema`: the average of `--ema` there, if `read` finds one.

    Not collective. Raises InputError if there are none, and CheckpointError for a damaged
    checkpoint: it never takes another one instead.
    """
    path = run_dir.locate(path)
    is_run = os.path.lexists(path / "run.json")
    if best and not is_run:
        raise InputError(f"--best wants a run directory, and {path} has no run.json")
    folder: Path | None = path
    if is_run:
        run = run_dir.read(path)
        with run_dir.checked(path / "run.json"):
            found = _chosen(path, run, best)
    elif path.is_dir() and not (path / "manifest.json").exists():
        raise InputError(
            f"no weights in {path}: it has neither a run.json nor the files of a checkpoint; give "
            "a run directory, a checkpoint, or a file such as model.pt"
        )
    elif path.is_dir():
        above = path.resolve().parent.parent
        folder = above if (above / "run.json").exists() else None
        found, run = path, run_dir.read(folder) if folder is not None else {}
    elif path.is_file() and not ema:
        return Weights(path)
    elif path.is_file():
        raise InputError(f"--ema wants a run directory or a checkpoint, and {path} is a file")
    else:
        kind = "it is no file" if path.exists() else "there is no such file or directory"
        raise InputError(f"no weights in {path}: {kind}; `hvdtrain runs DIR` lists the runs in DIR")
    if why := checkpoint.problem(found):
        valid, _ = checkpoint.newest(found.parent)
        other = "no other is valid" if valid is None else f"give another one, such as {valid}"
        raise CheckpointError(f"cannot use the checkpoint {found}: {why}; {other}")
    return Weights(found, run, ema, folder)


def _chosen(path: Path, run: dict[str, Any], best: bool) -> Path:
    """Return the newest checkpoint of a run, or the best one."""
    root = path / "checkpoints"
    if best:
        kept = run.get("best_checkpoint")
        if not kept:
            raise InputError(f"{path} has no best checkpoint; train with --keep-best METRIC")
        own, recorded = checkpoint.path_of(root, kept["step"]), kept.get("path")
        # The run directory may have been moved. But the best checkpoint of a run that was resumed
        # in a directory of its own is in that of the run before.
        return Path(recorded) if recorded and not own.exists() else own
    checkpoints = checkpoint.list_checkpoints(root)
    if not checkpoints:
        raise CheckpointError(
            f"{path} has no checkpoint: the run ({run_dir.outcome_of(run)}) has saved none yet"
        )
    return checkpoints[-1]


def read(weights: Weights) -> dict[str, Any]:
    """Return the state dict, on the CPU. Of a run with fp32 masters, these replace its half
    weights. Not collective. Raises CheckpointError or InputError for a file that holds none, and
    InputError for a checkpoint without the average of `--ema` that is meant.
    """
    path = weights.path
    if weights.ema:
        return _average(path)
    if path.is_dir():
        state = checkpoint.load(path, "model")
        masters = checkpoint.load(path, "masters") if (path / "masters.pt").exists() else {}
        return {**state, **masters}
    if path.suffix == ".safetensors":
        library = _safetensors()
        try:
            state = library.load_file(path)
        except Exception as error:  # a damaged file can raise nearly anything
            raise InputError(f"cannot load {path}: {one_line(error)}") from None
    else:
        state = checkpoint.load_file(path)
    if not isinstance(state, dict) or not any(isinstance(v, Tensor) for v in state.values()):
        what = f"a dict of {', '.join(map(str, state))}" if isinstance(state, dict) else "no dict"
        raise InputError(
            f"{path} holds no state dict but {what}; write one: torch.save(model.state_dict(), "
            f"{path.name!r})"
        )
    return {str(name): value for name, value in state.items()}


def _average(path: Path) -> dict[str, Any]:
    """Return the average of `--ema` in a checkpoint."""
    states = checkpoint.load(path, "callbacks") if (path / "callbacks.pt").exists() else {}
    if "EMA" not in states:
        raise InputError(f"{path} has no average of the weights; train with --ema DECAY")
    average: dict[str, Any] = states["EMA"]["weights"]
    return average


def without_prefixes(state: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """Return a state dict without the prefixes `_orig_mod.` (of torch.compile) and `module.` (of
    DDP) in its names. The latter stays if one of the names is `known` with it. Not collective.
    """
    state = {uncompiled(name): value for name, value in state.items()}
    while state and all(name.startswith(_WRAPPER) and name not in known for name in state):
        state = {name.removeprefix(_WRAPPER): value for name, value in state.items()}
    return state


def load_into(model: nn.Module, state: Mapping[str, Any], origin: Path, strict: bool = True) -> str:
    """Load a state dict into `model`, in place; `origin` is for errors. Not collective.

    Its names may have the prefixes of wrappers. Returns all names that are missing, unexpected or
    of another shape, and are left out. Raises InputError with them if `strict`, or if none is left.
    """
    own = {uncompiled(name): (name, value) for name, value in model.state_dict().items()}
    state = without_prefixes(state, own)
    shapes = [
        f"{name} {_shape(state[name])} instead of {_shape(value)}"
        for name, (_, value) in own.items()
        if name in state and _shape(state[name]) != _shape(value)
    ]
    problems = {
        "missing": [name for name in own if name not in state],
        "unexpected": [name for name in state if name not in own],
        "of another shape": shapes,
    }
    listed = "; ".join(f"{what}: {', '.join(names)}" for what, names in problems.items() if names)
    fitting = {
        own[name][0]: value
        for name, value in state.items()
        if name in own and _shape(value) == _shape(own[name][1])
    }
    if listed and (strict or not fitting):
        raise InputError(
            f"{origin} is not of this model: {listed}; give the task, and its --set, that it was "
            "trained with"
        )
    try:
        model.load_state_dict(fitting, strict)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"{origin} is not of this model: {one_line(error)}") from None
    return listed


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def check_suffix(path: Path, suffixes: tuple[str, ...]) -> None:
    """Raise InputError if a file of this name is none that can be written. Not collective."""
    if path.suffix not in suffixes:
        raise InputError(
            f"{path} has the suffix {path.suffix!r}; a file to write is one of: "
            f"{', '.join(suffixes)}"
        )
    if path.is_dir():
        raise InputError(f"{path} is a directory; give the name of a file")


def write(state: Mapping[str, Any], path: Path) -> None:
    """Write a state dict, by the suffix with torch.save or as safetensors. Not collective.

    Replaces `path` atomically. Raises InputError if it cannot be written.
    """
    check_suffix(path, SUFFIXES)
    try:
        if path.suffix == ".safetensors":
            other = [name for name, value in state.items() if not isinstance(value, Tensor)]
            if other:
                raise InputError(
                    f"safetensors holds tensors alone, and not: {', '.join(other)}; write a .pt"
                )
            # Clones: safetensors refuses tensors that share memory, as tied weights do.
            tensors = {name: value.clone().contiguous() for name, value in state.items()}
            files.write_atomically(path, _safetensors().save(tensors, {"format": "pt"}))
        else:
            with files.replacing(path) as file:
                torch.save(dict(state), file)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError:
        raise BackendUnavailable(
            "a .safetensors file needs its library: pip install 'hvdtrain[safetensors]'"
        ) from None
    return safetensors.torch
