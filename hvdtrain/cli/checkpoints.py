"""`hvdtrain checkpoints`: list and verify the checkpoints of a run, or of all runs in a folder."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from hvdtrain.errors import CheckpointError, InputError, printable

_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


@click.command("checkpoints")
@click.argument("folder", metavar="[DIR]", default="runs", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in one line.")
def command(folder: Path, as_json: bool) -> None:
    """List the checkpoints of the run DIR, or of all runs in DIR (default: runs), the oldest first.

    Reads every byte, and says of each checkpoint whether it is valid, or why not. Changes nothing.

    \b
    exit code 0   the newest checkpoint of each run is valid
              1   that of a run is not, or a run has none
              2   DIR is no folder, has no run, or cannot be read
    """
    found = {root: _list(root) for root in _roots(folder)}
    if not found:
        raise InputError(f"no run in {folder}; give a run directory, or a folder of them")
    entries = [entry for of_run in found.values() for entry in of_run]
    if as_json:
        click.echo(json.dumps(entries))
    else:
        for root, of_run in found.items():
            for entry in of_run:
                click.echo(printable(_line(entry), line_ends=False))
            if not of_run:
                click.echo(printable(f"{root}  no checkpoint", line_ends=False))
    sys.exit(0 if all(of_run and of_run[-1]["valid"] for of_run in found.values()) else 1)


def _roots(folder: Path) -> list[Path]:
    """Return the folders of checkpoints of the runs in `folder`, at any depth; `folder` itself if
    it is one. Raises InputError if it is no folder.
    """
    from hvdtrain.training.checkpoint import list_checkpoints

    if not folder.is_dir():
        raise InputError(f"no folder {folder}; give a run directory, or a folder of them")
    if list_checkpoints(folder):
        return [folder]
    found = []
    for name, inner, names in os.walk(folder):
        if "run.json" in names or "checkpoints" in inner:
            found.append(Path(name) / "checkpoints")
            inner.clear()  # a run directory has no runs
    return sorted(found)


def _list(root: Path) -> list[dict[str, Any]]:
    """Verify the checkpoints of one run. Raises CheckpointError if their folder is unreadable."""
    from hvdtrain.training import checkpoint

    entries = []
    for path in checkpoint.list_checkpoints(root):
        why = checkpoint.problem(path)
        try:
            written = (path if path.is_dir() else path.parent).stat().st_mtime
            sizes = [file.stat().st_size for file in path.glob("*") if file.is_file()]
        except OSError:
            if not os.path.lexists(path):  # its run has removed it just now
                continue
            written, sizes = 0.0, []
        epoch = None
        if why is None:
            try:
                epoch = checkpoint.load(path, "trainer")["position"]["epoch"]
            except (CheckpointError, LookupError, TypeError) as error:
                why = f"its position cannot be read: {error}"
        entries.append(
            {
                "path": str(path),
                "step": int(path.name.partition("-")[2]),
                "epoch": epoch,
                "bytes": sum(sizes),
                "written": datetime.fromtimestamp(written, timezone.utc).isoformat("T", "seconds"),
                "valid": why is None,
                "reason": why,
            }
        )
    return entries


def _line(entry: dict[str, Any]) -> str:
    age_s = max(1.0, time.time() - datetime.fromisoformat(entry["written"]).timestamp())
    unit_s, unit = next(pair for pair in _AGES if age_s >= pair[0])
    epoch = "" if entry["epoch"] is None else f"  epoch {entry['epoch']}"
    state = "valid" if entry["valid"] else f"NOT VALID: {entry['reason']}"
    size = f"{entry['bytes'] / 1e6:.3g} MB"
    return (
        f"{entry['path']}  step {entry['step']}{epoch}  {size}  {age_s / unit_s:.0f} {unit} old  "
        f"{state}"
    )
