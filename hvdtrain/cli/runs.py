"""`hvdtrain runs`: list the runs in a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from hvdtrain.errors import InputError, printable
from hvdtrain.training import run_dir
from hvdtrain.training.console import describe

_MAX_TEXT = 100  # of an error; `hvdtrain show` prints it whole


@click.command("runs")
@click.argument("folder", metavar="[DIR]", default="runs", type=click.Path(path_type=Path))
def command(folder: Path) -> None:
    """List the runs in DIR (default: runs) and in its folders, the oldest first.

    A table on a terminal; a line for each run elsewhere.

    \b
    exit code 0   listed
              2   DIR is no folder, or has no run
    """
    found = _find(folder)
    if not found:
        raise InputError(f"no run in {folder}; give the folder of your run directories")
    rows = sorted((_row(path) for path in found), key=lambda row: row[0])
    if sys.stdout.isatty():
        _print_table([row[1:] for row in rows])
    else:
        for row in rows:
            click.echo("  ".join(filter(None, row[1:])))


def _find(folder: Path) -> list[Path]:
    """Return the run directories in `folder`, at any depth. Raises InputError if it is none."""
    if not folder.is_dir():
        raise InputError(f"no folder {folder}; give the folder of your run directories")
    found = []
    for name, inner, names in os.walk(folder):
        if "run.json" in names:
            found.append(Path(name))
            inner.clear()  # a run directory has checkpoints, and no runs
    return found


def _row(path: Path) -> tuple[str, ...]:
    """Return the start of a run, to sort by, and the cells of its row."""
    try:
        run = run_dir.read(path)
        with run_dir.checked(path / "run.json"):
            outcome, (task, backend, steps, text) = run_dir.outcome_of(run), summary(run)
    except InputError as error:
        return "", *_cells(path, "unreadable", "", "", "", error)
    if len(text := text.partition("\n")[0]) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]} ..."
    return str(run.get("start")), *_cells(path, outcome, task, backend, steps, text)


def _cells(*values: object) -> list[str]:
    return [printable(str(value), line_ends=False) for value in values]


def summary(run: dict[str, Any]) -> tuple[str, str, str, str]:
    """Return task, backend and ranks, steps, and metrics or error of a run.json, for people."""
    task = str(run.get("config", {}).get("task"))
    backend, size = run.get("backend", {}).get("name"), run.get("world", {}).get("size")
    last, total = run.get("last_step"), (run.get("ledger") or {}).get("total_steps")
    steps = f"{0 if last is None else last}/{total or '?'} steps"
    scores = describe_metrics(run.get("metrics") or {})
    return task, f"{backend} x {size}", steps, scores or str(run.get("error") or "")


def describe_metrics(metrics: dict[str, Any]) -> str:
    """Return the numbers among the metrics of a run.json, which has inf and nan as text."""
    numbers = {k: float(v) if isinstance(v, str) else v for k, v in metrics.items()}
    return describe({f"eval_{name}": value for name, value in numbers.items()})


def _print_table(rows: list[tuple[str, ...]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", no_wrap=True, overflow="fold")  # a path is copied whole
    for name in ("outcome", "task", "backend", "steps", "evaluation, or error"):
        table.add_column(name, overflow="fold")
    for row in rows:
        style = {"finished": "green", "running": "blue"}.get(row[1], "red")
        outcome = Text(row[1], style)
        table.add_row(Text(row[0]), outcome, *(Text(cell) for cell in row[2:]))
    Console(highlight=False).print(table)
