"""The pictures of a comparison: step times, ratios, scaling.

`html_report` writes them as PNG files and into the page. Each row of a picture is an arm, in the
order of the speed table; an arm without numbers has its reason there instead of a mark.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from hvdtrain.compare import formatting
from hvdtrain.compare.analysis import stats
from hvdtrain.compare.analysis.efficiency import EfficiencyRow
from hvdtrain.compare.analysis.speed import SpeedRow
from hvdtrain.compare.analysis.summary import Summary
from hvdtrain.compare.record import Record
from hvdtrain.compare.report.figure_style import COLOURS, FigureStyle, Picture, new_figure

Floats = npt.NDArray[np.float64]

ROW_HEIGHT = 0.46  # inches
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
# Colour and marker by the arm's index; from the seventh arm on, colours repeat with new markers.
LINE_COLOURS = "blue vermillion green purple orange sky".split()
LINE_MARKERS = "osD^vPX*<>hp"


def pictures(record: Record, summary: Summary) -> list[Picture]:
    """Return every picture that has data."""
    found = (
        steps(record, summary),
        ratios(summary),
        scaling(summary),
    )
    return [picture for picture in found if picture]


# ---------------------------------------------------------------------------------- step times


def steps(record: Record, summary: Summary) -> Picture | None:
    """Return the distribution of each arm's step times over all kept blocks; None without data."""
    times = {row.arm: step_times(record, row.arm) for row in summary.speed if row.is_shown}
    if not times:
        return None
    low, high = _span(list(times.values()))
    beyond = sum(int((np.concatenate(blocks) > high).sum()) for blocks in times.values())
    total = sum(len(block) for blocks in times.values() for block in blocks)
    caption = (
        "Each hill is the distribution of the time of every step in the kept blocks, counting the "
        "slowest rank; all hills have the same height. Each dot under it is the median of one "
        "block, the first block at the top: dots that lean to one side show a machine that became "
        "faster or slower meanwhile. The line is the median over blocks; ticks are the slowest 2 % "
        "of all steps."
    )
    if beyond:
        caption += f" {beyond:,} of {total:,} steps took longer than the axis reaches."

    def draw(style: FigureStyle) -> Figure:
        chart = _ArmChart(style, _in_order(summary))
        is_log = high / low > 6  # else slow arms would squeeze the fast ones
        edges = np.geomspace(low, high, 121) if is_log else np.linspace(low, high, 121)
        for place, row in enumerate(chart.rows):
            if row.arm in times:
                _distribution(chart, place, row, times[row.arm], edges)
                chart.write_beside(place, f"{formatting.figures(row.step_ms)} ms")
            else:
                chart.write_reason(place, row)
        if is_log:
            chart.set_log_axis()
        chart.axes.set_xlim(low, high)
        chart.axes.set_xlabel("step time, ms" + (" (logarithmic)" if is_log else ""))
        return chart.figure

    alt = "Step times, medians: " + "; ".join(
        f"{row.arm} {formatting.figures(row.step_ms)} ms" for row in summary.speed if row.is_shown
    )
    return Picture("steps", "Step times", caption, alt, draw)


def step_times(record: Record, arm: str) -> list[Floats]:
    """Return, per kept block, the ms of each step of an arm on its slowest rank."""
    blocks = [block.arms for block in record.kept_blocks]
    return [stats.slowest(arms[arm].step_ms) for arms in blocks if arm in arms]


def _span(arms: Sequence[list[Floats]]) -> tuple[float, float]:
    """Return axis limits for nearly all steps, without rare long ones that squeeze the rest."""
    every = [np.concatenate(blocks) for blocks in arms]
    low = min(float(np.quantile(steps, 0.002)) for steps in every)
    high = max(min(np.quantile(steps, 0.99), 1.5 * np.quantile(steps, 0.75)) for steps in every)
    margin = 0.04 * (high - low) + 0.002 * high
    return max(low - margin, 0.9 * low), float(high + margin)


def _distribution(
    chart: _ArmChart, place: int, row: SpeedRow, blocks: list[Floats], edges: Floats
) -> None:
    """Draw an arm's row: smoothed histogram, slowest steps, block medians, median over blocks."""
    axes, every = chart.axes, np.concatenate(blocks)
    counts = np.histogram(every, edges)[0].astype(float)
    # A Gaussian of 1.6 bins smooths the histogram.
    window = np.exp(-0.5 * (np.arange(-6, 7) / 1.6) ** 2)
    counts = np.convolve(counts, window / window.sum(), mode="same")
    middles = (edges[1:] + edges[:-1]) / 2
    colour = COLOURS["ink" if row.role == "baseline" else "blue"]
    if counts.max() > 0:
        top = place + 0.02 - 0.38 * counts / counts.max()
        seen = counts > 0.015 * counts.max()
        axes.fill_between(middles, place + 0.02, top, seen, color=colour, alpha=0.35, linewidth=0)
        axes.plot(middles, np.where(seen, top, np.nan), color=colour, linewidth=0.9)
    rare = every[(every > np.quantile(every, 0.98)) & (every < edges[-1])]
    axes.plot(rare, np.full(len(rare), place), "|", color=colour, markersize=4, alpha=0.6)
    medians = [float(np.median(block)) for block in blocks]
    # The block medians from top to bottom in order of time show a drift of the machine.
    drift = place + 0.09 + 0.2 * np.linspace(0, 1, len(medians))
    axes.plot(medians, drift, "o", color=colour, markersize=2.4, markeredgewidth=0)
    axes.plot([row.step_ms] * 2, [place - 0.38, place + 0.32], color=COLOURS["ink"], lw=1.3)


# -------------------------------------------------------------------------------------- ratios


def ratios(summary: Summary) -> Picture | None:
    """Return each arm's speed relative to the baseline, with intervals and A/A band, or None."""
    rows = [row for row in _in_order(summary) if row.role != "baseline"]
    shown = [row for row in rows if row.ratio is not None and not row.has_ended_early]
    if not shown:
        return None
    spreads = {band.ranks: band.spread for band in summary.aa if band.spread is not None}

    def draw(style: FigureStyle) -> Figure:
        chart = _ArmChart(style, rows)
        is_log = _limit_ratios(chart, shown, spreads)
        _draw_bands(chart, spreads)
        chart.axes.axvline(1, color=COLOURS["ink"], linewidth=1)
        for place, row in enumerate(rows):
            if row in shown:
                _draw_ratio(chart, place, row)
            else:
                chart.write_reason(place, row)
        chart.axes.set_xlabel("times as fast as the baseline" + " (logarithmic)" * is_log)
        seen = [verdict for verdict in SIGNS if verdict in {row.verdict for row in shown}]
        handles: list[Any] = [
            Line2D([], [], color=COLOURS[SIGNS[v][0]], marker=SIGNS[v][1], lw=2, label=text)
            for v in seen
            for text in [formatting.VERDICTS[v]]
        ]
        if spreads:
            handles.append(Patch(color=COLOURS["grid"], label="noise: the baseline run twice"))
        chart.add_legend(handles)
        return chart.figure

    base = next((row.name for row in summary.speed if row.role == "baseline"), "?")
    caption = (
        f"How many times as fast as the baseline, {base}, each is: the median "
        "over blocks of the ratio within a block, with its 95 % interval. Right of 1 is faster. "
    )
    caption += (
        "The grey band is what the baseline shows against its repeat: a difference inside it "
        "means nothing."
        if spreads
        else "The baseline has no repeat, so there is no band to compare with."
    )
    alt = "Ratios to the baseline: " + "; ".join(
        f"{row.arm} {formatting.ratio(row.ratio)} "
        f"{formatting.interval(row.low, row.high)} {formatting.VERDICTS[row.verdict]}"
        for row in shown
    )
    return Picture("ratios", "Against the baseline", caption, alt, draw)


def _limit_ratios(chart: _ArmChart, rows: list[SpeedRow], spreads: Mapping[int, float]) -> bool:
    """Set the limits of the axis. Return whether it is logarithmic."""
    ends = [end for row in rows for end in (row.low, row.high, row.ratio) if end]
    spread = max(spreads.values(), default=0.0)
    low, high = min([*ends, 1 / (1 + spread), 0.97]), max([*ends, 1 + spread, 1.03])
    low = max(low, 0.01)
    is_log = high / low > 4
    if is_log:
        chart.set_log_axis()
        chart.axes.set_xlim(low / 1.12, high * 1.12)
    else:
        margin = 0.06 * (high - low)
        chart.axes.set_xlim(low - margin, high + margin)
        chart.axes.xaxis.set_major_locator(MaxNLocator(6))
    return bool(is_log)


def _draw_bands(chart: _ArmChart, spreads: Mapping[int, float]) -> None:
    """Draw the A/A spread of each world size behind its arms."""
    place, colour = 0, COLOURS["grid"]
    for ranks, run in itertools.groupby(chart.rows, key=lambda row: row.ranks):
        below = place + len(list(run))
        if spread := spreads.get(ranks):
            down = [place - 0.5, below - 0.5]
            chart.axes.fill_betweenx(down, 1 / (1 + spread), 1 + spread, color=colour, linewidth=0)
        place = below


def _draw_ratio(chart: _ArmChart, place: int, row: SpeedRow) -> None:
    colour, marker = SIGNS[row.verdict]
    line = {"color": COLOURS[colour]}
    if row.low is not None:
        ends = [row.low, row.high]
        chart.axes.plot(ends, [place] * 2, lw=2, **line)
        chart.axes.plot(ends, [place] * 2, "|", markersize=7, markeredgewidth=1.4, **line)
    chart.axes.plot(row.ratio, place, marker, markersize=6.5, **line)
    between = "\n" if chart.style.is_stacked else "  "
    limits = formatting.interval(row.low, row.high)
    chart.write_beside(place, between.join(filter(None, [formatting.ratio(row.ratio), limits])))


# ------------------------------------------------------------------------------------- scaling


def scaling(summary: Summary) -> Picture | None:
    """Return the picture of measured efficiency; None without data."""
    rows_by_name = _efficiencies(summary)
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
        "Efficiency of each against itself on one rank (against one process where that was not "
        "measured), with 95 % intervals; 100 % is no loss at all."
    )
    alt = "Measured efficiency: " + "; ".join(
        f"{name} at {formatting.count(row.ranks, 'rank')} {formatting.share(row.efficiency)}"
        for name, rows in rows_by_name.items()
        for row in rows
    )
    return Picture("scaling", "Scaling", caption, alt, draw)


def _efficiencies(summary: Summary) -> dict[str, list[EfficiencyRow]]:
    """Return each arm's rows by ascending ranks: against itself at one rank, else one process."""
    ended = {row.arm for row in summary.speed if row.has_ended_early}
    found: dict[str, dict[int, EfficiencyRow]] = {row.name: {} for row in summary.speed}
    for row in sorted(summary.scaling, key=lambda row: row.base_kind != "single"):
        if row.efficiency is not None and row.arm not in ended:
            found[row.name][row.ranks] = row
    return {name: [rows[ranks] for ranks in sorted(rows)] for name, rows in found.items() if rows}


def _line(axes: Any, name: str, rows: list[EfficiencyRow], index: int) -> None:
    """Draw the efficiencies of one arm with their intervals."""
    marker = LINE_MARKERS[index % len(LINE_MARKERS)]
    line = {"color": COLOURS[LINE_COLOURS[index % len(LINE_COLOURS)]], "lw": 1.3}
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


# ------------------------------------------------------------------------- rows with arms' names


class _ArmChart:
    """A figure and its axes, with one labelled row per arm, the first at the top."""

    def __init__(self, style: FigureStyle, rows: Sequence[SpeedRow]) -> None:
        self.style, self.rows = style, rows
        row_height = ROW_HEIGHT + (0.3 if style.is_stacked else 0.0)
        self.figure = new_figure(style, row_height * len(rows) + 0.95)
        self.axes: Any = self.figure.subplots()
        self.axes.set_ylim(len(rows) - 0.5, -0.75 if style.is_stacked else -0.55)
        self.axes.grid(True, axis="x")
        self.axes.tick_params(axis="both", which="both", length=0)
        if style.is_stacked:
            self.axes.set_yticks([])
            for place, row in enumerate(rows):
                name = " ".join([_cut(row.arm, 40), *_role_lines(row)])
                self._write(0, place - 0.53, name, bbox=self._background(1))
        else:
            labels = ["\n".join([*break_name(row.arm, 28), *_role_lines(row)]) for row in rows]
            self.axes.set_yticks(range(len(rows)), labels)
            for label in self.axes.get_yticklabels():
                label.set_multialignment("right")

    def write_beside(self, place: int, text: str) -> None:
        """Write a text at the right end of a row."""
        self._write(1.015, place, text)

    def write_reason(self, place: int, row: SpeedRow) -> None:
        """Write in a row why its arm has no numbers."""
        text = _cut(row.missing_reason, 44 if self.style.is_stacked else 62)
        muted = COLOURS["muted"]
        self._write(0.01, place, text, color=muted, bbox=self._background(1.5), style="italic")

    def add_legend(self, handles: list[Any]) -> None:
        """Add a legend below the axes."""
        columns = 1 if self.style.is_stacked else 3
        self.figure.legend(
            handles=handles, loc="outside lower center", ncols=columns, handlelength=2.2
        )

    def set_log_axis(self) -> None:
        """Make the horizontal axis logarithmic, with plain numbers."""
        self.axes.set_xscale("log")
        self.axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=12))
        self.axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        self.axes.xaxis.set_minor_formatter(NullFormatter())

    def _write(self, x: float, y: float, text: str, **options: Any) -> None:
        """Write a text at `x`, a share of the width, and `y`, a row."""
        transform = self.axes.get_yaxis_transform()
        self.axes.text(x, y, text, transform=transform, va="center", **options)

    def _background(self, pad: float) -> dict[str, Any]:
        return {"facecolor": COLOURS["paper"], "edgecolor": "none", "pad": pad}


def _role_lines(row: SpeedRow) -> list[str]:
    return ["(baseline)"] if row.role == "baseline" else []


def break_name(name: str, width: int) -> list[str]:
    """Break a name into lines of at most `width` characters, at spaces or after punctuation; a
    longer part is cut.
    """
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


def _in_order(summary: Summary) -> list[SpeedRow]:
    """Return the rows of the speed table in its order: the smallest world first."""
    return sorted(summary.speed, key=lambda row: row.ranks)
