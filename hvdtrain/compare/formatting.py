"""Formatting of a comparison's numbers and names.

Page, pictures and terminal use it, so that they show the same text; the proof and the analysis
format numbers in their texts with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

NOTHING = "–"
"""Placeholder for a value that does not apply; a failed arm shows its reason instead."""

ROLES = {
    "arm": "",
    "baseline": "baseline",
    "again": "the baseline once more",
    "by hand": "a loop written by hand",
    "ceiling": "the ceiling",
}

VERDICTS = {
    "faster": "faster",
    "slower": "slower",
    "same": "no significant difference",
    "baseline": "baseline",
    "ceiling": "the ceiling: less work",
    "unknown": "not enough blocks to tell",
    "no A/A": "no verdict without a repeat of the baseline",
}

SHORT_VERDICTS = {
    **VERDICTS,
    "same": "not significant",
    "unknown": "not enough blocks",
    "no A/A": "no verdict without a repeat",
}
"""`VERDICTS` for narrow places."""


def figures(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, never with an exponent."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{max(0, decimals)}f}"


def tell_apart(a: float, b: float, digits: int, kind: str = "g") -> tuple[str, str]:
    """Format two numbers with `digits` digits, or more if they would look the same.

    `kind`: "g" counts significant digits, "f" those after the point.
    """
    shown = digits
    while f"{a:.{shown}{kind}}" == f"{b:.{shown}{kind}}" and a != b and shown < 17:
        shown += 1
    return f"{a:.{shown}{kind}}", f"{b:.{shown}{kind}}"


def ratio(value: float | None) -> str:
    """Format a ratio to the baseline: two decimals, or two significant digits below 0.1."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:.2f}" if value >= 0.1 else figures(value, 2)


def interval(low: float | None, high: float | None, write: Callable[[float], str] = ratio) -> str:
    """Format a 95 % interval; empty if there is none."""
    if low is None or high is None:
        return ""
    return f"[{write(low)}, {write(high)}]"


def percent(value: float | None, digits: int = 0) -> str:
    """Format a value that is a percentage already."""
    return NOTHING if value is None else f"{value:.{digits}f} %"


def share(value: float | None) -> str:
    """Format a fraction of 1 as a percentage, with a decimal below 10 %."""
    if value is None:
        return NOTHING
    return percent(100 * value, 1 if abs(value) < 0.1 else 0)


def settings(values: Mapping[str, str]) -> str:
    """Format the options of a task in one line."""
    return ", ".join(f"{name}={value}" for name, value in values.items())


def count(number: int, one: str, many: str | None = None) -> str:
    """Format a number of things: "1 block", "7 blocks"."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def moment(when: str | None) -> str:
    """Format an ISO 8601 time, in UTC, without the "T" and fractions of a second."""
    return f"{when[:10]} {when[11:19]} UTC" if when else "at an unknown time"
