"""`summarise`: every displayed number of a comparison, computed from its record alone.

`report`, `plots` and `table` display it. The comparison may still be running, or may have been
interrupted or failed: missing data becomes None or an empty list, never an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.compare.analysis import breakdown as where
from hvdtrain.compare.analysis import speed, stats
from hvdtrain.compare.analysis.conditions import environment_rows
from hvdtrain.compare.analysis.efficiency import efficiency_rows, prediction
from hvdtrain.compare.analysis.speed import Measured, number
from hvdtrain.compare.compare_options import CompareOptions
from hvdtrain.compare.formatting import count
from hvdtrain.compare.record import base_of
from hvdtrain.compare.run import cpu_load as load

Json = dict[str, Any]


def summarise(record: Json) -> Json:
    """Return everything that a report shows, ready for JSON. The record is not changed."""
    measured = Measured(record)
    return {
        "title": _title(record),
        "outcome": record.get("outcome") or "running",
        "note": record.get("note"),
        "when": record.get("started"),
        "ended": record.get("ended"),
        "command": " ".join(record.get("command") or []),
        "commit": record.get("commit"),
        "baseline": record.get("baseline"),
        "verdict": _verdict(record),
        "caution": _caution(record),
        "parity": [_copied(row, _PARITY) for row in record.get("parity") or []],
        "aa": speed.again_rows(measured),
        "speed": speed.speed_rows(measured),
        "ideal": speed.ideal_rows(measured),
        "sentences": speed.sentences(measured),
        "phases": where.phase_rows(record, measured),
        "scaling": efficiency_rows(record, measured),
        "prediction": prediction(record, measured),
        "tuning": _tuning(record),
        "load": _load(record),
        "environment": environment_rows(record),
    }


_PARITY = ("arm", "verdict", "text", "difference", "tolerance", "cause", "row")


def _copied(row: Json, names: tuple[str, ...]) -> Json:
    return {name: row.get(name) for name in names}


def _title(record: Json) -> str:
    config = record.get("config") or {}
    sizes = config.get("ranks") or []
    ranks = ", ".join(map(str, sizes)) + (" rank" if sizes == [1] else " ranks")
    return f"{config.get('task') or 'a task'}, {ranks if sizes else 'no ranks'} on 1 host"


def _verdict(record: Json) -> Json:
    """Return whether all arms did the same work. None: not known yet, or not of all arms."""
    arms: dict[str, Json] = {  # the ceiling does other work by design
        key: arm for key, arm in (record.get("arms") or {}).items() if arm.get("role") != "ceiling"
    }
    rows = {row["arm"]: row for row in record.get("parity") or []}
    # Every arm is in exactly one of these, except a baseline that did not fail.
    equal: list[str] = []
    unequal: list[str] = []
    failed: list[str] = []
    unknown: list[str] = []
    bases = 0  # one for each world size
    for key, arm in arms.items():
        verdict = (rows.get(key) or {}).get("verdict")
        if arm.get("status") == "refused" or verdict == "unequal":
            unequal.append(key)
        elif arm.get("role") == "baseline" and arm.get("status") != "failed":
            bases += 1  # the reference of the other arms
        elif verdict in ("bitwise", "within tolerance"):
            equal.append(key)
        else:
            (failed if arm.get("status") == "failed" else unknown).append(key)
    if unequal:
        return {"equal": False, "text": f"unequal work: {', '.join(unequal)}"}
    if not equal:
        return {"equal": None, "text": "not proved: nothing was compared"}
    bitwise = all(rows[key]["verdict"] == "bitwise" for key in equal)
    how = "bitwise equal" if bitwise else "equal within the tolerance"
    text = f"{len(equal) + bases} arms did the same work: parameters {how} after "
    text += f"{(record.get('config') or {}).get('proof_steps')} steps"
    if later := _later(record, equal):
        text += f", bitwise again after {later}"
    text = text if unknown or failed else f"all {text}"
    text += f"; failed before: {', '.join(failed)}" if failed else ""
    text += f"; not compared: {', '.join(unknown)}" if unknown else ""
    return {"equal": None if unknown else True, "text": text}


def _later(record: Json, equal: list[str]) -> int | None:
    """Return the most steps after which all these arms had the parameters of their baselines."""
    arms, found = record.get("arms") or {}, []
    for ends in record.get("ends") or []:
        ended = [key for key in equal if key in ends]
        same = all(ends[key] == ends.get(base_of(arms, key)) for key in ended)
        if same and set(ended) == set(equal):
            found.append(min(ends[key][0] for key in ended))
    return max(found, default=None)


FEW_BLOCKS = 15
LOADED = 0.2
"""A share of the cores: `_caution` warns if others took at least this in half of the blocks."""


def _caution(record: Json) -> str | None:
    """Return a caveat on figures from few blocks, from one start, or under load; else None."""
    every = record.get("blocks") or []
    kept = [block for block in every if block.get("kept", True)]
    dropped = [block for block in every if not block.get("kept", True)]
    blocks, starts = len(kept), len({block.get("generation") for block in kept})
    if not blocks:
        return None
    said, limit = [], (record.get("config") or {}).get("max_foreign")
    if blocks < FEW_BLOCKS or starts == 1 or dropped:
        text = f"From {count(blocks, 'block')} of {count(starts, 'start')}"
        if starts == 1:
            text += ": one start of a program can be faster than the next by some percent, as long "
            text += "as it lives, and no interval shows that; a longer --budget has several"
        said.append(text)
    if dropped:
        more = f"{count(len(dropped), 'more block was', 'more blocks were')} dropped"
        said.append(f"{more}, {load.why_dropped(dropped, limit)}")
    taken = load.shares(kept)
    if taken and (np.median(taken) >= LOADED or max(taken) > CompareOptions.max_foreign):
        text = "Measured under load: in the blocks that count others took "
        text += f"{100 * np.median(taken):.0f} % of the cores (median; at most "
        said.append(f"{text}{100 * max(taken):.0f} %), and a difference between arms may be theirs")
    return ". ".join(said) + "." if said else None


def _tuning(record: Json) -> list[Json]:
    rows = []
    for name, found in (record.get("tuning") or {}).items():
        candidates = [
            {
                "settings": candidate.get("settings"),
                "step_ms": number(stats.interval(candidate.get("step_ms") or []).median),
                "chosen": candidate.get("settings") == found.get("chosen"),
                "reason": candidate.get("reason"),
            }
            for candidate in found.get("candidates") or []
        ]
        rows.append({"arm": name, "budget": found.get("budget"), "candidates": candidates})
    return rows


def _load(record: Json) -> Json:
    blocks = record.get("blocks") or []
    # The rule uses the load of whole blocks. Older records have only that of each arm's window.
    windows = [
        window
        for block in blocks
        for window in ([block] if "foreign" in block else (block.get("arms") or {}).values())
    ]
    foreign = [w["foreign"] for w in windows if w.get("foreign") is not None]
    steal = [w["steal"] for w in windows if w.get("steal") is not None]
    limit = (record.get("config") or {}).get("max_foreign")
    machine = record.get("machine") or {}
    rule = "no rule was set: all blocks are kept"
    if limit is not None:
        rule = (
            "blocks during which other processes, and the host of a virtual machine, took over "
            f"{100 * limit:.0f} % of the cores are dropped (--max-foreign)"
        )
        if windows and not foreign:
            rule += "; this machine does not say, so none was"
    return {
        "blocks_measured": len(blocks),
        "blocks_kept": sum(bool(block.get("kept", True)) for block in blocks),
        "rule": rule,
        "dropped": [
            {"block": block.get("index"), "reason": block.get("dropped")}
            for block in blocks
            if not block.get("kept", True)
        ],
        "foreign_median": number(float(np.median(foreign))) if foreign else None,
        "foreign_max": max(foreign, default=None),
        "steal_max": max(steal, default=None),
        "load_before": machine.get("load_before"),
        "load_after": machine.get("load_after"),
    }
