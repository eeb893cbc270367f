"""The pictures of a comparison: step times, ratios, breakdown of a step, scaling.

`report` writes them as PNG files and into the page. Each row of a picture is an arm, in the order
of the speed table; an arm without numbers has its reason there instead of a mark.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from hvdtrain.compare import formatting as wording
from hvdtrain.compare.report import scaling_plot as curves
from hvdtrain.compare.report.figure_style import COLOURS, Look, Picture, figure

Row = dict[str, Any]
Floats = npt.NDArray[np.float64]

ROW = 0.46  # inches
# (key, name, colour, hatch), from the left
PARTS = [
    ("compute_ms", "compute", "blue", ""),
    ("straggler_ms", "waiting for the slowest rank", "orange", "///"),
    ("exposed_ms", "communication not hidden", "vermillion", "xxx"),
    ("optimizer_ms", "optimizer", "green", "|||"),
    ("input_ms", "input", "purple", "\\\\\\"),
]
# verdict: colour, marker
SIGNS = {
    "faster": ("blue", ">"),
    "slower": ("vermillion", "<"),
    "same": ("muted", "o"),
    "unknown": ("muted", "D"),
    "no A/A": ("muted", "D"),
    "ceiling": ("purple", "*"),
    "baseline": ("ink", "s"),
}


def pictures(record: Row, summary: Row) -> list[Picture]:
    """Return every picture that has data."""
    return [
        picture
        for picture in (
            steps(record, summary),
            ratios(summary),
            phases(summary),
            curves.scaling(summary),
        )
        if picture
    ]


# ---------------------------------------------------------------------------------- step times


def steps(record: Row, summary: Row) -> Picture | None:
    """Return the distribution of each arm's step times over all kept blocks; None without data."""
    ready = [
        row["arm"] for row in summary["speed"] if row["step_ms"] and not wording.ended_early(row)
    ]
    measured = {arm: step_times(record, arm) for arm in ready}
    if not measured:
        return None
    low, high = _span(list(measured.values()))
    beyond = sum(int((np.concatenate(blocks) > high).sum()) for blocks in measured.values())
    total = sum(len(block) for blocks in measured.values() for block in blocks)
    caption = (
        "Each hill is the distribution of the time of every step in the kept blocks, counting the "
        "slowest rank; all hills have the same height. Each dot under it is the median of one "
        "block, the first block at the top: dots that lean to one side show a machine that became "
        "faster or slower meanwhile. The line is the median over blocks; ticks are the slowest 2 % "
        "of all steps."
    )
    if beyond:
        caption += f" {beyond:,} of {total:,} steps took longer than the axis reaches."

    def draw(look: Look) -> Figure:
        drawn, axes = _rows(look, _in_order(summary))
        log = high / low > 6  # else slow arms would squeeze the fast ones
        edges = np.geomspace(low, high, 121) if log else np.linspace(low, high, 121)
        for place, row in enumerate(_in_order(summary)):
            if row["arm"] in measured:
                _hill(axes, place, row, measured[row["arm"]], edges)
                _beside(axes, place, f"{wording.figures(row['step_ms'])} ms")
            else:
                _missing(axes, place, row, look)
        if log:
            _log_axis(axes)
        axes.set_xlim(low, high)
        axes.set_xlabel("step time, ms" + (" (logarithmic)" if log else ""))
        return drawn

    alt = "Step times by arm, medians: " + "; ".join(
        f"{row['arm']} {wording.figures(row['step_ms'])} ms"
        for row in summary["speed"]
        if row["arm"] in measured
    )
    return Picture("steps", "Step times", caption, alt, draw)


def step_times(record: Row, arm: str) -> list[Floats]:
    """Return, per kept block, the ms of each step of an arm on its slowest rank."""
    return [
        np.asarray(block["arms"][arm]["step_ms"], float).max(axis=0)
        for block in record.get("blocks", [])
        if block["kept"] and arm in block["arms"]
    ]


def _span(arms: Sequence[list[Floats]]) -> tuple[float, float]:
    """Return axis limits for nearly all steps, without rare long ones that squeeze the rest."""
    every = [np.concatenate(blocks) for blocks in arms]
    low = min(float(np.quantile(steps, 0.002)) for steps in every)
    high = max(min(np.quantile(steps, 0.99), 1.5 * np.quantile(steps, 0.75)) for steps in every)
    margin = 0.04 * (high - low) + 0.002 * high
    return max(low - margin, 0.9 * low), float(high + margin)


def _hill(axes: Any, place: int, row: Row, blocks: list[Floats], edges: Floats) -> None:
    """Draw an arm's row: smoothed histogram, slowest steps, block medians, median over blocks."""
    counts = np.histogram(np.concatenate(blocks), edges)[0].astype(float)
    # A Gaussian of 1.6 bins smooths the histogram.
    window = np.exp(-0.5 * (np.arange(-6, 7) / 1.6) ** 2)
    counts = np.convolve(counts, window / window.sum(), mode="same")
    middles = (edges[1:] + edges[:-1]) / 2
    colour = COLOURS[SIGNS["baseline"][0] if row["role"] == "baseline" else "blue"]
    if counts.max() > 0:
        top = place + 0.02 - 0.38 * counts / counts.max()
        seen = counts > 0.015 * counts.max()
        axes.fill_between(middles, place + 0.02, top, seen, color=colour, alpha=0.35, linewidth=0)
        axes.plot(middles, np.where(seen, top, np.nan), color=colour, linewidth=0.9)
    every = np.concatenate(blocks)
    rare = every[(every > np.quantile(every, 0.98)) & (every < edges[-1])]
    axes.plot(rare, np.full(len(rare), place), "|", color=colour, markersize=4, alpha=0.6)
    medians = [float(np.median(block)) for block in blocks]
    # The block medians from top to bottom in order of time show a drift of the machine.
    drift = place + 0.09 + 0.2 * np.linspace(0, 1, len(medians))
    axes.plot(medians, drift, "o", color=colour, markersize=2.4, markeredgewidth=0)
    axes.plot([row["step_ms"]] * 2, [place - 0.38, place + 0.32], color=COLOURS["ink"], lw=1.3)


# -------------------------------------------------------------------------------------- ratios


def ratios(summary: Row) -> Picture | None:
    """Return each arm's speed relative to the baseline, with intervals and A/A band, or None."""
    rows = [row for row in _in_order(summary) if row["role"] != "baseline"]
    shown = [row for row in rows if row["ratio"] is not None and not wording.ended_early(row)]
    if not shown:
        return None
    bands = {band["ranks"]: band for band in summary["aa"] if band["spread"] is not None}

    def draw(look: Look) -> Figure:
        drawn, axes = _rows(look, rows)
        log = _ratio_limits(axes, shown, bands)
        _bands(axes, rows, bands)
        axes.axvline(1, color=COLOURS["ink"], linewidth=1)
        for place, row in enumerate(rows):
            if row not in shown:
                _missing(axes, place, row, look)
                continue
            colour, marker = SIGNS.get(row["verdict"], SIGNS["unknown"])
            if row["low"] is not None:
                axes.plot([row["low"], row["high"]], [place] * 2, color=COLOURS[colour], lw=2)
                ends = {"color": COLOURS[colour], "markersize": 7, "markeredgewidth": 1.4}
                axes.plot([row["low"], row["high"]], [place] * 2, "|", **ends)
            axes.plot(row["ratio"], place, marker, color=COLOURS[colour], markersize=6.5)
            _beside(axes, place, _ratio_text(row, look))
        axes.set_xlabel("times as fast as the baseline" + (" (logarithmic)" if log else ""))
        _sign_legend(drawn, shown, bool(bands), look)
        return drawn

    caption = (
        f"How many times as fast as the baseline, {_baseline(summary)}, each arm is: the median "
        "over blocks of the ratio within a block, with its 95 % interval. Right of 1 is faster. "
    )
    if any(row["level"] == "best found" for row in shown):
        caption += "Tuned arms are held against the tuned baseline, where tuning changed it. "
    caption += (
        "The grey band is what the baseline shows against itself (A/A): a difference inside it "
        "means nothing."
        if bands
        else "There is no A/A spread, so there is no band to compare with."
    )
    alt = "Ratios to the baseline: " + "; ".join(
        f"{row['arm']} {wording.ratio(row['ratio'])} "
        f"{wording.interval(row['low'], row['high'])} {wording.SAID.get(row['verdict'], '')}"
        for row in shown
    )
    return Picture("ratios", "Against the baseline", caption, alt, draw)


def _baseline(summary: Row) -> str:
    return next((row["name"] for row in summary["speed"] if row["role"] == "baseline"), "?")


def _ratio_limits(axes: Any, rows: list[Row], bands: dict[int, Row]) -> bool:
    """Set the limits of the axis. Return whether it is logarithmic."""
    ends = [end for row in rows for end in (row["low"], row["high"], row["ratio"]) if end]
    spread = max([band["spread"] for band in bands.values()], default=0.0)
    low, high = min([*ends, 1 - spread, 0.97]), max([*ends, 1 + spread, 1.03])
    low = max(low, 0.01)
    log = high / low > 4
    if log:
        _log_axis(axes)
        axes.set_xlim(low / 1.12, high * 1.12)
    else:
        margin = 0.06 * (high - low)
        axes.set_xlim(low - margin, high + margin)
        axes.xaxis.set_major_locator(MaxNLocator(6))
    return bool(log)


def _bands(axes: Any, rows: list[Row], bands: dict[int, Row]) -> None:
    """Draw the A/A spread of each world size behind its arms."""
    place = 0
    for ranks, run in itertools.groupby(rows, key=lambda row: int(row["ranks"])):
        below = place + len(list(run))
        if band := bands.get(ranks):
            across = [1 - band["spread"], 1 + band["spread"]]
            down = [place - 0.5, below - 0.5]
            axes.fill_betweenx(down, *across, color=COLOURS["grid"], linewidth=0)
        place = below


def _ratio_text(row: Row, look: Look) -> str:
    text = wording.ratio(row["ratio"])
    between = "\n" if look.stacked else "  "
    limits = wording.interval(row["low"], row["high"])
    return f"{text}{between}{limits}" if limits else text


def _sign_legend(drawn: Figure, rows: list[Row], band: bool, look: Look) -> None:
    from matplotlib.lines import Line2D

    seen = [verdict for verdict in SIGNS if any(row["verdict"] == verdict for row in rows)]
    handles: list[Any] = [
        Line2D([], [], color=COLOURS[SIGNS[v][0]], marker=SIGNS[v][1], lw=2, label=wording.SAID[v])
        for v in seen
    ]
    if band:
        handles.append(Patch(color=COLOURS["grid"], label="A/A spread"))
    _legend(drawn, handles, look)


# ------------------------------------------------------------------------- where the time goes


def phases(summary: Row) -> Picture | None:
    """Return the parts of a step, stacked; None without data."""
    rows = [row for row in phase_rows(summary) if row["compute_ms"] is not None]
    if not rows:
        return None

    def draw(look: Look) -> Figure:
        named = {row["arm"]: row for row in summary["speed"]}
        drawn, axes = _rows(look, [{**named.get(row["arm"], {}), **row} for row in rows])
        for place, row in enumerate(rows):
            left = 0.0
            for key, _, colour, hatch in PARTS:
                width = max(0.0, row[key] or 0.0)
                axes.barh(place, width, 0.5, left, **_fill(colour, hatch))
                left += width
            _beside(axes, place, f"{wording.figures(left)} ms")
        axes.set_xlim(0, None)
        axes.margins(x=0.01)
        axes.set_xlabel("time of a step, ms")
        _legend(
            drawn, [Patch(**_fill(colour, h), label=name) for _, name, colour, h in PARTS], look
        )
        return drawn

    caption = (
        "From a timed pass of its own, with a barrier before each step, which forbids overlap "
        "between steps: its totals can be larger than the step times above. Compute is what the "
        "arm without communication takes, forward and backward; communication is what an arm takes "
        "beyond that; what backward hides is not in it."
    )
    alt = "Parts of a step in ms: " + "; ".join(
        f"{row['arm']}: "
        + ", ".join(f"{name} {wording.figures(row[key])}" for key, name, _, _ in PARTS)
        for row in rows
    )
    return Picture("phases", "Where the time goes", caption, alt, draw)


def phase_rows(summary: Row) -> list[Row]:
    """Return the parts of each arm's step, in the order of the speed table."""
    order = [row["arm"] for row in _in_order(summary)]
    return sorted(summary["phases"], key=lambda row: order.index(row["arm"]))


def _fill(colour: str, hatch: str) -> dict[str, Any]:
    return {
        "facecolor": COLOURS[colour],
        "edgecolor": COLOURS["paper"],
        "hatch": hatch,
        "linewidth": 0.6,
    }


# ------------------------------------------------------------------------- rows with arms' names


def _rows(look: Look, rows: Sequence[Row]) -> tuple[Figure, Any]:
    """Return a figure and its axes with one labelled row per arm, the first at the top."""
    each = ROW + (0.3 if look.stacked else 0.0)
    drawn = figure(look, each * len(rows) + 0.95)
    axes = drawn.subplots()
    axes.set_ylim(len(rows) - 0.5, -0.75 if look.stacked else -0.55)
    axes.grid(True, axis="x")
    axes.tick_params(axis="both", which="both", length=0)
    if look.stacked:
        axes.set_yticks([])
        for place, row in enumerate(rows):
            text = _label(row, breaking=False)
            paper = {"facecolor": COLOURS["paper"], "edgecolor": "none", "pad": 1}
            at: Row = {"transform": axes.get_yaxis_transform(), "va": "center", "bbox": paper}
            axes.text(0, place - 0.53, text, **at)
    else:
        axes.set_yticks(range(len(rows)), [_label(row, breaking=True) for row in rows])
        for label in axes.get_yticklabels():
            label.set_multialignment("right")
    return drawn, axes


def _label(row: Row, breaking: bool) -> str:
    """Return the label of a row, in one line or in several."""
    name = row.get("arm") or row.get("name") or "?"
    lines = _broken(name, 28) if breaking else [_cut(name, 40)]
    if row.get("role") == "baseline":
        lines.append("(baseline)")
    return ("\n" if breaking else " ").join(lines)


def _broken(name: str, width: int) -> list[str]:
    """Break a name into lines, at spaces or after its punctuation."""
    lines = [""]
    for part in re.findall(r"[^\s./:_-]*[\s./:_-]*", name):
        if len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines if line.strip()]


def _cut(text: str, length: int) -> str:
    """Shorten a text to `length` characters. The table has the full text."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"


def _in_order(summary: Row) -> list[Row]:
    """Return the rows of the speed table in its order: the smallest world first."""
    return sorted(summary["speed"], key=lambda row: int(row["ranks"]))


def _beside(axes: Any, place: int, text: str) -> None:
    """Write a text at the right end of a row."""
    axes.text(1.015, place, text, transform=axes.get_yaxis_transform(), va="center")


def _missing(axes: Any, place: int, row: Row, look: Look) -> None:
    """Write in a row why its arm has no numbers."""
    text = _cut(wording.missing(row), 44 if look.stacked else 62)
    at: Row = {"transform": axes.get_yaxis_transform(), "va": "center", "style": "italic"}
    paper: Row = {"facecolor": COLOURS["paper"], "edgecolor": "none", "pad": 1.5}
    axes.text(0.01, place, text, color=COLOURS["muted"], bbox=paper, **at)


def _legend(drawn: Figure, handles: list[Any], look: Look) -> None:
    columns = 1 if look.stacked else 3
    drawn.legend(handles=handles, loc="outside lower center", ncols=columns, handlelength=2.2)


def _log_axis(axes: Any) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=12))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
