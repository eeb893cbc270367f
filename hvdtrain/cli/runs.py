"""`hvdtrain runs`: the runs in a folder, one run, or their checkpoints."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.command_options import PATH
from hvdtrain.errors import CheckpointError, InputError, printable
from hvdtrain.training import run_dir
from hvdtrain.training.config import flag
from hvdtrain.training.console import describe

_COLUMNS = ["state", "steps", "backend", "task", "folder"]
_MAX_TEXT = 76  # of a result in the table, which has 80 columns; that of one run is printed whole


@click.command("runs")
@click.argument("path", metavar="[DIR]", default="runs", type=PATH)
@click.option("--checkpoints", is_flag=True, help="List the checkpoints, and read every byte.")
@click.option("--json", "as_json", is_flag=True, help="With --checkpoints: JSON, in one line.")
def command(path: Path, checkpoints: bool, as_json: bool) -> None:
    """List the runs in DIR (default: runs) and its subfolders, oldest first. If DIR is a run, show
    its options and its result.

    With --checkpoints, list each checkpoint and whether it is valid. Changes nothing.

    \b
    exit code 0   listed; with --checkpoints, the newest checkpoint of each run is valid
              1   the newest checkpoint of a run is not valid, or a run has none
              2   DIR is not a folder, has no run, or cannot be read
    """
    if checkpoints or as_json:
        _verify(path, as_json)
    elif os.path.lexists((run := run_dir.locate(path)) / "run.json"):
        _show(run)
    else:
        _list(path)


def _find(folder: Path, mark: str = "") -> list[Path]:
    """Return the run directories in `folder`, at any depth: those with a run.json, or a folder
    `mark`. Raises InputError if there are none.
    """
    found = []
    for name, inner, names in os.walk(folder):
        if "run.json" in names or mark in inner:
            found.append(Path(name))
            inner.clear()  # a run directory has checkpoints, and no runs
    if not found:
        what = "run in" if folder.is_dir() else "folder"
        raise InputError(f"no {what} {folder}; give a run directory, or a folder of them")
    return sorted(found)


# Many runs


def _list(folder: Path) -> None:
    """Print a table of the runs in a folder, in order of their start. Below each row are the start
    and the result.
    """
    found = [["", "", *_COLUMNS], *sorted(map(_row, _find(folder)))]
    rows = [[printable(cell, line_ends=False) for cell in cells] for cells in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][2:]
    for _, result, *cells in rows:
        click.echo("  ".join(map(str.ljust, cells, widths)).rstrip())
        if result:
            click.echo(f"    {result}".rstrip())


def _row(path: Path) -> list[str]:
    """Return the start of a run, to sort by; the line below its row; and the cells of the row."""
    try:
        run = run_dir.read(path)
        with run_dir.checked(path / "run.json"):
            start, (*facts, result) = str(run.get("start")), _summary(run)
            result = f"{start[:16]}  {result}".partition("\n")[0][:_MAX_TEXT]
            return [start, result, run_dir.outcome_of(run), *facts, str(path)]
    except InputError as error:
        return ["", str(error), "unreadable", "", "", "", str(path)]


def _summary(run: dict[str, Any]) -> list[str]:
    """Return steps, backend and ranks, task, and metrics or error of a run.json, for people."""
    task = run.get("config", {}).get("task")
    backend, size = run.get("backend", {}).get("name"), run.get("world", {}).get("size")
    last, total = run.get("last_step"), (run.get("ledger") or {}).get("total_steps")
    steps = f"{0 if last is None else last}/{total or '?'}"
    scores = _describe_metrics(run.get("metrics") or {})
    return [steps, f"{backend} x {size}", f"{task}", scores or str(run.get("error") or "")]


def _describe_metrics(metrics: dict[str, Any]) -> str:
    """Return the numbers among the metrics of a run.json, which has inf and nan as text."""
    return describe(
        {
            f"eval_{name}": float(value) if isinstance(value, str) else value
            for name, value in metrics.items()
        }
    )


# One run


def _show(path: Path) -> None:
    """Print what describes a run, as names and values."""
    run = run_dir.read(path)
    with run_dir.checked(path / "run.json"):
        steps, backend, task, scores = _summary(run)
        config = run.get("config", {})
        hosts = ", ".join(dict.fromkeys(run.get("hosts", [])))
        best = run.get("best_checkpoint") or {}
        digest = f"  params_sha256 {run['params_sha256'][:12]}" if run.get("params_sha256") else ""
        facts = {
            "run": path,
            "task": task,
            "options": " ".join(
                f"{flag(name)} {config.get(name)}" for name in run.get("origins", {})
            ),
            "backend": f"{backend} on {hosts}",
            "started": run.get("start"),
            "ended": run.get("end"),
            "earlier": ", ".join(
                f"{a.get('outcome')} at step {a.get('last_step')}" for a in run.get("attempts", [])
            ),
            "restarts": run.get("restarts"),
            "outcome": f"{run_dir.outcome_of(run)}, {steps} steps  {scores}{digest}",
            "best": best
            and f"step {best['step']}, {_describe_metrics({best['metric']: best['value']})}",
            "kept": ", ".join(sorted(entry.name for entry in (path / "checkpoints").glob("step-*")))
            or "no checkpoint",
        }
    for name, value in facts.items():
        if value:
            # A line end of a value must not look like the next one's name.
            click.echo(f"{name:8} {printable(str(value))}".replace("\n", "\n" + 9 * " "))


# Checkpoints


def _verify(path: Path, as_json: bool) -> None:
    """Print the checkpoints of the runs in a folder, and end with the exit code."""
    from hvdtrain.training.checkpoint import list_checkpoints

    roots = (
        [path]  # the folder of checkpoints itself
        if list_checkpoints(path)
        else [run / "checkpoints" for run in _find(path, "checkpoints")]
    )
    found = {root: _entries(root) for root in roots}
    if as_json:
        click.echo(json.dumps([entry for of_run in found.values() for entry in of_run]))
    else:
        for root, of_run in found.items():
            for line in map(_line, of_run) if of_run else [f"{root}  no checkpoint"]:
                click.echo(printable(line, line_ends=False))
    sys.exit(not all(of_run and of_run[-1]["valid"] for of_run in found.values()))


def _entries(root: Path) -> list[dict[str, Any]]:
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
                if "trainer" in checkpoint.part_names(path):  # else of `hvdtrain.Checkpoints`
                    epoch = checkpoint.load(path, "trainer")["position"]["epoch"]
            except (CheckpointError, LookupError, TypeError) as error:
                why = f"its position cannot be read: {error}"
        entries.append(
            {
                "path": str(path),
                "step": checkpoint.step_of(path),
                "epoch": epoch,
                "bytes": sum(sizes),
                "written": datetime.fromtimestamp(written, timezone.utc).isoformat("T", "seconds"),
                "valid": why is None,
                "reason": why,
            }
        )
    return entries


def _line(entry: dict[str, Any]) -> str:
    epoch = "" if entry["epoch"] is None else f"  epoch {entry['epoch']}"
    state = "valid" if entry["valid"] else f"NOT VALID: {entry['reason']}"
    size = f"{entry['bytes'] / 1e6:.3g} MB"
    return f"{entry['path']}  step {entry['step']}{epoch}  {size}  {entry['written']}  {state}"
