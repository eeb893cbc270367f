"""compare.json: all raw measurements of a comparison; every displayed number is computed from it.

`run` fills in a `Record`, and `analysis.table` reads it. Every field but `arms` and `blocks` has a
default, because a comparison can be interrupted before it is known; None and empty mean "not
recorded". What this version does not know, of older files, is left out: fields, and arms of other
roles. Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain.errors import InputError, printable
from hvdtrain.system import files
from hvdtrain.system.machine import Machine
from hvdtrain.system.trees import map_tree

SCHEMA = 1
NAME = "compare.json"
ROLES = ("arm", "baseline", "again")
RankTimes = list[list[float]]
"""Milliseconds by [rank][step]."""


@dataclass
class RankSettings:
    """The settings in force on one rank, as found there."""

    threads: int | None = None
    affinity: list[int] = field(default_factory=list)
    """The cores of the rank."""


@dataclass
class ArmRecord:
    """One arm: its command, the settings in force, and how it ended."""

    name: str
    ranks: int = 0
    """0 until its ranks have connected."""
    role: str = "arm"
    command: str = ""
    status: str = "waiting"
    """waiting, running, proved (and not timed), measured, failed or refused."""
    reason: str | None = None
    """Why it failed or was refused."""
    log: str | None = None
    in_force: list[RankSettings] = field(default_factory=list)
    describe: dict[str, Any] = field(default_factory=dict)
    """The engine, the version of torch, and the size of model and step, as found on rank 0."""
    samples_per_step: int | None = None
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


@dataclass
class Block:
    """One block: some steps of every arm, in random order."""

    index: int
    arms: dict[str, ArmTimes]
    generation: int | None = None
    """The number of times that all processes had been started anew before it."""
    kept: bool = True
    """Whether the block counts: not if others took too much of the cores."""
    foreign: float | None = None
    """Share of the comparison's cores that other processes took meanwhile."""
    steal: float | None = None
    """Share of the comparison's cores that the host of a virtual machine took meanwhile."""

    @property
    def load(self) -> float:
        """The share that both took; 0 if the machine does not say."""
        return (self.foreign or 0.0) + (self.steal or 0.0)


@dataclass
class ParityRow:
    """The verdict on the work of one arm."""

    arm: str
    verdict: str
    """bitwise, within tolerance, unequal or not compared."""
    text: str = ""
    difference: float | None = None
    tolerance: float | None = None
    """What was allowed; 0 for bitwise."""
    cause: str | None = None
    """The likely cause of unequal work."""
    note: str = ""
    """What differs although the work is equal."""


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
    config: dict[str, Any] = field(default_factory=dict)
    """The options of the comparison, by their names in CompareOptions; and `steps_per_block`,
    `starts` and `stopped_by`.
    """
    machine: Machine = field(default_factory=Machine)
    versions: dict[str, str | None] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    parity: list[ParityRow] = field(default_factory=list)
    ends: list[dict[str, tuple[int, str]]] = field(default_factory=list)
    """Per start, by arm: steps taken, and the hash of the parameters, equal on all ranks."""

    @property
    def kept_blocks(self) -> list[Block]:
        """The blocks that count."""
        return [block for block in self.blocks if block.kept]

    def arm_of(self, role: str) -> str:
        """Return the name of the first arm with this role; "" if there is none."""
        return next((name for name, arm in self.arms.items() if arm.role == role), "")


def write(record: Record, folder: Path) -> Path:
    """Write the record atomically, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    files.write_atomically(path, msgspec.json.encode(record, enc_hook=str) + b"\n", sync=False)
    return path


def read(folder: Path) -> Record:
    """Return the record of a folder or file. Raise InputError if it is missing or not valid."""
    path = folder / NAME if folder.is_dir() else folder
    advice = "give the folder that `hvdtrain compare` printed"
    if not path.is_file():  # reading /dev/zero never ends
        raise InputError(f"no comparison in {folder}: {path} is not a file; {advice}")
    try:
        found = json.loads(path.read_bytes(), object_pairs_hook=_printable_names)
        schema = found.get("schema") if isinstance(found, dict) else None
        if schema == SCHEMA:
            return parse(found)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged or not a comparison: {error}; {advice}") from None
    raise InputError(
        f"{path} has schema {schema!r}; this hvdtrain reads {SCHEMA}; use the hvdtrain that "
        "wrote it"
    )


def _printable_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {printable(name): value for name, value in pairs}


def parse(found: dict[str, Any]) -> Record:
    """Return the record that a JSON object holds. Raise ValueError for values of a wrong type."""
    # A terminal obeys control characters, and somebody else may have made the file: see `read`.
    made = msgspec.convert(map_tree(printable, str, found), Record)
    made.arms = {name: arm for name, arm in made.arms.items() if arm.role in ROLES}
    for block in made.blocks:
        block.arms = {name: times for name, times in block.arms.items() if name in made.arms}
    made.parity = [row for row in made.parity if row.arm in made.arms]
    return made
