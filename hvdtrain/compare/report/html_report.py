"""report.html: the verdict in words, the table, one picture of the intervals, the conditions; and
the picture alone, for a manual.

`hvdtrain compare` and `hvdtrain report` write it. All content is computed from the record alone;
writing it again gives the same bytes.
"""

from __future__ import annotations

import math
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from hvdtrain.compare import formatting
from hvdtrain.compare.analysis.table import Table
from hvdtrain.errors import InputError
from hvdtrain.system.files import write_atomically

# Of the picture, in its own units: a line for each arm, names on the left.
_LINE, _LEFT, _WIDTH, _MARGIN = 34, 250, 760, 24


def write(table: Table, folder: Path) -> Path:
    """Write page and picture into an existing folder, and return the path of the page. Raise
    InputError if they cannot be written.
    """
    files = {"report.html": page(table), "intervals.svg": page(table, "intervals.svg")}
    try:
        for name, text in files.items():
            write_atomically(folder / name, text, sync=False)
    except OSError as error:
        raise InputError(f"cannot write the report into {folder}: {error.strerror}") from None
    return folder / "report.html"


def page(table: Table, template: str = "template.html") -> str:
    """Return the page as one self-contained HTML file, or another template."""
    environment = Environment(
        loader=PackageLoader("hvdtrain.compare.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(vars(formatting))
    return environment.get_template(template).render(table=table, picture=intervals(table))


def intervals(table: Table) -> dict[str, object]:
    """Return where the picture has what: on a logarithmic axis 2 and 1/2 are as far from 1."""
    shown = [
        row
        for row in table.rows
        if row.is_shown and row.ratio.low and row.ratio.high and row.role != "baseline"
    ]
    ends = [end for row in shown for end in (row.ratio.low, row.ratio.high) if end]
    reach = max([1.1, *ends, *(1 / end for end in ends)])

    def x(value: float | None) -> float:
        share = math.log(value or 1) / math.log(reach)
        return round(_LEFT + (_WIDTH - _LEFT - _MARGIN) * (1 + share) / 2, 1)

    tops = [top for top in (1.1, 1.25, 1.5, 2, 4) if top <= reach][-2:]
    ticks = [1.0, *tops, *(1 / top for top in tops)]
    return {
        "rows": [
            {"row": row, "y": _LINE * (i + 1), "x": x(row.ratio.value)}
            | {"low": x(row.ratio.low), "high": x(row.ratio.high)}
            for i, row in enumerate(shown)
        ],
        "ticks": [(x(tick), formatting.figures(tick)) for tick in ticks],
        "bottom": _LINE * (len(shown) + 1),
        "width": _WIDTH,
        "left": _LEFT - 12,
    }
