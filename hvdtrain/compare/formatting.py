"""Formatting of a comparison's numbers and names.

Page and terminal use it, so that they show the same text; the proof and the analysis format numbers
in their texts with it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdtrain.compare.analysis.stats import Ratio

NOTHING = "–"
"""Placeholder for a value that does not apply; a failed arm shows its reason instead."""

VERDICTS = {
    "faster": "faster",
    "slower": "slower",
    "same": "no significant difference",
    "unknown": "not enough blocks to tell",
}
MARKS = {True: "✓", False: "✗", None: "?"}
"""Whether all arms did the same work."""
SIGNS = {"faster": "▲", "slower": "▼", "same": "~", "unknown": "?"}


def figures(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, never with an exponent."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")
    decimals = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{max(0, decimals)}f}"


def tell_apart(a: float, b: float, digits: int) -> tuple[str, str]:
    """Format two numbers with `digits` significant digits, or more if they would look the same."""
    while f"{a:.{digits}g}" == f"{b:.{digits}g}" and a != b and digits < 17:
        digits += 1
    return f"{a:.{digits}g}", f"{b:.{digits}g}"


def ratio(found: Ratio) -> str:
    """Format a ratio with its interval: "1.34 [1.30, 1.38]"; with a third decimal if two would
    round a limit to 1. Without an interval where there is none.
    """
    values = [value for value in (found.value, found.low, found.high) if value is not None]
    digits = 3 if any(0.0005 <= abs(value - 1) < 0.005 for value in values[1:]) else 2
    texts = [f"{v:.{digits}f}" if v >= 0.1 else figures(v, 2) for v in values] or [NOTHING]
    return texts[0] if len(texts) < 3 else f"{texts[0]} [{texts[1]}, {texts[2]}]"


def times_as_fast(found: Ratio, base: str) -> str:
    """Format a ratio within a sentence: "1.34 [1.30, 1.38] times as fast as ddp/gloo"."""
    return f"{ratio(found)} times as fast as {base}"


def percent(value: float | None) -> str:
    """Format a fraction of 1 as a percentage, with a decimal below 10 %."""
    return NOTHING if value is None else f"{100 * value:.{abs(value) < 0.1:d}f} %"


def relative(apart: float) -> str:
    """Format a relative difference: "5 %", "1.0e-05"."""
    return percent(apart) if 0.01 <= apart < math.inf else f"{apart:.1e}"


def count(number: int, what: str) -> str:
    """Format a number of things: "1 block", "7 blocks"."""
    return f"{number} {what}{'s' * (number != 1)}"
