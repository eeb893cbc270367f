"""`hvdtrain show`: one run, with a plot of its loss and learning rate."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click

from hvdtrain import files
from hvdtrain.cli.runs import describe_metrics, summary
from hvdtrain.errors import BackendUnavailable, InputError, printable
from hvdtrain.training import run_dir
from hvdtrain.training.config import flag

# What is drawn: the key of a record, and the rows on the terminal.
_SERIES = (("loss", 8), ("lr", 4))
_BLOCKS = " ▁▂▃▄▅▆▇█"
_MARGIN = 12
_MAX_VALUE = 1e300  # also of an int, which can be larger than any float

Points = list[tuple[int, float]]


@click.command("show")
@click.argument("path", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--png",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw to this file, not on the terminal. Needs matplotlib.",
)
def command(path: Path, png: Path | None) -> None:
    """Show one run: what it was, how it ended, and a plot of loss and learning rate.

    \b
    exit code 0   shown
              2   no run there, its run.json is damaged, or the file cannot be written
    """
    path = run_dir.locate(path)
    run = run_dir.read(path)
    with run_dir.checked(path / "run.json"):
        facts = _facts(path, run)
    records = run_dir.read_metrics(path)
    series = {name: _points(records, name) for name, _ in _SERIES}
    if png is not None:
        _draw(series, str(path), png)
    for name, value in facts:
        # A line end of a value must not look like the next one's name.
        click.echo(f"{name:8} {printable(value)}".replace("\n", "\n" + 9 * " "))
    if png is not None:
        click.echo(f"png      {png}")
        return
    width = max(20, min(100, shutil.get_terminal_size().columns) - _MARGIN - 1)
    for name, height in _SERIES:
        if len(series[name]) > 1:
            click.echo("")
            for line in _plot(name, series[name], width, height):
                click.echo(line)


def _facts(path: Path, run: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines that describe a run, as names and values."""
    task, backend, steps, scores = summary(run)
    config = run.get("config", {})
    given = (f"{flag(name)} {config.get(name)}" for name in run.get("origins", {}))
    hosts = ", ".join(dict.fromkeys(run.get("hosts", [])))
    attempts = run.get("attempts", [])
    best = run.get("best_checkpoint") or {}
    score = describe_metrics({best["metric"]: best["value"]}) if best else ""
    digest = f"  params_sha256 {run['params_sha256'][:12]}" if run.get("params_sha256") else ""
    kept = sorted(entry.name for entry in (path / "checkpoints").glob("step-*"))
    facts = {
        "run": str(path),
        "task": task,
        "options": " ".join(given),
        "backend": f"{backend} on {hosts}",
        "started": f"{run.get('start')}",
        "ended": f"{run.get('end') or ''}",
        "earlier": ", ".join(f"{a.get('outcome')} at step {a.get('last_step')}" for a in attempts),
        "restarts": str(run.get("restarts") or ""),
        "outcome": f"{run_dir.outcome_of(run)}, {steps}  {scores}{digest}",
        "best": f"step {best['step']}, {score}" if best else "",
        "kept": ", ".join(kept) or "no checkpoint",
    }
    return [(name, value) for name, value in facts.items() if value]


def _points(records: list[dict[str, Any]], name: str) -> Points:
    """Return the finite values of one key, with their steps, in order of these."""
    found = [(record.get("step"), record.get(name)) for record in records]
    return sorted(
        (step, float(value))
        for step, value in found
        if isinstance(step, int) and isinstance(value, (int, float)) and abs(value) < _MAX_VALUE
    )


def _plot(name: str, points: Points, width: int, height: int) -> list[str]:
    """Return the lines of a plot in block characters: of each column, the mean of its values."""
    first, last = points[0][0], points[-1][0]
    columns: list[list[float]] = [[] for _ in range(width)]
    for step, value in points:
        columns[(step - first) * (width - 1) // max(1, last - first)].append(value)
    means = [sum(values) / len(values) if values else None for values in columns]
    known = [mean for mean in means if mean is not None]
    low, high = min(known), max(known)
    if low == high:
        return [f"{name} {low:.4g}".rjust(_MARGIN - 1) + f" at each of the steps {first} to {last}"]
    eighths, level = [], 0
    for mean in means:  # a column without a value repeats the one before
        if mean is not None:
            level = 1 + round((mean - low) / (high - low) * (8 * height - 1))
        eighths.append(level)
    lines = []
    for row in range(height):
        below = 8 * (height - 1 - row)
        bar = "".join(_BLOCKS[min(8, max(0, eighth - below))] for eighth in eighths)
        label = f"{name} {high:.4g}" if row == 0 else f"{low:.4g}" if row == height - 1 else ""
        lines.append(f"{label:>{_MARGIN - 1}} {bar}".rstrip())
    steps = f"step {first}"
    return [*lines, " " * _MARGIN + steps + f"{last}".rjust(width - len(steps))]


def _draw(series: dict[str, Points], title: str, png: Path) -> None:
    """Write a PNG of all series, one above the other. Raises InputError if it cannot be written."""
    try:
        from hvdtrain.compare.report import figure_style
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"--png needs {error.name}; pip install 'hvdtrain[compare]'"
        ) from None

    def draw(style: figure_style.FigureStyle) -> Any:
        figure = figure_style.new_figure(style, 4.2)
        for axes, (name, points) in zip(
            figure.subplots(len(series), sharex=True), series.items(), strict=True
        ):
            axes.plot(*zip(*points, strict=True), color=figure_style.COLOURS["blue"], lw=1)
            axes.set_ylabel(name)
            axes.grid(True)
        axes.set_xlabel("step")
        figure.suptitle(title, fontsize=style.font)
        return figure

    if not all(series.values()):
        raise InputError("there is nothing to draw: the run has logged no step yet")
    picture = figure_style.Picture("run", title, "", "", draw)
    try:
        files.write_atomically(png, figure_style.png(picture))
    except OSError as error:
        raise InputError(f"cannot write {png}: {error.strerror}") from None
