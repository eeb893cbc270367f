"""The output of `hvdtrain doctor`: a table on a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdtrain.doctor.finding import Finding

_COLOURS = {"ok": "green", "note": "dim", "warning": "yellow", "failure": "bold red"}


class FindingsDisplay:
    """Shows findings: in a table at the end, or in lines at once; or nothing if it `is_silent`.

    A context manager.
    """

    def __init__(self, is_silent: bool) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False, quiet=is_silent)
        self._table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        self._table.add_column("")
        self._table.add_column("check", no_wrap=True)
        self._table.add_column("found, and the command that repairs it", overflow="fold")
        self._status = self._console.status("checking this machine")

    def __enter__(self) -> FindingsDisplay:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()
        if self._console.is_terminal:
            self._console.print(self._table)

    def show(self, activity: str) -> None:
        """Show the current activity, on a terminal."""
        self._status.update(activity)

    def add(self, finding: Finding) -> None:
        """Show a finding; of another host, only what is broken."""
        if (
            " on " in finding.name
            and finding.status in ("ok", "note")
            and not finding.is_about("hvdtrain")
        ):
            return
        fix = finding.fix if finding.status != "ok" else ""
        if self._console.is_terminal:
            text = Text(finding.text)
            if fix:
                text.append(f"\n{fix}", "bold")
            self._table.add_row(Text(finding.status, _COLOURS[finding.status]), finding.name, text)
            return
        lines = [f"{finding.status:8} {finding.name:20} {finding.text}"]
        lines += [f"{'':29} run: {fix}"] * bool(fix)
        for line in lines:
            self._console.print(Text(line), soft_wrap=True)
