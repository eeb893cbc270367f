"""Show the progress of a build: a bar on a terminal, else one plain line at each new phase.

Used by `build`, which passes every step of the log (see `buildlog.Step`).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from hvdtrain.horovod_build.buildlog import Step

Print = Callable[[str], None]
Show = Callable[[Step], None]

QUARTERS = (25, 50, 75)


@contextlib.contextmanager
def progress(echo: Print) -> Iterator[Show]:
    """Yield the function to call with every step of a build."""
    if sys.stdout.isatty():
        with _bar() as show:
            yield show
    else:
        yield PlainProgress(echo)


class PlainProgress:
    """Prints one line for each phase, and for each quarter of the compilation."""

    def __init__(self, echo: Print, clock: Callable[[], float] = time.monotonic) -> None:
        self._say = echo
        self._clock = clock
        self._start = clock()
        self._phase = ""
        self._quarter = 0

    def __call__(self, step: Step) -> None:
        """Print a step if it is news; parallel make may report percentages out of order."""
        quarter = max((q for q in QUARTERS if q <= step.percent), default=0)
        if step.phase == self._phase and quarter <= self._quarter:
            return
        new_phase, self._phase, self._quarter = step.phase != self._phase, step.phase, quarter
        percent = f" {step.percent}%" if quarter and not new_phase else ""
        self._say(f"{self._clock() - self._start:5.0f} s  {step.phase}{percent}")


@contextlib.contextmanager
def _bar() -> Iterator[Show]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:9}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
    )
    with Progress(*columns, TimeElapsedColumn()) as bar:
        task = bar.add_task("download", total=100)
        most = 0

        def show(step: Step) -> None:
            nonlocal most
            # Never backwards, although parallel make reports out of order.
            most = max(most, step.percent, 100 if step.phase in ("pack", "install") else 0)
            bar.update(task, description=step.phase, completed=most)

        yield show
