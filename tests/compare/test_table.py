"""The table by hand, and what the terminal, the page and `hvdtrain report` make of it."""

from __future__ import annotations

import html
import io
import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hvdtrain.cli.report import command
from hvdtrain.compare import formatting, record
from hvdtrain.compare.analysis.stats import Ratio
from hvdtrain.compare.record import parse
from hvdtrain.compare.report import html_report, terminal
from hvdtrain.errors import InputError
from tests.compare.records import FAILED, Record, exact_record, make_record, rows_of, table_of
from tests.messages import Message

TINY = {"a": 10.0, "a (repeat)": 10.0, "b": 5.0}
NASTY = "x</script><script>alert(1)</script>&\"'"


def shown(found: Record, width: int = 80) -> list[str]:
    """The lines on a terminal."""
    out = io.StringIO()
    terminal.show(table_of(found), out, width=width)
    return out.getvalue().splitlines()


def page_of(found: Record) -> str:
    return html_report.page(table_of(found))


def text_of(page: str) -> str:
    """What a reader reads, in one line."""
    text = re.sub(r"<style>.*?</style>", "", page, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", text)))


def renamed(found: Record, old: str, new: str) -> Record:
    """The record with an arm called otherwise."""
    return dict(json.loads(json.dumps(found).replace(json.dumps(old), json.dumps(new))))


# The numbers


def test_the_numbers_by_hand() -> None:
    row = rows_of(exact_record(TINY))["b"]
    drifts = [1 + i / 10 for i in range(8) if i != 3]
    middle = statistics.median(drifts)
    assert row.ratio.blocks == 7
    assert row.step_ms == pytest.approx(5 * 6 / 3 * middle)
    assert row.samples_per_s == pytest.approx(64_000 / (10 * middle))  # one figure with the step
    assert (row.ratio.value, row.ratio.low, row.ratio.high) == pytest.approx((2, 2, 2))
    assert row.cpu_ms == pytest.approx(90 / 3)
    assert row.peak_mib == 120.0
    assert row.data_ms == pytest.approx(0.3)


def test_what_one_step_in_four_pays_is_seen() -> None:
    """A median step would call 10, 10, 10, 50 ms twice as fast as 20 ms."""
    found = exact_record(TINY | {"b": 1.0})
    for block in found["blocks"]:
        block["arms"]["b"]["step_ms"] = [[10.0, 10.0, 10.0, 50.0]] * 2
        for name in ("a", "a (repeat)"):
            block["arms"][name]["step_ms"] = [[20.0] * 4] * 2
    assert rows_of(found)["b"].verdict == "same"


def test_verdicts_and_sentences() -> None:
    table = table_of(exact_record({**TINY, "c": 20.0}))
    assert {row.arm: row.verdict for row in table.rows} == {
        "a": "baseline",
        "a (repeat)": "same",
        "b": "faster",
        "c": "slower",
    }
    assert table.noise == pytest.approx(0)
    assert "b is 2.00x [2.00, 2.00] as fast as a" in table.sentences
    assert "c is slower: 0.50x [0.50, 0.50] as fast as a" in table.sentences
    uneven = table_of(exact_record({**TINY, "a (repeat)": 11.5}))
    assert uneven.sentences[0].startswith("a (repeat) is the same command as a, and yet 0.87x")
    few = table_of(exact_record(TINY, blocks=5))
    assert "b against a: not enough blocks (4, or fewer of the repeat) to tell" in few.sentences


@pytest.mark.parametrize(
    ("verdicts", "equal", "text"),
    [
        (["bitwise"] * 3, True, "all 4 trained the same: parameters bitwise equal after 20 steps"),
        (["bitwise", "within tolerance"], True, "equal within 1e-04 after 20 steps"),
        (["bitwise", "unequal", "not compared"], False, "not the same training: arm1"),
        (["bitwise", "bitwise", "not compared"], None, "not compared: arm2"),
        ([], None, "not proved: nothing was compared"),
    ],
)
def test_whether_the_work_was_equal(verdicts: list[str], equal: bool | None, text: str) -> None:
    arms = {f"arm{i}": {"name": f"arm{i}", "status": "measured"} for i in range(len(verdicts))}
    rows = [
        {"arm": arm, "verdict": v, "tolerance": 1e-4 * (v == "within tolerance")}
        for arm, v in zip(arms, verdicts, strict=True)
    ]
    base = {"name": "base", "role": "baseline", "status": "measured"}
    head = exact_record({}) | {"arms": {"base": base, **arms}, "parity": rows, "blocks": []}
    found = table_of(head)
    assert found.equal is equal
    assert text in found.verdict


def test_cautions() -> None:
    assert "From 7 blocks of one start" in (table_of(exact_record(TINY)).caution or "")
    assert "one start" not in (table_of(exact_record(TINY, starts=2)).caution or "")
    found = make_record()
    for block in found["blocks"]:
        block["foreign"] = 0.4
    assert "Measured under load" in (table_of(found).caution or "")


# Where they are shown


def usual(found: Record) -> None:
    pass


def partial(found: Record) -> None:
    found.update(outcome="interrupted", note="the machine <went> away")


def unequal(found: Record) -> None:
    found["parity"][1].update(verdict="unequal", text="the rate differs", cause="scaled by size")
    found["arms"]["mpi"].update(status="refused", reason="the rate differs; scaled by size")


def other_settings(found: Record) -> None:
    found["parity"][1].update(note="buffers of other ranks differ")
    found["arms"]["shm"]["in_force"] = [{"threads": 2}, {"threads": 2}]
    found["ends"] = [dict.fromkeys(found["arms"], [100, "x"])]


def without_blocks(found: Record) -> None:
    for block in found["blocks"]:
        block.update(kept=False, foreign=0.6)


@pytest.mark.parametrize(
    "change", [usual, partial, unequal, other_settings, without_blocks], ids=lambda f: f.__name__
)
def test_what_terminal_and_page_say(change: Callable[[Record], None], message: Message) -> None:
    """As tests/messages.txt has it, for a person to read."""
    found = make_record(12)
    change(found)
    lines = shown(found)
    assert max(map(len, lines)) <= 80
    if change in (usual, unequal):
        lines += textwrap.wrap(text_of(page_of(found)), 100)
    message("\n".join(line.rstrip() for line in lines if line))


def test_the_page_needs_nothing_else_and_escapes_names() -> None:
    found = renamed(make_record(), "mpi", NASTY)
    found["arms"][FAILED]["reason"] = "<img src=x onerror=alert(1)> & so on"
    page = page_of(found)
    assert "<script" not in page
    assert "<img" not in page
    assert NASTY in html.unescape(page)
    assert page.count("<circle") == 3  # the baseline, and what failed, have no interval
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(link.startswith(("#", "data:")) for link in links), links
    assert max(map(len, shown(renamed(found, NASTY, "a.very.long:" + "Name" * 9)))) <= 80


def test_rounding_never_moves_a_limit_across_one() -> None:
    """A difference that was found is not printed with an interval that seems to hold 1."""
    assert formatting.ratio(Ratio(1.004, 1.0011, 1.008)) == "1.004 [1.001, 1.008]"
    assert formatting.ratio(Ratio(0.021, 0.02, 0.0222)) == "0.021 [0.020, 0.022]"
    assert formatting.ratio(Ratio()) == formatting.NOTHING


@pytest.mark.parametrize(
    ("value", "said"),
    [(12.345, "12.3"), (0.08657, "0.0866"), (1234.5, "1230"), (99.96, "100"), (0, "0")]
    + [(None, "–"), (math.nan, "–"), (1e-7, "0.000000100")],
)
def test_numbers_have_three_digits_and_no_exponent(value: float | None, said: str) -> None:
    assert formatting.figures(value) == said


@pytest.mark.parametrize(
    "found",
    [{"arms": {}, "blocks": []}, make_record(0), make_record(1), make_record(6, failed="a")],
    ids=["nothing", "no blocks", "one block", "no baseline"],
)
def test_whatever_there_is_is_reported(found: Record, tmp_path: Path) -> None:
    page = html_report.write(table_of(found), tmp_path).read_text()
    assert all(name in html.unescape(page) for name in found["arms"])
    shown(found)


def test_without_a_terminal_the_live_table_is_plain_lines() -> None:
    found, out = make_record(blocks=10), io.StringIO()
    so_far = parse(found | {"blocks": []})
    with terminal.ProgressTable(out) as live:
        for block in parse(found).blocks:
            so_far.blocks.append(block)
            live.update(so_far, f"block {block.index + 1}")
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert lines == [f"block {number}" for number in range(1, 11)]


# Files


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_writes_the_same_page_again(
    as_json: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = parse(make_record())
    record.write(made, tmp_path)
    before = html_report.write(table_of(make_record()), tmp_path).read_bytes()
    command.main([str(tmp_path), *["--json"] * as_json], standalone_mode=False)
    assert (tmp_path / "report.html").read_bytes() == before
    assert parse(msgspec.json.decode((tmp_path / record.NAME).read_bytes())) == made
    said = capsys.readouterr().out
    if as_json:
        assert json.loads(said)["rows"][1]["arm"] == "shm"
    else:
        assert f"report   {tmp_path}/report.html" in said


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(InputError, match=re.escape(str(tmp_path))):
        html_report.write(table_of({"arms": {}, "blocks": []}), tmp_path)


def test_control_characters_of_a_received_file_are_escaped(tmp_path: Path) -> None:
    received = {**renamed(make_record(), "mpi", "compat\x1b[2J"), "note": "\x9b5n"}
    (tmp_path / record.NAME).write_text(json.dumps(received | {"outcome": "failed"}))
    said = "\n".join(shown(msgspec.to_builtins(record.read(tmp_path))))
    assert not {"\x1b", "\x9b"} & set(said)
    assert "\\x1b[2J" in said
    assert "\\x9b5n" in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no comparison in"),
        ("", "is damaged"),
        ("[1, 2]", "has schema None"),
        ('{"schema": 2}', "has schema 2; this hvdtrain reads 1"),
        ('{"schema": 1}', "is damaged, or no comparison: Object missing required field `arms`"),
        ('{"schema": 1, "arms": {"a": 3}, "blocks": [1]}', "got `int` - at `$.arms[...]`"),
    ],
)
def test_a_record_that_cannot_be_used_is_one_line(
    content: str | None, said: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / record.NAME).write_text(content)
    with pytest.raises(InputError) as caught:
        command.main([str(tmp_path)], standalone_mode=False)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()
