"""Report files: report.html, the pictures, and two CSV files.

`hvdtrain compare` and `hvdtrain report` write them. All content is computed from the record alone;
writing it again gives the same bytes.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hvdtrain.compare import formatting as wording
from hvdtrain.compare.analysis.stats import block_ms
from hvdtrain.compare.analysis.summary import summarise
from hvdtrain.compare.report import figure_style as look
from hvdtrain.compare.report import figures as plots
from hvdtrain.compare.report.methodology import answers
from hvdtrain.errors import InputError

Json = dict[str, Any]

BLOCK_COLUMNS = "block generation kept dropped arm ranks step_ms steps cpu_s foreign steal".split()


def write(record: Json, folder: Path) -> Path:
    """Write all files into an existing folder, and return the path of the page.

    Raise InputError if the folder cannot be written.
    """
    summary = summarise(record)
    pictures = plots.pictures(record, summary)
    files = {f"{picture.name}.png": look.png(picture) for picture in pictures}
    files["report.html"] = page(record, summary, pictures).encode()
    files["blocks.csv"] = _csv(BLOCK_COLUMNS, block_rows(record))
    files["speed.csv"] = (
        _csv(list(summary["speed"][0]), summary["speed"]) if summary["speed"] else b""
    )
    try:
        for name, content in files.items():
            # By renaming, so that no reader sees half a file.
            fresh = folder / f".{name}.new"
            fresh.write_bytes(content)
            fresh.replace(folder / name)
    except OSError as error:
        raise InputError(f"cannot write the report into {folder}: {error.strerror}") from None
    return folder / "report.html"


def page(record: Json, summary: Json, pictures: list[look.Picture]) -> str:
    """Return the page as one self-contained HTML file."""
    environment = Environment(
        loader=PackageLoader("hvdtrain.compare.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        figures=wording.figures,
        ratio=wording.ratio,
        percent=wording.percent,
        share=wording.share,
        settings=wording.settings,
        moment=wording.moment,
        breakable=_breakable,
    )
    return environment.get_template("template.html").render(
        summary=summary,
        answers=answers(record, summary),
        drawn={picture.name: _drawn(picture) for picture in pictures},
        machine=_machine(record.get("machine") or {}),
        light=look.COLOURS,
        dark=look.DARK,
        phases=plots.phase_rows(summary),
        efficiencies=_efficiencies(summary),
        parts=[(key, name) for key, name, _, _ in plots.PARTS],
        wording=wording,
    )


def _breakable(name: str) -> Markup:
    """Return the name of an arm with line-break opportunities after its punctuation."""
    parts = re.split(r"(?<=[./:_-])", name)
    return Markup('<span class="name">{}</span>').format(Markup("<wbr>").join(parts))


def _efficiencies(summary: Json) -> list[tuple[str, str, list[Json | None]]]:
    """Return per arm: its kind of scaling, its row against itself, its row against one process."""
    failed = {row["arm"] for row in summary["speed"] if wording.ended_early(row)}
    rows: dict[str, dict[str, Json]] = {}
    for row in summary["scaling"]:
        if row["arm"] not in failed:
            rows.setdefault(row["arm"], {})[row["base_kind"]] = row
    return [
        (arm, next(iter(of.values()))["kind"], [of.get("same arm"), of.get("single")])
        for arm, of in rows.items()
    ]


def _machine(machine: Json) -> str:
    cores = machine.get("cores")
    parts = [machine.get("cpu"), cores and wording.count(cores, "core")]
    return ", ".join(str(part) for part in parts if part)


def _drawn(picture: look.Picture) -> Json:
    both = "\n".join(look.svg(picture, size) for size in (look.WIDE, look.NARROW))
    return {"title": picture.title, "caption": picture.caption, "svg": Markup(both)}


def block_rows(record: Json) -> list[Json]:
    """Return one row per block and arm: the measurements, and whether the block counts."""
    return [
        {
            "block": block["index"],
            "generation": block.get("generation"),
            "kept": block["kept"],
            "dropped": block.get("dropped"),
            "arm": arm,
            "ranks": len(window["step_ms"]),
            "step_ms": block_ms(window["step_ms"]),
            "steps": len(window["step_ms"][0]),
            "cpu_s": sum(window.get("cpu_s") or []),
            "foreign": window.get("foreign"),
            "steal": window.get("steal"),
        }
        for block in record.get("blocks") or []
        for arm, window in block["arms"].items()
    ]


def _csv(columns: list[str], rows: list[Json]) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()
