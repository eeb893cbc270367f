"""The scaling picture: measured efficiency, and step times, measured and predicted.

`plots` adds it to the report; the numbers are from `scaling`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from hvdtrain.compare import formatting as wording
from hvdtrain.compare.report.figure_style import COLOURS, Look, Picture, figure

Row = dict[str, Any]

# Colour and marker by the arm's index; from the seventh arm on, colours repeat with new markers.
_COLOURS = "blue vermillion green purple orange sky".split()
_MARKERS = "osD^vPX*<>hp"
RING, SERVER = (0, (4, 2)), (0, (1, 1.6))  # dashes
NOTE = (
    "Predictions are of a model, not measured: further ranks as fast as these, on links as fast as "
    "those measured here, and none slower than another."
)


def scaling(summary: Row) -> Picture | None:
    """Return the picture of measured efficiency and predicted step times; None without data."""
    efficient = efficiencies(summary)
    predicted = predictions(summary)
    if not efficient and not predicted:
        return None
    names = list(dict.fromkeys([*efficient, *predicted]))
    kind = (summary["scaling"] or [summary["prediction"]])[0]["kind"]

    def draw(look: Look) -> Figure:
        panels: list[Any] = []
        panels += [lambda axes: _efficiency(axes, efficient, names, kind)] * bool(efficient)
        panels += [lambda axes: _times(axes, summary, predicted, names)] * bool(predicted)
        across = 1 if look.stacked else len(panels)
        columns = 1 if look.stacked else 3
        lines = -(-(len(names) + 3) // columns) + (4 if look.stacked else 2)
        drawn = figure(look, 3.3 * len(panels) / across + 0.18 * lines + 0.2)
        every = drawn.subplots(len(panels) // across, across, squeeze=False).ravel()
        for axes, panel in zip(every, panels, strict=True):
            panel(axes)
        handles = _handles(names, bool(predicted))
        legend = drawn.legend(
            handles=handles, loc="outside lower center", ncols=columns, handlelength=2.6
        )
        if predicted:
            note = "\n".join(textwrap.wrap(NOTE, 46 if look.stacked else 100))
            size: Any = {"size": look.font - 0.5}
            legend.set_title(note, size)
        return drawn

    return Picture("scaling", "Scaling", _caption(summary, efficient), _alt(efficient), draw)


def efficiencies(summary: Row) -> dict[str, list[Row]]:
    """Return each arm's rows by ascending ranks: against itself at one rank, else one process."""
    found: dict[str, dict[int, Row]] = {}
    failed = {row["arm"] for row in summary["speed"] if wording.ended_early(row)}
    for row in sorted(summary["scaling"], key=lambda row: row.get("base_kind") != "single"):
        if row["efficiency"] is not None and row["arm"] not in failed:
            found.setdefault(name_of(row), {})[row["ranks"]] = row
    order = dict.fromkeys(name_of(row) for row in summary["speed"])
    return {
        name: [found[name][ranks] for ranks in sorted(found[name])]
        for name in order
        if name in found
    }


def predictions(summary: Row) -> dict[str, Row]:
    """Return the prediction row of each arm, by name."""
    named = {row["arm"]: name_of(row) for row in summary["speed"]}
    rows = (summary["prediction"] or {}).get("rows") or []
    return {named.get(row["arm"], row["arm"]): row for row in rows}


def name_of(row: Row) -> str:
    """Return the name of an arm without its number of ranks."""
    tuned = " tuned" if row.get("level") == "best found" else ""
    return f"{row['name']}{tuned}"


def _caption(summary: Row, efficient: Row) -> str:
    parts = []
    if efficient:
        parts.append(
            "Efficiency, measured: of an arm against itself on one rank (against one process where "
            "that was not measured), with 95 % intervals; 100 % is no loss at all."
        )
    if predictions(summary):
        parts.append(
            "Step times: solid lines were measured, dashed and dotted ones are predicted, not "
            "measured; what is assumed stands below."
        )
    return " ".join(parts)


def _alt(efficient: dict[str, list[Row]]) -> str:
    said = [
        f"{name} at {wording.count(row['ranks'], 'rank')} {wording.share(row['efficiency'])}"
        for name, rows in efficient.items()
        for row in rows
    ]
    return "Measured efficiency: " + ("; ".join(said) or "none") + ". Predictions: see the table."


def _style(names: Sequence[str], name: str) -> Row:
    index = names.index(name)
    colour = COLOURS[_COLOURS[index % len(_COLOURS)]]
    return {"color": colour, "marker": _MARKERS[index % len(_MARKERS)], "ms": 5, "lw": 1.3}


def _efficiency(axes: Any, efficient: dict[str, list[Row]], names: list[str], kind: str) -> None:
    for name, rows in efficient.items():
        middle = np.array([row["efficiency"] for row in rows])
        ends = [("low", -1), ("high", 1)]
        # Clamped at zero: matplotlib raises on an error bar of negative length.
        errors = [
            [max(0.0, sign * ((row[end] or row["efficiency"]) - row["efficiency"])) for row in rows]
            for end, sign in ends
        ]
        at = [row["ranks"] for row in rows]
        style = _style(names, name)
        axes.errorbar(at, 100 * middle, 100 * np.array(errors), capsize=3, **style)
        if rows[0].get("base_kind") != "single":  # by definition 100 % at one rank
            axes.plot([1, at[0]], [100, 100 * middle[0]], "-", **{**style, "marker": ""})
    axes.axhline(100, color=COLOURS["muted"], linewidth=0.8, linestyle=":")
    _rank_axis(axes, sorted({1, *(row["ranks"] for rows in efficient.values() for row in rows)}))
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))
    axes.set_title(f"efficiency, {kind} scaling (measured)", fontsize="medium")


def _times(axes: Any, summary: Row, predicted: dict[str, Row], names: list[str]) -> None:
    for name, row in predicted.items():
        style = _style(names, name)
        times: dict[int, float] = {
            other["ranks"]: other["step_ms"]
            for other in summary["speed"]
            if name_of(other) == name and other["step_ms"]
        }
        known = sorted(times)
        last = known[-1] if known else 0
        ring = [(last, times[last])] if known else []
        ring += [
            point for point in zip(row["ranks"], row["ring_ms"], strict=True) if point[0] > last
        ]
        thin = {**style, "linestyle": RING, "ms": 4, "lw": 1.0}
        axes.plot(*zip(*ring, strict=True), markerfacecolor=COLOURS["paper"], **thin)
        thin = {**thin, "linestyle": SERVER, "marker": ""}
        axes.plot(row["ranks"][1:], row["server_ms"][1:], **thin)
        axes.plot(known, [times[ranks] for ranks in known], "-", **style)  # above hollow markers
    _rank_axis(axes, next(iter(predicted.values()))["ranks"])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title("step time, ms (measured, then PREDICTED)", fontsize="medium")


def _rank_axis(axes: Any, ranks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ranks), [str(number) for number in ranks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("ranks")
    axes.tick_params(axis="both", which="both", length=0)
    axes.grid(True, axis="y")


def _handles(names: list[str], predicted: bool) -> list[Any]:
    handles = [Line2D([], [], label=name, **_style(names, name)) for name in names]
    if predicted:
        muted: Row = {"color": COLOURS["muted"], "lw": 1.2}
        handles += [
            Line2D([], [], linestyle="-", label="measured", **muted),
            Line2D([], [], linestyle=RING, label="predicted, ring", **muted),
            Line2D([], [], linestyle=SERVER, label="predicted, parameter server", **muted),
        ]
    return handles
