"""Trained weights: find them in a run, a checkpoint or a file; load them into a model; write them.

Used by `--init-from` and by the commands `evaluate` and `export`. One rank reads and
writes. Weights are a plain `state_dict()`, without the prefixes of wrappers.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
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
    run: dict[str, Any]
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
    if (best and not is_run) or (ema and path.is_file()):
        option, what = ("--best", "") if best else ("--ema", " or a checkpoint")
        raise InputError(f"{option} needs a run directory{what}; {path} is not one")
    if path.is_file():
        return Weights(path, {})
    above = path.resolve().parent.parent
    folder = path if is_run else above if (above / "run.json").exists() else None
    if not is_run and not (path / "manifest.json").exists():
        raise InputError(
            f"no weights in {path}: it is not a run directory, a checkpoint or a file such as "
            "model.pt; `hvdtrain runs DIR` lists the runs in DIR"
        )
    run, found = run_dir.read(folder) if folder is not None else {}, path
    if is_run:
        with run_dir.checked(path / "run.json"):
            found = _chosen(path, run, best)
    if why := checkpoint.problem(found):
        valid, _ = checkpoint.newest(found.parent)
        other = "none is valid there" if valid is None else f"give another one, such as {valid}"
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
            f"{path} has no checkpoint: the run ({run_dir.outcome_of(run)}) has not saved one"
        )
    return checkpoints[-1]


def read(weights: Weights) -> dict[str, Any]:
    """Return the state dict, on the CPU. Of a run with fp32 masters, these replace its half
    weights. Not collective. Raises CheckpointError or InputError for a file that holds none, and
    InputError for a checkpoint without the average of `--ema` that is meant.
    """
    path = weights.path
    if weights.ema:
        states = _part(path, "callbacks")
        if "EMA" not in states:
            raise InputError(f"{path} has no average of the weights; train with --ema DECAY")
        return dict(states["EMA"]["weights"])
    if path.is_dir():
        return {**checkpoint.load(path, "model"), **_part(path, "masters")}
    if path.suffix == ".safetensors":
        library = _safetensors()
        try:
            state = library.load_file(path)
        except Exception as error:  # a damaged file can raise nearly anything
            raise InputError(f"cannot load {path}: {one_line(error)}") from None
    else:
        state = checkpoint.load_file(path)
    if not isinstance(state, dict) or not any(isinstance(v, Tensor) for v in state.values()):
        what = f"a dict of {', '.join(map(str, state))}" if isinstance(state, dict) else "something"
        raise InputError(
            f"{path} holds {what}, not a state dict; write one with torch.save(model.state_dict(), "
            f"{path.name!r})"
        )
    return {str(name): value for name, value in state.items()}


def _part(path: Path, name: str) -> dict[str, Any]:
    """Return a part of a checkpoint that not every one has."""
    return checkpoint.load(path, name) if (path / f"{name}.pt").exists() else {}


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

    Its names may have the prefixes of wrappers. Raises InputError if it is not of this model;
    unless `strict`, only if nothing fits, and returns the names that are left out: those that
    either lacks, or has in another shape.
    """
    own = {uncompiled(name): (name, value) for name, value in model.state_dict().items()}
    state = without_prefixes(state, own)
    left_out = [
        name
        for name in ({} if strict else {**own, **state})
        if name not in own
        or name not in state
        or getattr(state[name], "shape", None) != getattr(own[name][1], "shape", None)
    ]
    fitting = {
        own[name][0] if name in own else name: value
        for name, value in state.items()
        if name not in left_out
    }
    try:
        model.load_state_dict(fitting, strict or not fitting)
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"{origin} does not fit this model: {one_line(error).rstrip('.')}; give the --task and "
            "the --set that it was trained with"
        ) from None
    return ", ".join(left_out)


def check_suffix(path: Path, suffixes: tuple[str, ...]) -> None:
    """Raise InputError if a file of this name is none that can be written. Not collective."""
    if path.suffix not in suffixes:
        raise InputError(
            f"cannot write {path}: its suffix {path.suffix!r} is not one of: {', '.join(suffixes)}"
        )
    if path.is_dir():
        raise InputError(f"{path} is a directory; give the name of a file")


def write(state: Mapping[str, Any], path: Path) -> None:
    """Write a state dict, by the suffix with torch.save or as safetensors. Not collective.

    Replaces `path`, which `check_suffix` has accepted, atomically. Raises InputError if it cannot
    be written.
    """
    try:
        if path.suffix == ".safetensors":
            other = [name for name, value in state.items() if not isinstance(value, Tensor)]
            if other:
                raise InputError(
                    f"safetensors stores only tensors, not: {', '.join(other)}; write a .pt file"
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
            "a .safetensors file needs the package safetensors: pip install 'hvdtrain[safetensors]'"
        ) from None
    return safetensors.torch
