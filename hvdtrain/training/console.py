"""The output of a training run: a progress bar on a terminal, plain lines elsewhere.

The Trainer writes to it on every rank; only rank 0's console prints.
"""

from __future__ import annotations

import sys
from typing import Any

from hvdtrain.errors import printable
from hvdtrain.job.world import World, shares_terminal


class Console:
    """A console that prints nothing, for every rank but 0; the base class of the others."""

    def print_line(self, text: str) -> None:
        """Print a line."""

    def start(self, total_steps: int | None, step: int) -> None:
        """Start to show progress, from `step` on."""

    def advance(self, step: int) -> None:
        """Show that `step` steps are done. Called every step: it must be fast."""

    def log(self, record: dict[str, Any]) -> None:
        """Show a record of metrics.jsonl."""

    def stop(self) -> None:
        """End the display. Safe to call twice."""


class LineConsole(Console):
    """Plain lines, for files, pipes, and launchers that prefix each line with its rank."""

    _total: int | str = 0

    def print_line(self, text: str) -> None:
        print(printable(text), flush=True)

    def start(self, total_steps: int | None, step: int) -> None:
        self._total = "?" if total_steps is None else total_steps

    def log(self, record: dict[str, Any]) -> None:
        if text := describe(record):
            self.print_line(f"step {record['step']}/{self._total}  {text}")


class BarConsole(Console):
    """A rich progress bar with the time left, and the latest epoch, loss and speed beside it."""

    def __init__(self) -> None:
        from rich import progress

        self._progress = progress.Progress(
            "training",
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            "{task.description}",
            refresh_per_second=4,
        )
        self._bar = self._progress.add_task("", start=False)

    def print_line(self, text: str) -> None:
        text = printable(text)  # some is from checkpoints that others may have made
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, total_steps: int | None, step: int) -> None:
        self._progress.start()
        self._progress.update(self._bar, total=total_steps, completed=step)
        self._progress.start_task(self._bar)

    def advance(self, step: int) -> None:
        self._progress.update(self._bar, completed=step)

    def log(self, record: dict[str, Any]) -> None:
        if "loss" in record and "samples_per_s" in record:
            speed = f"{record['samples_per_s']:.0f} samples/s"
            description = f"epoch {record['epoch']}  loss {record['loss']:.4f}  {speed}"
            self._progress.update(self._bar, description=description)
        elif text := describe(record):
            self.print_line(f"step {record['step']}  {text}")

    def stop(self) -> None:
        self._progress.stop()


def make_console(world: World) -> Console:
    """Return the console of this rank. Not collective."""
    if world.rank > 0:
        return Console()
    return BarConsole() if sys.stdout.isatty() and shares_terminal(world) else LineConsole()


def describe(record: dict[str, Any]) -> str:
    """Return the numbers of one record in a line, without `step`, `time` and `data_ms`. Leave out
    other values, such as lists and texts.
    """
    formats = {
        "lr": "lr {:.3g}",
        "samples_per_s": "{:.0f} samples/s",
        "step_ms": "{:.1f} ms/step",
        "epoch": "epoch {}",
        "loss_scale": "loss_scale {:g}",
    }
    skipped = {"step", "data_ms"}
    return "  ".join(
        formats.get(key, key + (" {:d}" if isinstance(value, int) else " {:.4f}")).format(value)
        for key, value in record.items()
        if key not in skipped and isinstance(value, (int, float))
    )
