"""The scaling picture: the measured efficiency of each arm by number of ranks.

`figures` adds it to the report; the numbers are from `analysis.efficiency`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from hvdtrain.compare import formatting
from hvdtrain.compare.analysis.efficiency import EfficiencyRow
from hvdtrain.compare.analysis.summary import Summary
from hvdtrain.compare.report.figure_style import COLOURS, FigureStyle, Picture, new_figure

# Colour and marker by the arm's index; from the seventh arm on, colours repeat with new markers.
_COLOURS = "blue vermillion green purple orange sky".split()
_MARKERS = "osD^vPX*<>hp"


def scaling(summary: Summary) -> Picture | None:
    """Return the picture of measured efficiency; None without data."""
    rows_by_name = efficiencies(summary)
    if not rows_by_name:
        return None

    def draw(style: FigureStyle) -> Figure:
        columns = 1 if style.is_stacked else 3
        drawn = new_figure(style, 3.5 + 0.18 * -(-len(rows_by_name) // columns))
        axes = drawn.subplots()
        for index, (name, rows) in enumerate(rows_by_name.items()):
            _line(axes, name, rows, index)
        axes.axhline(100, color=COLOURS["muted"], linewidth=0.8, linestyle=":")
        sizes = sorted({1, *(row.ranks for rows in rows_by_name.values() for row in rows)})
        _rank_axis(axes, sizes)
        axes.set_ylim(0, None)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
        axes.set_title(f"efficiency, {summary.scaling[0].kind} scaling", fontsize="medium")
        drawn.legend(loc="outside lower center", ncols=columns, handlelength=2.6)
        return drawn

    caption = (
        "Efficiency of an arm against itself on one rank (against one process where that was not "
        "measured), with 95 % intervals; 100 % is no loss at all."
    )
    alt = "Measured efficiency: " + "; ".join(
        f"{name} at {formatting.count(row.ranks, 'rank')} {formatting.share(row.efficiency)}"
        for name, rows in rows_by_name.items()
        for row in rows
    )
    return Picture("scaling", "Scaling", caption, alt, draw)


def efficiencies(summary: Summary) -> dict[str, list[EfficiencyRow]]:
    """Return each arm's rows by ascending ranks: against itself at one rank, else one process."""
    ended = {row.arm for row in summary.speed if row.has_ended_early}
    found: dict[str, dict[int, EfficiencyRow]] = {row.name: {} for row in summary.speed}
    for row in sorted(summary.scaling, key=lambda row: row.base_kind != "single"):
        if row.efficiency is not None and row.arm not in ended:
            found[row.name][row.ranks] = row
    return {name: [rows[ranks] for ranks in sorted(rows)] for name, rows in found.items() if rows}


def _line(axes: Any, name: str, rows: list[EfficiencyRow], index: int) -> None:
    """Draw the efficiencies of one arm with their intervals."""
    marker = _MARKERS[index % len(_MARKERS)]
    line = {"color": COLOURS[_COLOURS[index % len(_COLOURS)]], "lw": 1.3}
    middle, low, high = (
        np.array([row.efficiency if (x := getattr(row, end)) is None else x for row in rows])
        for end in ("efficiency", "low", "high")
    )
    # Clamped at zero: matplotlib raises on an error bar of negative length.
    errors = np.maximum(0.0, [middle - low, high - middle])
    at = [row.ranks for row in rows]
    axes.errorbar(
        at, 100 * middle, 100 * errors, capsize=3, marker=marker, ms=5, label=name, **line
    )
    if rows[0].base_kind != "single":  # by definition 100 % at one rank
        axes.plot([1, at[0]], [100, 100 * middle[0]], "-", **line)


def _rank_axis(axes: Any, ranks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ranks), [str(number) for number in ranks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("ranks")
    axes.tick_params(axis="both", which="both", length=0)
    axes.grid(True, axis="y")
