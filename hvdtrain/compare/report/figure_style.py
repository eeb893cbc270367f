"""Figure style: colours, sizes, and PNG and SVG output.

`plots` and `curves` draw with it, and `report` writes the files. Every picture is drawn twice, wide
and narrow, so that its text is readable on a phone. The page's SVG has CSS variables for colours
and real text, so that it follows the page's theme, dark or printed. Output is deterministic: the
same data gives the same bytes.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
SHADES = {"ink": "#1b1f24", "muted": "#5b6470", "grid": "#d5dae1", "paper": "#ffffff"}
COLOURS = {**PALETTE, **SHADES}
# The same for a dark page, where the colours that are too dark to see are lighter.
DARK = {
    **PALETTE,
    "blue": "#4a9fe0",
    "green": "#1fbf92",
    "vermillion": "#ee7a30",
    "sky": "#8ccdf5",
    "ink": "#e6e9ee",
    "muted": "#a3adba",
    "grid": "#39414c",
    "paper": "#14181d",
}


@dataclass(frozen=True)
class Look:
    """A figure size. Lengths are in inches, font sizes in points."""

    name: str
    width: float
    font: float
    stacked: bool
    """Row labels are above their rows, not to the left of them."""


WIDE = Look("wide", 7.6, 9.0, stacked=False)
NARROW = Look("narrow", 3.5, 8.5, stacked=True)


@dataclass(frozen=True)
class Picture:
    """One picture: `draw` makes the figure at a size; `alt` is the text alternative."""

    name: str
    title: str
    caption: str
    alt: str
    draw: Callable[[Look], Figure]


def figure(look: Look, height: float) -> Figure:
    """Return an empty figure, `height` inches high, with automatic layout."""
    return Figure(figsize=(look.width, height), layout="constrained", facecolor="none")


def png(picture: Picture) -> bytes:
    """Return a picture as PNG, wide and on white."""
    with _style(WIDE):
        drawn = picture.draw(WIDE)
        drawn.set_facecolor(COLOURS["paper"])
        canvas, out = FigureCanvasAgg(drawn), io.BytesIO()
        canvas.print_figure(out, format="png", dpi=160, metadata={"Software": None})
    return out.getvalue()


def svg(picture: Picture, look: Look) -> str:
    """Return a picture as an <svg> element for a page that defines the colours."""
    salt = f"{picture.name}-{look.name}"
    with _style(look, salt):
        canvas, out = FigureCanvasSVG(picture.draw(look)), io.StringIO()
        canvas.print_figure(
            out, format="svg", metadata={"Date": None, "Creator": None, "Format": None}
        )
    return _for_the_page(out.getvalue(), salt, picture.alt, look)


def _style(look: Look, salt: str = "") -> Any:
    from matplotlib import rc_context

    ink, muted, grid = COLOURS["ink"], COLOURS["muted"], COLOURS["grid"]
    return rc_context(
        {
            "font.size": look.font,
            "font.family": "DejaVu Sans",  # comes with matplotlib: the same on every machine
            "text.color": ink,
            "text.parse_math": False,  # "$" in an arm's name begins no formula
            "axes.labelsize": look.font,
            "axes.labelcolor": muted,
            "axes.edgecolor": grid,
            "axes.facecolor": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.spines.left": False,
            "axes.axisbelow": True,
            "xtick.color": muted,
            "ytick.color": ink,
            "xtick.labelsize": look.font - 0.5,
            "ytick.labelsize": look.font,
            "grid.color": grid,
            "grid.linewidth": 0.6,
            "legend.frameon": False,
            "legend.fontsize": look.font - 0.5,
            "hatch.linewidth": 0.8,
            "svg.fonttype": "none",  # text, not paths
            "svg.hashsalt": salt or "hvdtrain",  # fixed ids: the same bytes each time
        }
    )


def _for_the_page(text: str, salt: str, alt: str, look: Look) -> str:
    """Return matplotlib's SVG as an inline element: unique ids, the page's font and colours."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.S)
    # Ids are global in a page: prefix those that are referenced, and remove the others.
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{salt}-{m[1]}"' if m[1] in used else "", text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{salt}-", text)
    text = text.replace("font-family: 'DejaVu Sans'", "font-family: var(--font)")
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.S)
    text = re.sub(r"(\d+\.\d\d)\d+", r"\1", re.sub(r"\s*\n\s*", " ", text))  # halves the size
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    box = re.search(r'(?<=viewBox=")[^"]+', text)
    assert box is not None
    width, height = map(float, box[0].split()[-2:])
    tall = " tall" if height > 0.75 * width else ""
    label = html.escape(alt, quote=True)
    start = (
        f'<svg class="{look.name}{tall}" role="img" aria-label="{label}" viewBox="{box[0]}" '
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: start, text, count=1).strip()
