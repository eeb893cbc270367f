"""Figure style: colours, sizes, and PNG and SVG output.

`figures` draws with it, and `html_report` writes the files. Every picture is drawn wide and narrow,
so that its text is readable on a phone. Output is deterministic: the same data gives the same
bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# The colours of Okabe and Ito, distinct under the common kinds of colour blindness, without their
# yellow, which is invisible on white. Marker shape or hatch always repeats what a colour means.
PALETTE = {
    "blue": "#0072b2",
    "orange": "#e69f00",
    "green": "#009e73",
    "vermillion": "#d55e00",
    "sky": "#56b4e9",
    "purple": "#cc79a7",
}
COLOURS = {**PALETTE, "ink": "#1b1f24", "muted": "#5b6470", "grid": "#d5dae1", "paper": "#ffffff"}


@dataclass(frozen=True)
class FigureStyle:
    """Size of a figure. Lengths are in inches, font sizes in points."""

    width: float
    font: float
    is_stacked: bool
    """Row labels are above their rows, not to the left of them; legends have one column."""


WIDE = FigureStyle(7.6, 9.0, is_stacked=False)
NARROW = FigureStyle(3.5, 8.5, is_stacked=True)


@dataclass(frozen=True)
class Picture:
    """One picture: `draw` makes the figure in a style; `alt` is the text alternative."""

    name: str
    title: str
    caption: str
    alt: str
    draw: Callable[[FigureStyle], Figure]


def new_figure(style: FigureStyle, height: float) -> Figure:
    """Return an empty figure, `height` inches high, with automatic layout."""
    return Figure(figsize=(style.width, height), layout="constrained", facecolor="none")


def png(picture: Picture) -> bytes:
    """Return a picture as PNG, wide and on white."""
    out = io.BytesIO()
    with rc_context(_matplotlib_options(WIDE)):
        drawn = picture.draw(WIDE)
        drawn.set_facecolor(COLOURS["paper"])
        FigureCanvasAgg(drawn).print_figure(out, format="png", dpi=160, metadata={"Software": None})
    return out.getvalue()


def svg_variants(picture: Picture) -> dict[str, str]:
    """Return a picture's SVG variants as data: URIs, keyed by media query.

    Text stays text, not outlines. The first query that matches selects the variant; the last, "",
    always matches.
    """
    found = {
        "screen and (max-width: 640px)": _svg(picture, NARROW),
        "": _svg(picture, WIDE),
    }
    # No spaces, which would end the URI in a `srcset`.
    return {query: f"data:image/svg+xml,{quote(text)}" for query, text in found.items()}


def _svg(picture: Picture, style: FigureStyle) -> str:
    out = io.StringIO()
    with rc_context(_matplotlib_options(style)):
        FigureCanvasSVG(picture.draw(style)).print_figure(
            out, format="svg", metadata={"Date": None, "Creator": None, "Format": None}
        )
    return out.getvalue()


def _matplotlib_options(style: FigureStyle) -> dict[str, Any]:
    ink, muted, grid = (COLOURS[name] for name in ("ink", "muted", "grid"))
    return {
        "font.size": style.font,
        "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
        "text.color": ink,
        "text.parse_math": False,  # "$" in an arm's name begins no formula
        "axes.labelsize": style.font,
        "axes.labelcolor": muted,
        "axes.edgecolor": grid,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.axisbelow": True,
        "xtick.color": muted,
        "ytick.color": ink,
        "xtick.labelsize": style.font - 0.5,
        "ytick.labelsize": style.font,
        "grid.color": grid,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": style.font - 0.5,
        "hatch.linewidth": 0.8,
        "svg.fonttype": "none",  # text, not paths
        "svg.hashsalt": "hvdtrain",  # fixed ids: the same bytes each time
    }
