"""compare.json: everything that was measured, raw. Every number that is shown is computed from it.

Imports no torch. What a field holds is said where `new` makes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain import files
from hvdtrain.errors import InputError

SCHEMA = 1
NAME = "compare.json"
Record = dict[str, Any]


def new(**known: Any) -> Record:
    """An empty record: what is known beforehand, and room for what will be measured."""
    return {
        "schema": SCHEMA,
        "outcome": "running",  # finished, interrupted, failed
        "note": None,  # why it is not finished, or why there is nothing to show
        "arms": {},  # by key: what it is, how it was started, what was in force, its status
        "accounts": {},  # by key: what each rank did in the first steps
        "parity": [],  # one verdict an arm
        "ends": [],  # of each start, by key: [steps, hash of the parameters], the same on all ranks
        "blocks": [],  # step times and CPU seconds of every rank of every arm; foreign load
        "phases": [],  # passes with a barrier before each step: input, compute, optimizer; kept
        "anchors": {},  # by world size: one memcpy of the gradients by all ranks at once
        "collectives": {},  # by key: all-reduces of several sizes
        "tuning": {},  # by name: candidates, and the one chosen
        **known,
    }


def base_of(arms: Mapping[str, Any], key: str) -> str | None:
    """The key of what an arm is held against: the baseline of its world size, and where the arm is
    tuned the baseline tuned as well, unless its defaults were the best or it has nothing to tune.
    None where there is no baseline.
    """
    arm = arms[key]
    alike = {k: a for k, a in arms.items() if a.get("ranks") == arm.get("ranks")}
    found = [k for k, a in alike.items() if a.get("role") == "baseline"]
    if not found:
        return None
    name = alike[found[0]].get("name")
    if arm.get("level") == "best found" and arm.get("name") != name:
        tuned = [k for k, a in alike.items() if a.get("level") == "best found"]
        found = [k for k in tuned if alike[k].get("name") == name] + found
    return found[0]


def write(record: Record, folder: Path) -> Path:
    """Write it atomically, and return where."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    files.replace(path, json.dumps(record, separators=(",", ":")) + "\n", sync=False)
    return path


def read(folder: Path) -> Record:
    """Read the record of a folder, or the file itself. Raises InputError where it is no use."""
    path = folder / NAME if folder.is_dir() else folder
    if path.exists() and not path.is_file():  # /dev/zero never ends
        raise InputError(f"no comparison in {folder}: {path} is not a file")
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"no comparison in {folder}: {error.strerror} ({path}); give the folder that "
            "`hvdtrain compare` printed"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is damaged, or no comparison: {error}; give the folder that "
            "`hvdtrain compare` printed"
        ) from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        schema = found.get("schema") if isinstance(found, dict) else None
        raise InputError(
            f"{path} has schema {schema!r}; this hvdtrain reads {SCHEMA}; use the "
            "hvdtrain that wrote it"
        )
    return found
