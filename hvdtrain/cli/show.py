"""`hvdtrain show`: one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.runs import describe_metrics, summary
from hvdtrain.errors import printable
from hvdtrain.training import run_dir
from hvdtrain.training.config import flag


@click.command("show")
@click.argument("path", metavar="RUN", type=click.Path(path_type=Path))
def command(path: Path) -> None:
    """Show one run: what it was, and how it ended.

    \b
    exit code 0   shown
              2   no run there, or its run.json is damaged
    """
    path = run_dir.locate(path)
    run = run_dir.read(path)
    with run_dir.checked(path / "run.json"):
        facts = _facts(path, run)
    for name, value in facts:
        # A line end of a value must not look like the next one's name.
        click.echo(f"{name:8} {printable(value)}".replace("\n", "\n" + 9 * " "))


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
