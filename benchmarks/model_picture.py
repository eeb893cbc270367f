"""The picture of `model.py`: small panels, a row for each kind of cluster, a column for each size.

Points are measured, with the interval over blocks; lines are computed, dashed from assumed costs.
It has no background, so that it can be read on light and on dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

INKS = {"gloo": "#0072B2", "shm": "#D55E00", "mpi4py": "#009E73", "raw": "#CC79A7"}
NAMES = {"gloo": "Gloo", "mpi4py": "mpi4py", "shm": "shm", "raw": "raw Open MPI"}
# In this order, so that of two lines in one place both are seen.
STROKES = {"gloo": 1.8, "mpi4py": 4.0, "shm": 1.8, "raw": 1.8}
TEXT, GRID = "#7a7a7a", "#7a7a7a"  # as in house.svg
WIDTH, LEFT, PITCH, PANEL, TOP, ROW, HEIGHT = 800, 50, 190, 136, 72, 164, 96
MOST_RANKS = 1024


def ranks_of(layout: str) -> int:
    """Return the ranks of "hosts x ranks of each"."""
    hosts, per_host = layout.split(" x ")
    return int(hosts) * int(per_host)


def ticks(value: int) -> str:
    """Return a power of ten of milliseconds in words."""
    micros = value + 3
    unit = ("us", "ms", "s")[max(0, micros // 3)]
    return f"{10 ** (micros % 3)} {unit}"


def panel(lines: Any, points: list[Any], x0: float, y0: float, dashed: bool) -> Iterator[str]:
    """Yield the elements of one panel: its grid, each way's line, and the measured points."""
    times = [t for line in lines.values() for t in line.values()]
    times += [t for _, _, measured in points for t in measured]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))

    def x(ranks: float) -> str:
        return f"{x0 + (math.log2(ranks) - 0.7) / (math.log2(MOST_RANKS) - 0.4) * PANEL:.1f}"

    def y(ms: float) -> str:
        return f"{y0 + HEIGHT * (high - math.log10(ms)) / (high - low):.1f}"

    for power in range(low, high + 1):
        at = y(10.0**power)
        yield f'<path d="M{x0} {at}h{PANEL}" stroke="{GRID}" stroke-opacity=".3"/>'
        yield f'<text x="{x0 - 4}" y="{float(at) + 4:.1f}" text-anchor="end">{ticks(power)}</text>'
    for way, width in STROKES.items():
        path = "L".join(f"{x(ranks_of(where))} {y(t)}" for where, t in lines[way].items())
        style = f'stroke="{INKS[way]}" stroke-width="{width}"'
        style += ' stroke-dasharray="5 3"' if dashed else ""
        yield f'<path d="M{path}" fill="none" {style}/>'
    for way, ranks, measured in points:
        ends = y(min(measured)), y(max(measured))
        yield f'<path d="M{x(ranks)} {ends[0]}V{ends[1]}" stroke="{INKS[way]}"/>'
        yield f'<circle cx="{x(ranks)}" cy="{y(measured[0])}" r="3.2" fill="{INKS[way]}"/>'
    for ranks in (2, 8, 32, 128, 1024):
        at = f'x="{x(ranks)}" y="{y0 + HEIGHT + 15}"'
        yield f'<text {at} text-anchor="middle">{ranks}</text>'


def draw(found: dict[str, Any]) -> str:
    """Return the picture of what `model.summary` returns."""
    rows, measured = found["computed"], found["check"]
    height = TOP + ROW * len(rows) - 26
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        f' font-family="sans-serif" font-size="11" fill="{TEXT}" role="img" aria-label="Time of an'
        ' all-reduce over the number of ranks, measured and computed; the figures are in the table'
        ' of the page">'
    ]  # fmt: skip
    at = LEFT
    for way, name in NAMES.items():
        out.append(f'<path d="M{at} 12h22" stroke="{INKS[way]}" stroke-width="3"/>')
        out.append(f'<text x="{at + 28}" y="16" font-size="12">{name}</text>')
        at += 50 + 7 * len(name)
    words = "points: measured; lines: computed; dashed: from assumed costs"
    out.append(f'<text x="{WIDTH - 10}" y="16" text-anchor="end">{words}</text>')
    for number, (kind, sizes) in enumerate(rows.items()):
        top = TOP + number * ROW
        out.append(
            f'<text x="{LEFT}" y="{top - 26}" font-size="13" font-weight="600">{kind}</text>'
        )
        for column, (size, lines) in enumerate(sizes.items()):
            x0, points = LEFT + column * PITCH, []
            for name, row in measured.items():
                way, layout, label = name.split(", ")
                if label == size and layout in lines[way] and not kind.startswith("assumed"):
                    points.append((way, ranks_of(layout), row["measured"]))
            out.append(f'<text x="{x0}" y="{top - 8}">{size}</text>')
            out += panel(lines, points, x0, top, kind.startswith("assumed"))
    out.append(f'<text x="{WIDTH - 10}" y="{height - 4}" text-anchor="end">ranks</text>')
    return "\n".join(out) + "\n</svg>\n"
