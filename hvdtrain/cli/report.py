"""`hvdtrain report`: write the report of a comparison again from its compare.json."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hvdtrain.cli.command_options import PATH
from hvdtrain.errors import BackendUnavailable
from hvdtrain.training.run_dir import checked


@click.command("report")
@click.argument("folder", metavar="DIR", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print every number as JSON, not as a table.")
@click.option(
    "--against", type=PATH, metavar="FILE", help="An earlier compare.json to compare with."
)
def command(folder: Path, as_json: bool, against: Path | None) -> None:
    """Write the report of a comparison again, from its compare.json alone.

    DIR is a folder that `hvdtrain compare` has written. This writes report.html, summary.md,
    summary.csv and intervals.svg, and prints the table; with --against also the earlier ratios.

    \b
    exit code 0   written
              2   compare.json is missing, damaged or of another version, or DIR is not writable
    """
    try:
        from hvdtrain.compare.analysis.gate import gate_rows
        from hvdtrain.compare.analysis.table import make_table
        from hvdtrain.compare.record import read
        from hvdtrain.compare.report import html_report, terminal
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"a report needs {error.name}; pip install 'hvdtrain[compare]'"
        ) from None
    found = read(folder)
    folder = folder if folder.is_dir() else folder.parent
    with checked(folder / "compare.json"):
        table = make_table(found)
        page = html_report.write(table, folder)
    if as_json:
        click.echo(json.dumps(table, default=vars, indent=1))
        return
    terminal.show(table)
    for row in gate_rows(table, 0.0, make_table(read(against))) if against else []:
        click.echo(f"earlier  {row.text}")
    click.echo(f"report   {page}")
