"""Terminal output of a comparison: a live table while it runs, and the tables at its end.

`hvdtrain compare` uses `ProgressTable` and `show`, and `hvdtrain report` uses `show`. It is
readable at 80 columns. Without a terminal it is plain lines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from hvdtrain.compare.analysis.table import Table, make_table
from hvdtrain.compare.formatting import MARKS, NOTHING, SIGNS, VERDICTS, figures, percent, ratio
from hvdtrain.compare.record import Record

_UNITS = (
    "times as fast: from the same blocks, so not exactly the ratio of two rows\n"
    "data: time before the model is called   CPU: all ranks   memory: largest rank\n"
)
COLOURS: dict[object, str] = {"faster": "blue", "slower": "yellow", True: "green"}
COLOURS |= {None: "yellow", **dict.fromkeys((False, "failed", "refused"), "red")}
_EVERY_S = 60.0  # of the lines that replace the live table where there is no terminal


def show(table: Table, file: TextIO | None = None, width: int | None = None) -> None:
    """Print which command is the fastest, whether the work was equal, and the speed table."""
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    # In a file or pipe rich assumes 80 columns, which is narrow for the speed table.
    if not console.is_terminal and width is None:
        console.width = max(console.width, 100)
    for part in _parts(table):
        console.print(part)


def _parts(table: Table) -> Iterator[Any]:
    is_running = table.outcome == "running"
    if table.headline:
        yield Text(table.headline, "bold")
    yield Text(f"{MARKS[table.equal]} {table.verdict}", COLOURS[table.equal])
    yield from map(Text, table.sentences)
    if table.headline or not is_running:
        yield from ("", _speed(table), *_legend(table))
    if table.caution and not is_running:
        yield from ("", Text(table.caution))
    if table.outcome != "finished" and not is_running:
        yield Text(f"Partial result: {table.outcome}. {table.note or ''}", "bold yellow")


def _speed(table: Table) -> RichTable:
    """Return the speed table. The reason of an arm without numbers is in the lines above it."""
    made = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    made.add_column("command", min_width=14, overflow="fold", ratio=1)
    names = "step ms", "samples/s", "times as fast\n[95 %]", "data\nms", "CPU ms\na step"
    for name in (*names, "memory\nMiB"):
        made.add_column(name, justify="right", no_wrap=True, min_width=19 * ("[" in name) or None)
    for row in table.rows:
        against = f"{ratio(row.ratio)} {SIGNS.get(row.verdict, ' ')}"
        cells = [figures(row.step_ms), figures(row.samples_per_s)]
        cells += [figures(row.data_ms, 2), figures(row.cpu_ms), figures(row.peak_mib)]
        style = COLOURS.get(row.verdict, "")
        if row.role == "baseline":
            against = "baseline"
        if not row.is_shown:
            cells, style = [NOTHING] * 5, "red"
            against = "no block counts" if row.status == "measured" else row.status
        made.add_row(Text(row.arm), *cells[:2], Text(against, style), *cells[2:])
    return made


def _legend(table: Table) -> Iterator[Text]:
    seen = {row.verdict for row in table.rows if row.is_shown}
    if seen:
        signs = [name for name in SIGNS if name in seen]
        yield Text("   ").join(Text(f"{SIGNS[n]} {VERDICTS[n]}", COLOURS.get(n, "")) for n in signs)
        yield Text(f"{_UNITS}noise: {percent(table.noise)} (the baseline against itself)", "dim")
    if threads := dict(table.conditions).get("threads"):
        yield Text(f"threads of a rank: {threads}", "dim")


class ProgressTable:
    """The table that is updated while a comparison runs. A context manager.

    Call `update` after each change of the record.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = Console(file=file, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._printed = ("", 0.0)
        """The phase of the last line, and when it was printed."""

    def __enter__(self) -> ProgressTable:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def print_line(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()

    def update(self, record: Record, activity: str) -> None:
        """Show the results so far, and the current activity: "phase: details". Without a terminal,
        print a line when the phase changes, and each minute.
        """
        if self._live is not None:
            shown = Group(*_parts(make_table(record)), Text(activity, "bold"))
            self._live.update(shown, refresh=True)
            return
        (phase, *_), now = activity.split(": "), time.monotonic()
        if phase != self._printed[0] or now - self._printed[1] >= _EVERY_S:
            self._printed = phase, now
            self.print_line(activity)
