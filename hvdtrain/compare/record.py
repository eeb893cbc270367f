"""compare.json: all raw measurements of a comparison; every displayed number is computed from it.

`runner` writes it, `summary` and `plots` read it. `new` documents the fields. Imports no torch.
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
    """Return an empty record, with the facts known beforehand and the fields to be measured."""
    return {
        "schema": SCHEMA,
        "outcome": "running",  # finished, interrupted, failed
        "note": None,  # why it is not finished, or has no results
        "arms": {},  # by key: definition, command, settings in force, status
        "accounts": {},  # by key: each rank's work trace of the first steps
        "parity": [],  # one verdict per arm
        "ends": [],  # per start, by key: [steps, hash of the parameters], equal on all ranks
        "blocks": [],  # step times and CPU seconds of every rank of every arm; foreign load
        "phases": [],  # passes with a barrier before each step: input, compute, optimizer; kept
        "anchors": {},  # by world size: one memcpy of the gradients by all ranks at once
        "collectives": {},  # by key: all-reduces of several sizes
        "tuning": {},  # by name: candidates, and the one chosen
        **known,
    }


def base_of(arms: Mapping[str, Any], key: str) -> str | None:
    """Return the key of the arm that an arm is compared with: the baseline of its world size.

    A tuned arm is compared with the tuned baseline, if tuning found one better than its defaults.
    None if there is no baseline.
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
    """Write the record atomically, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    text = json.dumps(record, separators=(",", ":")) + "\n"
    files.write_atomically(path, text, sync=False)
    return path


def read(folder: Path) -> Record:
    """Return the record of a folder or file. Raise InputError if it is missing or not valid."""
    path = folder / NAME if folder.is_dir() else folder
    if path.exists() and not path.is_file():  # reading /dev/zero never ends
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
