"""`hvdtrain show`: one run, and a picture of its loss and learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.runs import describe_metrics, summary
from hvdtrain.errors import BackendUnavailable, InputError, printable
from hvdtrain.system import files
from hvdtrain.training import run_dir
from hvdtrain.training.config import flag

_SERIES = ("loss", "lr")
"""What is drawn: keys of the records."""
_MAX_VALUE = 1e300  # also of an int, which can be larger than any float

Points = list[tuple[int, float]]


@click.command("show")
@click.argument("path", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--png",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw loss and learning rate to this file. Needs matplotlib.",
)
def command(path: Path, png: Path | None) -> None:
    """Show one run: what it was, and how it ended.

    \b
    exit code 0   shown
              2   no run there, its run.json is damaged, or the file cannot be written
    """
    path = run_dir.locate(path)
    run = run_dir.read(path)
    with run_dir.checked(path / "run.json"):
        facts = _facts(path, run)
    records = run_dir.read_metrics(path)
    if png is not None:
        _draw({name: _points(records, name) for name in _SERIES}, str(path), png)
    for name, value in facts:
        # A line end of a value must not look like the next one's name.
        click.echo(f"{name:8} {printable(value)}".replace("\n", "\n" + 9 * " "))
    if png is not None:
        click.echo(f"png      {png}")


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
