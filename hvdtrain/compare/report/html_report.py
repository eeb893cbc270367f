"""The files of a report: a page, a picture for a manual, a summary for a pull request or a sheet.

`hvdtrain compare` and `hvdtrain report` write them. All content is computed from the record alone;
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

FILES = ("report.html", "intervals.svg", "summary.md", "summary.csv")


def write(table: Table, folder: Path) -> Path:
    """Write all files into an existing folder, and return the path of the page. Raise InputError if
    they cannot be written.
    """
    try:
        for name in FILES:
            write_atomically(folder / name, page(table, name), sync=False)
    except OSError as error:
        raise InputError(f"cannot write the report into {folder}: {error.strerror}") from None
    return folder / FILES[0]


def page(table: Table, name: str = FILES[0]) -> str:
    """Return one of the files; the page is one self-contained HTML file."""
    environment = Environment(
        loader=PackageLoader("hvdtrain.compare.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(vars(formatting), log=math.log)
    return environment.get_template(name).render(table=table)
