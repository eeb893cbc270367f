"""Terminal output of a comparison: a live table while it runs, and the tables at its end.

`hvdtrain compare` uses `ProgressTable` and `show`, and `hvdtrain report` uses `show`. It is
readable at 80 columns. Without a terminal it is plain lines.
"""

from __future__ import annotations

import sys
from typing import Any, TextIO

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hvdtrain.compare import formatting
from hvdtrain.compare.analysis import stats
from hvdtrain.compare.analysis.speed import SpeedRow
from hvdtrain.compare.analysis.summary import Summary
from hvdtrain.compare.record import Record

COLOURS = {"faster": "blue", "slower": "yellow", "failed": "red", "refused": "red"}
SIGNS = {"faster": "▲", "slower": "▼", "same": "~", "unknown": "?", "no A/A": "?"}


def show(summary: Summary, file: TextIO | None = None, width: int | None = None) -> None:
    """Print whether the work was equal, one sentence per pair, and the speed table."""
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    # In a file or pipe rich assumes 80 columns, which is narrow for the speed table.
    if not console.is_terminal and width is None:
        console.width = max(console.width, 100)
    for part in tables(summary):
        console.print(part)


def tables(summary: Summary) -> list[Any]:
    """Return the parts that `show` prints."""
    verdict = summary.verdict
    sign = {True: "✓", False: "✗", None: "?"}[verdict.equal]
    style = {True: "bold", False: "bold red", None: "bold yellow"}[verdict.equal]
    parts: list[Any] = [Text(f"{sign} {verdict.text}", style)]
    parts += [parity(summary)] * (not verdict.equal and bool(summary.parity))
    parts += [
        Text(f"{row.arm} {row.text}") for row in summary.parity if row.verdict == "other method"
    ] * (verdict.equal is True)
    parts += map(Text, dict.fromkeys(row.note for row in summary.parity if row.note))
    parts += ["", *map(Text, summary.sentences), "", speed(summary), *_notes(summary)]
    if summary.caution:
        parts += ["", Text(summary.caution)]
    if summary.outcome != "finished":
        note = f": {summary.note}" if summary.note else ""
        parts.append(Text(f"partial: {summary.outcome}{note}", style="bold yellow"))
    elif summary.note:
        parts.append(Text(summary.note, style="bold yellow"))
    return parts


def parity(summary: Summary) -> Table:
    """Return the table of parity verdicts, with likely causes."""
    table = _table("command", "verdict", "what was compared")
    for row in summary.parity:
        cause = f"; likely cause: {row.cause}" if row.cause else ""
        bad = "red" if row.verdict == "unequal" else ""
        table.add_row(Text(row.arm), Text(row.verdict, bad), Text(row.text + cause))
    return table


def speed(summary: Summary) -> Table:
    """Return the speed table. The reason of an arm without numbers is in the lines above it."""
    table = _table()
    table.add_column("command", min_width=14, overflow="fold", ratio=1)
    for name in ("step ms", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("times as fast\n[95 %]", justify="right", no_wrap=True, min_width=19)
    for name in ("data\nms", "CPU ms\na step", "memory\nMiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in summary.speed:
        if row.is_shown:
            table.add_row(*_speed_cells(row))
            continue
        is_dropped = row.status == "measured" and _all_dropped(summary)
        text = "no block counts" if is_dropped else f"{row.status}: see above"
        if row.status == "refused":
            text = "not the same training"
        table.add_row(Text(row.arm), *[NOTHING] * 2, Text(text, "red"), *[NOTHING] * 3)
    return table


_UNITS = (
    "data: until the model is called   CPU: of all ranks together   memory: of the largest rank"
)
NOTHING = Text(formatting.NOTHING, justify="right")


def _speed_cells(row: SpeedRow) -> list[Text]:
    against = "baseline"
    if row.role != "baseline":
        against = f"{formatting.ratio(row.ratio)} {formatting.interval(row.low, row.high)}"
        against += f" {SIGNS.get(row.verdict, ' ')}"
    return [
        Text(row.arm),
        Text(formatting.figures(row.step_ms)),
        Text(formatting.figures(row.samples_per_s)),
        Text(against, COLOURS.get(row.verdict, "")),
        Text(formatting.figures(row.data_ms, 2)),
        Text(formatting.figures(row.cpu_ms_per_step)),
        Text(formatting.figures(row.peak_mib)),
    ]


def _notes(summary: Summary) -> list[Text]:
    """Return the lines below the speed table: a legend, and why arms have no numbers."""
    lines = [
        Text(f"{row.arm}: {row.missing_reason}", "red")
        for row in summary.speed
        if row.step_ms is None
        and not row.has_ended_early  # those are in `sentences`
        and not (row.status == "measured" and _all_dropped(summary))  # those are in the note
    ]
    seen = {row.verdict for row in summary.speed if row.is_shown}
    if signs := [f"{s} {formatting.VERDICTS[name]}" for name, s in SIGNS.items() if name in seen]:
        lines.append(Text("   ".join(signs), "dim"))
    if any(row.is_shown for row in summary.speed):
        lines.append(Text(_UNITS, "dim"))
    return lines


def _all_dropped(summary: Summary) -> bool:
    """Return whether blocks were measured and none counts."""
    return bool(summary.load.blocks_measured and not summary.load.blocks_kept)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


class ProgressTable:
    """The table that is updated while a comparison runs. A context manager.

    Call `update` after each change of the record; it reads only the blocks added since the last.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = Console(file=file, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._times: dict[str, dict[int, float]] = {}
        self._num_read = self._num_dropped = 0
        self._last_activity = ""

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
        fresh = self._add(record)
        if self._live is not None:
            self._live.update(Group(self.rows(record), Text(activity, "bold")), refresh=True)
            return
        if activity != self._last_activity:
            self.print_line(activity)
            self._last_activity = activity
        if fresh and self._num_read % 5 == 0:  # a log needs no line per block
            self.print_line(self._line(record))

    def rows(self, record: Record) -> Table:
        """Return the table: each arm, its state, blocks, median step and ratio to the baseline."""
        table = _table("command", "state")
        for name in ("blocks", "step ms", "times as fast"):
            table.add_column(name, justify="right", no_wrap=True)
        for key, arm in record.arms.items():
            state = Text(str(arm.status), COLOURS.get(arm.status or "", ""))
            if arm.reason:
                state.append(f": {arm.reason}", style="not bold")
            times = list(self._times.get(key, {}).values())
            step = formatting.figures(float(np.median(times))) if times else ""
            number = str(len(times)) if times else ""
            table.add_row(Text(key), state, number, step, self._ratio(record, key))
        return table

    def _add(self, record: Record) -> bool:
        """Read the new blocks of the record. Return whether there were any."""
        fresh = record.blocks[self._num_read :]
        for block in fresh:
            self._num_dropped += not block.kept
            for key, times in block.arms.items() if block.kept else ():
                ms = stats.block_ms(times.step_ms, record.period_of(key))
                self._times.setdefault(key, {})[block.index] = ms
        self._num_read = len(record.blocks)
        return bool(fresh)

    def _ratio(self, record: Record, key: str) -> str:
        base = record.key_of("baseline", record.arms[key].ranks)
        if base == key:
            return "baseline"
        pairs = stats.paired(self._times.get(base, {}), self._times.get(key, {}))
        return formatting.ratio(float(np.median(pairs))) if pairs.size else ""

    def _line(self, record: Record) -> str:
        parts = []
        for key in record.arms:
            if times := list(self._times.get(key, {}).values()):
                ratio = self._ratio(record, key)
                ratio = f" ({ratio}x)" if ratio and ratio != "baseline" else ""
                parts.append(f"{key} {formatting.figures(float(np.median(times)))} ms{ratio}")
        text = f"after {formatting.count(self._num_read, 'block')}"
        if self._num_dropped:
            text += f", {self._num_dropped} of them dropped for the load of others"
        return f"{text}: {', '.join(parts)}" if parts else text
