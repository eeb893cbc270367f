"""Terminal output of a comparison: a live table while it runs, and the tables at its end.

`hvdtrain compare` uses `Live` and `show`, and `hvdtrain report` uses `show`. It is readable at 80
columns. Without a terminal it is plain lines.
"""

from __future__ import annotations

import sys
from typing import Any, TextIO

import numpy as np
from rich import box
from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.table import Table
from rich.text import Text

from hvdtrain.compare import formatting as wording
from hvdtrain.compare.analysis import stats
from hvdtrain.compare.record import base_of

Json = dict[str, Any]
COLOURS = {"faster": "blue", "slower": "yellow", "failed": "red", "refused": "red"}
SIGNS = {"faster": "▲", "slower": "▼", "same": "=", "unknown": "?", "no A/A": "?"}


def show(summary: Json, file: TextIO | None = None, width: int | None = None) -> None:
    """Print the verdict, the speed table, and one sentence per pair."""
    console = Console(file=file, width=width, highlight=False, markup=False, emoji=False)
    # In a file or pipe rich assumes 80 columns, which is narrow for the speed table.
    if not console.is_terminal and width is None:
        console.width = max(console.width, 100)
    for part in tables(summary):
        console.print(part)


def tables(summary: Json) -> list[Any]:
    """Return the parts that `show` prints."""
    verdict = summary["verdict"]
    sign = {True: "✓", False: "✗", None: "?"}[verdict["equal"]]
    style = {True: "bold", False: "bold red", None: "bold yellow"}[verdict["equal"]]
    parts: list[Any] = [Text(f"{sign} {verdict['text']}", style)]
    parts += [parity(summary)] * (not verdict["equal"] and bool(summary["parity"]))
    parts += ["", speed(summary), *_notes(summary), ""]
    parts += [Text(sentence) for sentence in summary["sentences"]]
    if summary["caution"]:
        parts.append(Text(summary["caution"]))
    if summary["outcome"] != "finished":
        note = f": {summary['note']}" if summary["note"] else ""
        parts.append(Text(f"partial: {summary['outcome']}{note}", style="bold yellow"))
    elif summary["note"]:
        parts.append(Text(summary["note"], style="bold yellow"))
    return parts


def parity(summary: Json) -> Table:
    """Return the table of parity verdicts, with likely causes."""
    table = _table("arm", "verdict", "what was compared")
    for row in summary["parity"]:
        cause = f"; likely cause: {row['cause']}" if row["cause"] else ""
        bad = "red" if row["verdict"] == "unequal" else ""
        table.add_row(Text(row["arm"]), Text(row["verdict"], bad), Text(row["text"] + cause))
    return table


def speed(summary: Json) -> Table:
    """Return the speed table. The reason of an arm without numbers is in the lines below it."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("arm", min_width=14, overflow="fold", ratio=1)
    for name in ("step ms", "samples/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("x baseline [95 %]", justify="right", no_wrap=True, min_width=19)
    for name in ("% of\nideal", "CPU s\na step", "peak\nMiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in summary["speed"]:
        if row["status"] in COLOURS or row["step_ms"] is None:
            said = "no block counts" if _all_dropped(summary) else f"{row['status']}: see below"
            status = Text(
                said if row["status"] == "measured" else f"{row['status']}: see below", "red"
            )
            table.add_row(Text(row["arm"]), *[NOTHING] * 2, status, *[NOTHING] * 3)
        else:
            table.add_row(*_speed_cells(row))
    return table


NOTHING = Text(wording.NOTHING, justify="right")


def _speed_cells(row: Json) -> list[Text]:
    against = "baseline"
    if row["role"] != "baseline":
        against = f"{wording.ratio(row['ratio'])} {wording.interval(row['low'], row['high'])}"
        against += f" {SIGNS.get(row['verdict'], ' ')}"
    ideal = "" if row["percent_of_ideal"] is None else f"{row['percent_of_ideal']:.0f}"
    return [
        Text(row["arm"]),
        Text(wording.figures(row["step_ms"])),
        Text(wording.figures(row["samples_per_s"])),
        Text(against, COLOURS.get(row["verdict"], "")),
        Text((ideal or wording.NOTHING) + ("*" if row["ideal_note"] else "")),
        Text(wording.figures(row["cpu_s_per_step"])),
        Text(wording.figures(row["peak_mib"])),
    ]


def _notes(summary: Json) -> list[Text]:
    """Return the lines below the speed table: a legend, and why arms have no numbers."""
    lines = [
        Text(f"{row['arm']}: {wording.missing(row)}", "red")
        for row in summary["speed"]
        if row["step_ms"] is None
        and row["status"] not in COLOURS  # those are in `sentences`
        and not (row["status"] == "measured" and _all_dropped(summary))  # those are in the note
    ]
    bases = {row["ranks"]: row["arm"] for row in summary["speed"] if row["role"] == "baseline"}
    shown = [row for row in summary["speed"] if row["status"] not in COLOURS and row["step_ms"]]
    said = {row["verdict"] for row in shown}
    signs = [f"{sign} {wording.SAID[name]}" for name, sign in SIGNS.items() if name in said]
    if signs:
        lines.append(Text("   ".join(signs), "dim"))
    lines += [
        Text(f"{row['arm']} is held against {row['against']}", "dim")
        for row in summary["speed"]
        if row["against"] not in (None, bases.get(row["ranks"])) and row["status"] not in COLOURS
    ]
    lines += [
        Text(f"* {row['arm']}: {row['ideal_note']}", "dim")
        for row in summary["speed"]
        if row["ideal_note"]
    ]
    return lines


def _all_dropped(summary: Json) -> bool:
    """Return whether blocks were measured and none counts."""
    load = summary["load"]
    return bool(load["blocks_measured"] and not load["blocks_kept"])


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


class Live:
    """The table that is updated while a comparison runs. A context manager.

    Call `update` after each change of the record; it reads only the blocks added since the last.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = Console(file=file, highlight=False, markup=False, emoji=False)
        self._live: RichLive | None = None
        self._times: dict[str, dict[int, float]] = {}
        self._read = self._dropped = 0
        self._said = ""

    def __enter__(self) -> Live:
        if self._console.is_terminal:
            self._live = RichLive(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(text), soft_wrap=True)
        self._flush()

    def update(self, record: Json, doing: str) -> None:
        """Show the results so far, and the current activity."""
        fresh = self._add(record)
        if self._live is not None:
            self._live.update(Group(self.rows(record), Text(doing, "bold")), refresh=True)
            return
        if doing != self._said:
            self.say(doing)
            self._said = doing
        if fresh and self._read % 5 == 0:  # a log needs no line per block
            self.say(self._line(record))

    def rows(self, record: Json) -> Table:
        """Return the table: each arm, its state, blocks, median step and ratio to the baseline."""
        table = _table("arm", "state")
        for name in ("blocks", "step ms", "x baseline"):
            table.add_column(name, justify="right", no_wrap=True)
        for key, arm in record["arms"].items():
            state = Text(str(arm["status"]), COLOURS.get(arm["status"], ""))
            if arm.get("reason"):
                state.append(f": {arm['reason']}", style="not bold")
            times = list(self._times.get(key, {}).values())
            step = wording.figures(float(np.median(times))) if times else ""
            number = str(len(times)) if times else ""
            table.add_row(Text(key), state, number, step, self._ratio(record, key))
        return table

    def _add(self, record: Json) -> bool:
        """Read the new blocks of the record. Return whether there were any."""
        blocks = record.get("blocks") or []
        fresh = blocks[self._read :]
        for block in fresh:
            self._dropped += not block.get("kept", True)
            if block.get("kept", True):
                for key, window in block["arms"].items():
                    self._times.setdefault(key, {})[block["index"]] = stats.block_ms(
                        window["step_ms"]
                    )
        self._read = len(blocks)
        return bool(fresh)

    def _ratio(self, record: Json, key: str) -> str:
        base = base_of(record["arms"], key)
        if base is None:
            return ""
        if base == key:
            return "baseline"
        pairs = stats.paired(self._times.get(base, {}), self._times.get(key, {}))
        return wording.ratio(float(np.median(pairs))) if pairs.size else ""

    def _line(self, record: Json) -> str:
        parts = []
        for key in record["arms"]:
            if times := list(self._times.get(key, {}).values()):
                ratio = self._ratio(record, key)
                ratio = f" ({ratio}x)" if ratio and ratio != "baseline" else ""
                parts.append(f"{key} {wording.figures(float(np.median(times)))} ms{ratio}")
        text = f"after {wording.count(self._read, 'block')}"
        if self._dropped:
            text += f", {self._dropped} of them dropped for the load of others"
        return f"{text}: {', '.join(parts)}" if parts else text

    def _flush(self) -> None:
        (self._console.file or sys.stdout).flush()
