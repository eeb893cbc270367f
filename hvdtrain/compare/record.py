"""compare.json: all raw measurements of a comparison; every displayed number is computed from it.

`run` fills in a `Record`, and `analysis` and `report` read it. Every field but `arms` and `blocks`
has a default, because a comparison can be interrupted before it is known; None and empty mean "not
recorded". Fields that this version does not know, of older files, are left out. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hvdtrain.errors import InputError, printable
from hvdtrain.launch.host_list import choose_slots, parse_host_list
from hvdtrain.system import files
from hvdtrain.system.machine import Machine
from hvdtrain.system.trees import map_tree

SCHEMA = 1
NAME = "compare.json"
RankTimes = list[list[float]]
"""Milliseconds by [rank][step]."""


@dataclass
class RankSettings:
    """The settings in force on one rank, as found there."""

    threads: int | None = None
    interop_threads: int | None = None
    affinity: list[int] = field(default_factory=list)
    """The cores of the rank."""
    variables: dict[str, str] = field(default_factory=dict)


@dataclass
class ArmRecord:
    """One arm: its definition, the settings in force, and how it ended."""

    name: str
    ranks: int
    key: str = ""
    """The name, with the world size where several are compared."""
    role: str = "arm"
    backend: str = ""
    transport: str | None = None
    launcher: str | None = None
    command: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    """The options that the arm has for itself, of METHOD_OPTIONS."""
    period: int = 1
    """Steps after which its work repeats: those between two averages of local SGD."""
    status: str | None = None
    """waiting, running, measured, failed or refused."""
    reason: str | None = None
    """Why it failed or was refused."""
    log: str | None = None
    in_force: list[RankSettings] = field(default_factory=list)
    describe: dict[str, Any] = field(default_factory=dict)
    """What `Backend.describe` returns on rank 0."""
    samples_per_step: int | None = None
    gradient_bytes: int | None = None
    parameters: int | None = None
    warm_up_steps: int | None = None
    even: bool | None = None
    """Whether step times had settled by the end of the warm-up."""
    peak_mib: list[float] = field(default_factory=list)

    @property
    def has_ended_early(self) -> bool:
        """Whether the arm failed or was refused."""
        return self.status in ("failed", "refused")


@dataclass
class ArmTimes:
    """The steps of one arm in one block."""

    step_ms: RankTimes = field(default_factory=list)
    input_ms: RankTimes = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of each rank."""
    foreign: float | None = None
    """Share of the comparison's cores that other processes took meanwhile."""
    steal: float | None = None
    """Share of the comparison's cores that the host of a virtual machine took meanwhile."""


@dataclass
class Block:
    """One block: some steps of every arm, in random order."""

    index: int
    arms: dict[str, ArmTimes]
    generation: int | None = None
    """The number of times that all processes had been started anew before it."""
    kept: bool = True
    """Whether the block counts."""
    dropped: str | None = None
    """Why it does not count."""
    foreign: float | None = None
    steal: float | None = None


@dataclass
class ParityRow:
    """The verdict on the work of one arm."""

    arm: str
    verdict: str
    """bitwise, within tolerance, other method, unequal or not compared."""
    text: str = ""
    difference: float | None = None
    tolerance: float | None = None
    cause: str | None = None
    """The likely cause of unequal work."""
    note: str = ""
    """What differs although the work is equal."""


@dataclass
class Config:
    """The options of the comparison, by their names in CompareOptions, and what followed."""

    task: str | None = None
    set: dict[str, str] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    hosts: str | None = None
    """As given; None for this host."""
    scaling: str | None = None
    """None with a single world size."""
    arms: list[str] = field(default_factory=list)
    baseline: str | None = None
    budget_s: float | None = None
    target_ci: float | None = None
    blocks: int | None = None
    min_blocks: int | None = None
    """Blocks that count before narrow intervals may end the comparison."""
    least_blocks: int | None = None
    """Blocks that count before the end of the time may; and blocks before that of `longest_s`."""
    longest_s: float | None = None
    """The time after which a comparison ends although fewer blocks count."""
    steps: int | None = None
    proof_steps: int | None = None
    max_foreign: float | None = None
    batch_size: int | None = None
    accumulate: int | None = None
    precision: str | None = None
    opt_level: str | None = None
    sync_bn: bool | None = None
    compression: str | None = None
    shard_optimizer: bool | None = None
    sync_every: int | None = None
    local_warmup: int | None = None
    local_state: str | None = None
    outer_optimizer: str | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    """In older files, of which `outer_optimizer` has the name alone."""
    device: str | None = None
    device_reason: str | None = None
    lr: float | list[float] | None = None
    """As found in the optimizers, one per parameter group."""
    clip_norm: float | str | None = None
    """None: gradients are not clipped; older files have "inf"."""
    buffers: str | None = None
    unused_parameters: str | None = None
    uneven: str | None = None
    workers: int | None = None
    threads: int | None = None
    pinned: bool | None = None
    seed: int | None = None
    timeout_s: float | None = None
    output: str | None = None
    data: str | None = None
    """What the task says about its data."""
    steps_per_block: int | None = None
    starts: int | None = None
    stopped_by: str | None = None

    @property
    def num_hosts(self) -> int:
        """The number of hosts with ranks of the largest world size. Raise InputError."""
        if not self.hosts:
            return 1
        hosts = parse_host_list(self.hosts)
        return len(choose_slots(hosts, max(self.ranks, default=None), None, None))


@dataclass
class Record:
    """A comparison."""

    arms: dict[str, ArmRecord]
    blocks: list[Block]
    schema: int = SCHEMA
    outcome: str = "running"
    """running, finished, interrupted (Ctrl-C), terminated (SIGTERM) or failed."""
    note: str | None = None
    """Why it is not finished, or has no results."""
    command: list[str] = field(default_factory=list)
    started: str | None = None
    ended: str | None = None
    commit: str | None = None
    baseline: str | None = None
    """The name of the baseline, which every world size has."""
    config: Config = field(default_factory=Config)
    machine: Machine = field(default_factory=Machine)
    versions: dict[str, str | None] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    accounts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By arm: the work trace of each rank's first steps, as evidence for a reader."""
    parity: list[ParityRow] = field(default_factory=list)
    ends: list[dict[str, tuple[int, str]]] = field(default_factory=list)
    """Per start, by arm: steps taken, and the hash of the parameters, equal on all ranks."""

    @property
    def kept_blocks(self) -> list[Block]:
        """The blocks that count."""
        return [block for block in self.blocks if block.kept]

    def key_of(self, role: str, ranks: int) -> str:
        """Return the key of the arm with this role at a world size; "" if there is none."""
        arms = self.arms.items()
        return next((key for key, arm in arms if arm.role == role and arm.ranks == ranks), "")

    def period_of(self, key: str) -> int:
        """Return the steps after which the work of an arm repeats."""
        return self.arms[key].period if key in self.arms else 1


def finite_or_none(value: float | None) -> float | None:
    """Return a float that JSON can represent, or None."""
    return float(value) if value is not None and math.isfinite(value) else None


def write(record: Record, folder: Path) -> Path:
    """Write the record atomically, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    text = json.dumps(record, default=vars, separators=(",", ":"))
    files.write_atomically(path, text + "\n", sync=False)
    return path


def read(folder: Path) -> Record:
    """Return the record of a folder or file. Raise InputError if it is missing or not valid."""
    path = folder / NAME if folder.is_dir() else folder
    if path.exists() and not path.is_file():  # reading /dev/zero never ends
        raise InputError(f"no comparison in {folder}: {path} is not a file")
    advice = "give the folder that `hvdtrain compare` printed"
    try:
        # A terminal obeys control characters, and somebody else may have made the file.
        found = json.loads(
            path.read_bytes(), object_pairs_hook=lambda pairs: {printable(k): v for k, v in pairs}
        )
        found = map_tree(printable, str, found)
        schema = found.get("schema") if isinstance(found, dict) else None
        if schema == SCHEMA:
            return parse(found)
    except OSError as error:
        raise InputError(
            f"no comparison in {folder}: {error.strerror} ({path}); {advice}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged, or no comparison: {error}; {advice}") from None
    raise InputError(
        f"{path} has schema {schema!r}; this hvdtrain reads {SCHEMA}; use the hvdtrain that "
        "wrote it"
    )


def parse(found: dict[str, Any]) -> Record:
    """Return the record that a JSON object holds. Raise ValueError for values of a wrong type."""
    record: Record = _parse(Record, found, "the record")
    return record


def _parse(kind: Any, value: Any, name: str) -> Any:
    """Return a JSON value as `kind`: a dataclass, a container, or a plain type."""
    if isinstance(kind, types.UnionType):
        for member in typing.get_args(kind):
            with contextlib.suppress(ValueError):
                return _parse(member, value, name)
    inner = typing.get_args(kind)
    container = typing.get_origin(kind) or kind
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints, required = _fields(kind)
        if lacking := required - set(value):
            raise ValueError(f"{name} has no {', '.join(sorted(lacking))}")
        known = {key: _parse(hint, value[key], key) for key, hint in hints.items() if key in value}
        return kind(**known)
    if container is list and isinstance(value, list):
        return [_parse(inner[0], item, name) for item in value]
    if container is dict and isinstance(value, dict):
        return {key: _parse(inner[1], item, key) for key, item in value.items()}
    if container is tuple and isinstance(value, list) and len(value) == len(inner):
        return tuple(_parse(k, item, name) for k, item in zip(inner, value, strict=True))
    if kind is Any or isinstance(value, (int, float) if kind is float else container):
        return value
    raise ValueError(f"{name} is {json.dumps(value)[:40]}, not {getattr(kind, '__name__', kind)}")


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], set[str]]:
    """Return the types of a dataclass's fields, and the names of those without a default."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    required = {
        f.name
        for f in dataclasses.fields(kind)
        if f.default is missing and f.default_factory is missing
    }
    return hints, required
