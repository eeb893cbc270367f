"""Terminal output of a comparison: a live table while it runs, and the tables at its end.

`hvdtrain compare` uses `ProgressTable` and `show`, and `hvdtrain report` uses `show`. It is
readable at 80 columns. Without a terminal it is plain lines.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from hvdtrain.compare.analysis.table import Table, make_table
from hvdtrain.compare.formatting import NOTHING, SIGNS, VERDICTS, figures, ratio
from hvdtrain.compare.record import Record

_UNITS = (
    "times as fast: of the same blocks, so not exactly the ratio of two rows\n"
    "data: before the model is called   CPU: all ranks   memory: largest rank's peak"
)
COLOURS = {"faster": "blue", "slower": "yellow", "failed": "red", "refused": "red"}


def show(table: Table, file: TextIO | None = None, width: int | None = None) -> None:
    """Print whether the work was equal, one sentence per arm, and the speed table."""
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    # In a file or pipe rich assumes 80 columns, which is narrow for the speed table.
    if not console.is_terminal and width is None:
        console.width = max(console.width, 100)
    for part in _parts(table):
        console.print(part)


def _parts(table: Table) -> Iterator[Any]:
    sign = {True: "✓", False: "✗", None: "?"}[table.equal]
    style = {True: "bold", False: "bold red", None: "bold yellow"}[table.equal]
    yield Text(f"{sign} {table.verdict}", style)
    if any(row.verdict in ("unequal", "not compared") for row in table.parity):
        yield _parity(table)
    yield from map(Text, dict.fromkeys(row.note for row in table.parity if row.note))
    if table.sentences:
        yield from ("", *map(Text, table.sentences))
    if table.kept or table.outcome != "running":
        yield from ("", _speed(table), *_legend(table))
    if table.caution:
        yield from ("", Text(table.caution))
    if table.outcome not in ("finished", "running"):
        note = f": {table.note}" if table.note else ""
        yield Text(f"partial: {table.outcome}{note}", "bold yellow")


def _parity(table: Table) -> RichTable:
    """Return the table of parity verdicts, with likely causes."""
    made = _grid("command", "verdict", "what was compared")
    for row in table.parity:
        cause = f"; likely cause: {row.cause}" if row.cause else ""
        bad = "red" if row.verdict == "unequal" else ""
        made.add_row(Text(row.arm), Text(row.verdict, bad), Text(row.text + cause))
    return made


def _speed(table: Table) -> RichTable:
    """Return the speed table. The reason of an arm without numbers is in the lines above it."""
    made = _grid()
    made.add_column("command", min_width=14, overflow="fold", ratio=1)
    units = ("step ms", "samples/s", "times as fast\n[95 %]", "data\nms", "CPU ms\na step")
    for name in (*units, "memory\nMiB"):
        made.add_column(name, justify="right", no_wrap=True, min_width=19 * ("[" in name) or None)
    for row in table.rows:
        against = f"{ratio(row.ratio)} {SIGNS.get(row.verdict, ' ')}"
        cells = [figures(row.step_ms), figures(row.samples_per_s), against]
        cells += [figures(row.data_ms, 2), figures(row.cpu_ms), figures(row.peak_mib)]
        style = COLOURS.get(row.verdict, "")
        if row.role == "baseline":
            cells[2] = "baseline"
        if not row.is_shown:
            cells, style = [NOTHING] * 6, "red"
            cells[2] = "no block counts" if row.status == "measured" else row.status
        made.add_row(Text(row.arm), *(Text(c, style * (i == 2)) for i, c in enumerate(cells)))
    return made


def _legend(table: Table) -> Iterator[Text]:
    seen = {row.verdict for row in table.rows if row.is_shown}
    if signs := [f"{sign} {VERDICTS[name]}" for name, sign in SIGNS.items() if name in seen]:
        yield Text("   ".join(signs), "dim")
    if seen:
        yield Text(_UNITS, "dim")
    if table.threads:
        yield Text(f"threads of a rank: {table.threads}", "dim")


def _grid(*columns: str) -> RichTable:
    made = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


class ProgressTable:
    """The table that is updated while a comparison runs. A context manager.

    Call `update` after each change of the record.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = Console(file=file, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None

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
        (self._console.file or sys.stdout).flush()

    def update(self, record: Record, activity: str) -> None:
        """Show the results so far, and the current activity."""
        if self._live is not None:
            shown = Group(*_parts(make_table(record)), Text(activity, "bold"))
            self._live.update(shown, refresh=True)
        else:
            self.print_line(activity)
