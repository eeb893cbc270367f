"""Report files: report.html, and the pictures.

`hvdtrain compare` and `hvdtrain report` write them. All content is computed from the record alone;
writing it again gives the same bytes.
"""

from __future__ import annotations

import re
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hvdtrain.compare import formatting
from hvdtrain.compare.analysis.conditions import stop_rule
from hvdtrain.compare.analysis.efficiency import EfficiencyRow
from hvdtrain.compare.analysis.summary import Summary, summarise
from hvdtrain.compare.record import Record
from hvdtrain.compare.report import figures
from hvdtrain.compare.report.figure_style import COLOURS, Picture, png, svg_variants
from hvdtrain.errors import InputError
from hvdtrain.system.files import write_atomically


def write(record: Record, folder: Path) -> Path:
    """Write all files into an existing folder, and return the path of the page.

    Raise InputError if the folder cannot be written.
    """
    summary = summarise(record)
    pictures = figures.pictures(record, summary)
    files = {f"{picture.name}.png": png(picture) for picture in pictures}
    files["report.html"] = page(record, summary, pictures).encode()
    try:
        for name, content in files.items():
            write_atomically(folder / name, content, sync=False)
    except OSError as error:
        raise InputError(f"cannot write the report into {folder}: {error.strerror}") from None
    return folder / "report.html"


def page(record: Record, summary: Summary, pictures: list[Picture]) -> str:
    """Return the page as one self-contained HTML file."""
    environment = Environment(
        loader=PackageLoader("hvdtrain.compare.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        figures=formatting.figures,
        ratio=formatting.ratio,
        percent=formatting.percent,
        share=formatting.share,
        settings=formatting.settings,
        moment=formatting.moment,
        breakable=_breakable,
        capitalised=lambda text: text[:1].upper() + text[1:],
    )
    return environment.get_template("template.html").render(
        summary=summary,
        record=record,
        drawn={picture.name: picture for picture in pictures},
        variants={picture.name: svg_variants(picture) for picture in pictures},
        colours=COLOURS,
        efficiencies=_efficiencies(summary),
        formatting=formatting,
        stop_rule=stop_rule,
    )


def _breakable(name: str) -> Markup:
    """Return the name of an arm with line-break opportunities after its punctuation."""
    parts = re.split(r"(?<=[./:_-])", name)
    return Markup('<span class="name">{}</span>').format(Markup("<wbr>").join(parts))


def _efficiencies(summary: Summary) -> dict[str, dict[str, EfficiencyRow]]:
    """Return the efficiencies by arm, then base kind, without arms that failed or were refused."""
    ended = {row.arm for row in summary.speed if row.has_ended_early}
    found: dict[str, dict[str, EfficiencyRow]] = {}
    for row in summary.scaling:
        if row.arm not in ended:
            found.setdefault(row.arm, {})[row.base_kind] = row
    return found
