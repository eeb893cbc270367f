"""The table: some numbers by hand, and what is made of them, which messages.txt has for a person to
read: in the terminal, for a pull request, for a sheet, and on the page.
"""

from __future__ import annotations

import csv
import html
import io
import json
import re
import statistics
from pathlib import Path

import msgspec
import pytest

from hvdtrain.cli.report import command
from hvdtrain.compare import record
from hvdtrain.compare.analysis.stats import Ratio
from hvdtrain.compare.formatting import figures, ratio
from hvdtrain.compare.record import parse
from hvdtrain.compare.report import html_report, terminal
from hvdtrain.errors import InputError
from tests.compare.records import FAILED, Record, exact_record, make_record, table_of
from tests.messages import Message

TINY = {"a": 10.0, "a (repeat)": 10.0, "b": 5.0}
NASTY = "x</script><script>alert(1)</script>&|\"'"


def shown(found: Record) -> list[str]:
    """The lines on a terminal."""
    out = io.StringIO()
    terminal.show(table_of(found), out, width=80)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def text_of(page: str) -> str:
    """What a reader of the page reads."""
    text = html.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.S))
    return "\n".join(filter(None, (" ".join(line.split()) for line in text.splitlines())))


def renamed(found: Record, old: str, new: str) -> Record:
    """The record with an arm called otherwise."""
    return dict(json.loads(json.dumps(found).replace(json.dumps(old), json.dumps(new))))


# The numbers


def test_the_numbers_by_hand() -> None:
    row = table_of(exact_record(TINY)).rows[-1]
    middle = statistics.median(1 + i / 10 for i in range(8) if i != 3)
    found = (row.step_ms, row.samples_per_s, row.cpu_ms, row.data_ms, row.peak_mib)
    # A step, and the samples in its time; CPU time of both ranks; the rank that waits longest.
    assert found == pytest.approx((10 * middle, 6400 / middle, 90 / 3, 0.3, 120))
    assert (row.ratio.value, row.ratio.low, row.ratio.high) == pytest.approx((2, 2, 2))
    assert row.ratio.blocks == 7


def test_numbers_have_three_digits_and_limits_never_cross_one() -> None:
    values = (12.345, 0.08657, 1234.5, 99.96, 0, 1e-7, None, float("nan"))
    assert " ".join(map(figures, values)) == "12.3 0.0866 1230 100 0 0.000000100 – –"
    ratios = Ratio(1.004, 1.0011, 1.008), Ratio(0.021, 0.02, 0.0222), Ratio()
    assert [*map(ratio, ratios)] == ["1.004 [1.001, 1.008]", "0.021 [0.020, 0.022]", "–"]


# What is said


def test_the_fastest_is_named(message: Message) -> None:
    said = [table_of(exact_record(TINY, blocks=5)).headline]
    for times in (
        {"b": 5.0},
        {"b": 5.0, "c": 4.0, "d": 30.0},
        {"b": 5.02, "c": 5.0},
        {"b": 12.0, "c": 13.0},
        {"b": 10.0},
        {"b": 10.0, "c": 12.0},
        {"b": 8.0, "a (repeat)": 11.5},
    ):
        table = table_of(exact_record({"a": 10.0, "a (repeat)": 10.1, **times}))
        said += [table.headline, *table.sentences]
    message("\n".join(said))


def test_whether_the_work_was_equal(message: Message) -> None:
    said = []
    for verdicts in (
        ["bitwise"] * 4,
        ["bitwise", "within tolerance", "bitwise"],
        ["bitwise", "unequal", "not compared"],
        ["bitwise", "bitwise", "not compared"],
        [],
    ):
        found = make_record(0, failed=None)
        found["parity"] = found["parity"][: len(verdicts)]
        for row, verdict in zip(found["parity"], verdicts, strict=True):
            row.update(verdict=verdict, tolerance=1e-4 * (verdict == "within tolerance"))
        table = table_of(found)
        said.append(f"{table.equal}: {table.verdict}")
    message("\n".join(said))


def everything() -> Record:
    """An arm that is faster, one of other work, one that failed, a dropped block, and load."""
    found = make_record(12)
    found["parity"][0]["note"] = "buffers of other ranks differ"
    found["parity"][1].update(verdict="unequal", text="the rate differs", cause="scaled by size")
    found["arms"]["mpi"].update(status="refused", reason="the rate differs; scaled by size")
    found["arms"]["shm"]["command"] = "torchrun shm.py --name 'two words'"
    found["arms"]["shm"]["in_force"] = [{"threads": 2}, {"threads": 2}]
    found["ends"] = [dict.fromkeys(found["arms"], [100, "x"])]
    for block in found["blocks"]:
        block["foreign"] += 0.3
    return found


def without_blocks() -> Record:
    found = make_record(12) | {"outcome": "interrupted", "note": "Ctrl-C, after 12 blocks"}
    for block in found["blocks"]:
        block.update(kept=False, foreign=0.6)
    return found


RECORDS = {
    "everything": everything(),
    "no block counts": without_blocks(),
    "one start": exact_record({**TINY, "c": 20.0, "d": 10.0}),
    "nothing": {"arms": {}, "blocks": []},
    "no blocks": make_record(0),
    "one block": make_record(1),
    "no baseline": make_record(6, failed="a"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_what_a_report_says(name: str, message: Message) -> None:
    """Everything: on the terminal, on the page, for a pull request, and for a sheet."""
    lines = shown(RECORDS[name])
    assert max(map(len, lines)) <= 80
    message("\n".join(lines))
    page, _, *summaries = (html_report.page(table_of(RECORDS[name]), f) for f in html_report.FILES)
    for text in [text_of(page), *summaries] * (name == "everything"):
        message(text)


def test_files_need_nothing_else_and_escape_names() -> None:
    found = renamed(make_record(), "mpi", NASTY)
    found["arms"][FAILED]["reason"] = "<img src=x onerror=alert(1)> & so on"
    page, _, summary, sheet = (html_report.page(table_of(found), f) for f in html_report.FILES)
    assert not {"<script", "<img"} & set(re.findall(r"<\w+", page))
    assert NASTY in html.unescape(page)
    assert NASTY in [row[0] for row in csv.reader(io.StringIO(sheet))]
    assert NASTY.replace("|", r"\|") in summary
    assert page.count("<circle") == 3  # the baseline, and what failed, have no interval
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(link.startswith(("#", "data:")) for link in links), links
    assert max(map(len, shown(renamed(found, NASTY, "a.very.long:" + "Name" * 9)))) <= 80


@pytest.mark.parametrize("is_terminal", [False, True])
def test_what_is_shown_while_it_runs(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the table, in colour; else a line for each phase, and one each minute."""
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    found, out, now_s = parse(make_record(12) | {"outcome": "running"}), io.StringIO(), 0.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    with terminal.ProgressTable(out) as live:
        live.update(found, "warming up: 3 steps")
        for number in range(1, 11):
            live.update(found, f"timing: block {number}")
            now_s += 25.0
        live.update(found, "a:b failed: why")
    said = out.getvalue()
    if is_terminal:
        for text in ("\x1b[34m1.40 [1.25, 1.55] ▲", "\x1b[1mtiming: block 2"):
            assert text in said
        return
    blocks = [f"timing: block {number}" for number in (1, 4, 7, 10)]
    assert said.splitlines() == ["warming up: 3 steps", *blocks, "a:b failed: why"]


# Files


def test_the_command_writes_the_same_files_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = parse(make_record())
    record.write(made, tmp_path)
    html_report.write(table_of(make_record()), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    command.main([str(tmp_path)], standalone_mode=False)
    assert f"report   {tmp_path}/report.html" in capsys.readouterr().out
    command.main([str(tmp_path), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["rows"][1]["arm"] == "shm"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert parse(msgspec.json.decode((tmp_path / record.NAME).read_bytes())) == made


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, message: Message) -> None:
    (tmp_path / "report.html").mkdir()
    with message.raises(InputError):
        html_report.write(table_of({"arms": {}, "blocks": []}), tmp_path)


def test_control_characters_of_a_received_file_are_escaped(tmp_path: Path) -> None:
    received = {**renamed(make_record(), "mpi", "compat\x1b[2J"), "note": "\x9b5n"}
    (tmp_path / record.NAME).write_text(json.dumps(received | {"outcome": "failed"}))
    said = "\n".join(shown(msgspec.to_builtins(record.read(tmp_path))))
    assert not {"\x1b", "\x9b"} & set(said)
    assert "\\x1b[2J" in said
    assert "\\x9b5n" in said


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "[1, 2]",
        '{"schema": 2}',
        '{"schema": 1}',
        '{"schema": 1, "arms": {"a": 3}, "blocks": [1]}',
    ],
)
def test_a_record_that_cannot_be_used_is_one_line(
    tmp_path: Path, message: Message, content: str | None
) -> None:
    if content is not None:
        (tmp_path / record.NAME).write_text(content)
    with message.raises(InputError) as caught:
        command.main([str(tmp_path)], standalone_mode=False)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()
