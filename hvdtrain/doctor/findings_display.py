"""The output of `hvdtrain doctor`: a line for each finding, and its fix; coloured on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from hvdtrain.doctor.finding import Finding

_COLOURS = {"ok": "green", "note": "dim", "warning": "yellow", "failure": "bold red"}


class FindingsDisplay:
    """Shows findings at once, and on a terminal the current activity; nothing if it `is_silent`.

    A context manager.
    """

    def __init__(self, is_silent: bool) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False, quiet=is_silent)
        self._status = self._console.status("checking this machine")

    def __enter__(self) -> FindingsDisplay:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def show(self, activity: str) -> None:
        """Show the current activity, on a terminal."""
        self._status.update(activity)

    def add(self, finding: Finding) -> None:
        """Show a finding; for other hosts, only broken ones."""
        is_dull = finding.status in ("ok", "note") and not finding.is_about("hvdtrain")
        if is_dull and " on " in finding.name:
            return
        status = (f"{finding.status:8} ", _COLOURS[finding.status])
        text = Text.assemble(status, f"{finding.name:20} {finding.text}")
        if finding.fix and finding.status != "ok":
            text.append(f"\n{'':29} run: {finding.fix}", "bold")
        self._console.print(text, soft_wrap=True)
