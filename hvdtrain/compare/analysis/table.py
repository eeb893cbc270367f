"""`make_table`: every displayed number and sentence of a comparison, from its record alone.

The terminal, the page, the gate and the manual take its rows. The comparison may still be running,
or may have been interrupted or failed: what is missing becomes None or an empty list.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.analysis.stats import Ratio
from hvdtrain.compare.compare_options import CompareOptions
from hvdtrain.compare.formatting import count, percent, relative, times_as_fast
from hvdtrain.compare.record import ArmRecord, ArmTimes, ParityRow, Record

LOADED = 0.2
"""A share of the cores: `_caution` warns if others took at least this in half of the blocks."""


@dataclass(frozen=True)
class SpeedRow:
    """The speed of one arm; None where it was not measured."""

    arm: str
    role: str
    status: str
    reason: str | None
    log: str | None
    ratio: Ratio
    """Against the baseline."""
    verdict: str
    """That of `stats.verdict`, or "baseline"."""
    step_ms: float | None
    """The median over blocks of the mean step of the slowest rank."""
    samples_per_s: float | None
    data_ms: float | None
    """The part of a step before the script calls its model: it waits for data then."""
    cpu_ms: float | None
    """CPU time of a step, of all ranks together."""
    peak_mib: float | None

    @property
    def is_shown(self) -> bool:
        """Whether the arm has figures to show: not if it failed or was refused."""
        return self.step_ms is not None and self.status not in ("failed", "refused")


@dataclass(frozen=True)
class Table:
    """Everything that a report shows: `hvdtrain report --json` prints it."""

    title: str
    equal: bool | None
    """Whether all arms did the same work; None if that is not known of all."""
    verdict: str
    """The same in words."""
    headline: str
    """Which command is the fastest; "" if nothing was timed."""
    sentences: list[str]
    """What the numbers do not show, such as why an arm failed or did different work."""
    rows: list[SpeedRow]
    noise: float | None
    """The A/A spread."""
    caution: str
    outcome: str
    note: str | None
    parity: list[ParityRow]
    commands: list[tuple[str, str]]
    conditions: list[tuple[str, str]]


def make_table(record: Record) -> Table:
    """Return everything that a report shows. The record is not changed."""
    base, arms = record.arm_of("baseline"), record.arms
    blocks = {
        name: {block.index: block.arms[name] for block in record.kept_blocks if name in block.arms}
        for name in arms
    }
    ms = {
        name: {i: stats.block_ms(b.step_ms) for i, b in own.items()} for name, own in blocks.items()
    }
    start_of = {block.index: block.generation or 0 for block in record.blocks}
    ratios = {name: stats.ratio(ms.get(base, {}), own, start_of) for name, own in ms.items()}
    again = record.arm_of("again")
    noise = ratios.get(again, Ratio()).spread
    differ = stats.significant({n: ratios[n] for n, arm in arms.items() if arm.role == "arm"})
    differ |= stats.significant({again: ratios[again]}) if again else set()
    rows = [
        _row(arm, ratios[name], stats.verdict(ratios[name], name in differ, noise), blocks[name])
        for name, arm in arms.items()
    ]
    ranks = max((arm.ranks for arm in arms.values()), default=0)
    equal, verdict = _verdict(record)
    return Table(
        title=f"{count(len(arms) - bool(again), 'command')} on {count(ranks, 'rank')}",
        equal=equal,
        verdict=verdict,
        headline=_headline(rows, base, ms, start_of, noise),
        sentences=list(dict.fromkeys(_sentences(record, rows, base, noise))),
        rows=rows,
        noise=noise,
        caution=_caution(record),
        outcome=record.outcome,
        note=record.note,
        parity=record.parity,
        commands=[(name, arm.command) for name, arm in arms.items() if arm.role != "again"],
        conditions=list(_conditions(record)),
    )


def _row(arm: ArmRecord, ratio: Ratio, verdict: str, blocks: dict[int, ArmTimes]) -> SpeedRow:
    times = blocks.values()
    step_ms = stats.median(stats.block_ms(block.step_ms) for block in times)
    steps = sum(len(block.step_ms[0]) for block in times if block.step_ms)
    cpu_s = sum(sum(block.cpu_s) for block in times)
    samples = arm.samples_per_step
    return SpeedRow(
        arm=arm.name,
        role=arm.role,
        status=arm.status,
        reason=arm.reason,
        log=arm.log,
        ratio=ratio,
        verdict="baseline" if arm.role == "baseline" else verdict,
        step_ms=step_ms,
        samples_per_s=1000 * samples / step_ms if samples and step_ms else None,
        data_ms=stats.median(stats.block_ms(block.input_ms) for block in times),
        cpu_ms=1000 * cpu_s / steps if cpu_s and steps else None,
        peak_mib=max(arm.peak_mib, default=None),
    )


def _headline(
    rows: list[SpeedRow],
    base: str,
    ms: Mapping[str, Mapping[int, float]],
    start_of: Mapping[int, int],
    noise: float | None,
) -> str:
    """Return which command is the fastest, and whether it differs from the second."""
    rivals = [row for row in rows if row.is_shown and row.role == "arm"]
    if not rivals:
        return ""
    if noise is None or any(row.verdict == "unknown" for row in rivals):
        return "No verdict on speed: fewer than 6 blocks count; give a longer --budget."
    rivals.sort(key=lambda row: (row.verdict == "faster", row.ratio.value), reverse=True)
    best, text = rivals[0], times_as_fast(rivals[0].ratio, base)
    same = [row.ratio.spread or 0.0 for row in rivals if row.verdict == "same"]
    if best.verdict == "faster":
        for second in [row for row in rivals if row.verdict != "slower"][1:2]:
            found = stats.ratio(ms[second.arm], ms[best.arm], start_of)
            if stats.verdict(found, (found.p or 1.0) <= 1 - stats.LEVEL, noise) == "faster":
                text += f", and {times_as_fast(found, second.arm)}"
            else:
                text += f"; no difference from {second.arm} is measurable: "
                text += _within(noise, found.spread or 0.0)
        return f"{best.arm} is {text}."
    if not same:
        return f"{base} is the fastest: {best.arm} is {text}."
    what = f"No command is measurably faster than {base}"
    if len(same) == len(rivals):
        what = "No difference is measurable"
    return f"{what}: {_within(noise, *same)}."


def _within(*spreads: float) -> str:
    """Return how large a difference may be that is not measurable."""
    widest = max(spreads)
    return f"within {percent(widest)}" + "; give a longer --budget" * (widest > 0.5)


def _sentences(
    record: Record, rows: Iterable[SpeedRow], base: str, noise: float | None
) -> Iterator[str]:
    """Yield what differs in an arm's work, why it has no numbers, and that a repeat differs."""
    unequal = {row.arm: row for row in record.parity if row.verdict == "unequal"}
    for name, parity in unequal.items():
        cause = f"; likely cause: {parity.cause}" if parity.cause else ""
        yield f"{name}: {parity.text}{cause}"
    for parity in record.parity:
        if text := parity.text if parity.verdict == "not compared" else parity.note:
            yield text
    for row in rows:
        if row.status == "failed" or (row.status == "refused" and row.arm not in unequal):
            yield f"{row.arm} {row.status}: {row.reason or 'the reason is unknown'}"
        elif row.role == "again" and row.ratio.p is not None and row.ratio.p <= 0.05:
            yield (
                f"{row.arm} is the same command as {base}, yet {times_as_fast(row.ratio, base)}: "
                f"something favours one of them; ignore differences below {percent(noise)}"
            )


def _verdict(record: Record) -> tuple[bool | None, str]:
    """Return whether all arms did the same work, from the parity check and how each arm ended."""
    verdicts = {row.arm: row.verdict for row in record.parity}
    # Every arm is in exactly one of these, except a baseline that did not fail.
    groups: dict[str, list[str]] = defaultdict(list)
    for name, arm in record.arms.items():
        verdict = verdicts.get(name)
        if arm.status == "refused" or verdict == "unequal":
            groups["unequal"].append(name)
        elif arm.status == "failed":
            groups["failed"].append(name)
        elif arm.role == "baseline" or verdict in ("bitwise", "within tolerance"):
            groups["equal"].append(name)
        else:
            groups["not compared"].append(name)
    if groups["unequal"]:
        return False, f"not the same training: {', '.join(groups['unequal'])}"
    equal = [name for name in groups["equal"] if name in verdicts]
    if not equal:
        return None, "nothing was compared"
    how = "bitwise equal"
    if allowed := max(row.tolerance or 0.0 for row in record.parity if row.arm in equal):
        how = f"equal within {relative(allowed)}"
    others = ("failed", "not compared")
    rest = "".join(f"; {word}: {', '.join(groups[word])}" for word in others if groups[word])
    num_equal = sum(record.arms[name].role != "again" for name in groups["equal"])
    who = f"{num_equal}" if rest else "both" if num_equal == 2 else f"all {num_equal}"
    text = f"{who} trained the same: parameters {how} after "
    text += f"{record.config.get('proof_steps')} steps"
    base = record.arm_of("baseline")
    ends = [end for end in record.ends if base in end]
    if same := [end[base] for end in ends if all(end.get(name) == end[base] for name in equal)]:
        text += f", still bitwise equal after {max(same)[0]}"
    return (None if rest else True), text + rest


def _caution(record: Record) -> str:
    """Return a caveat on figures from one start, under load, or without some blocks."""
    kept = [block.load for block in record.kept_blocks]
    notes = []
    if len({block.generation for block in record.kept_blocks}) == 1:
        notes.append(
            f"{count(len(kept), 'block')} of one start: another start of the same command can "
            "differ by some percent, and the intervals do not show that; a longer --budget starts "
            "each command several times."
        )
    if dropped := [block.load for block in record.blocks if not block.kept]:
        notes.append(
            f"Dropped {len(dropped)} of {count(len(record.blocks), 'block')}: other processes used "
            f"up to {percent(max(dropped))} of the cores, and --max-foreign allows "
            f"{percent(record.config.get('max_foreign'))}; stop them, or allow more and distrust "
            "small differences."
        )
    if kept and (np.median(kept) >= LOADED or max(kept) > CompareOptions.max_foreign):
        notes.append(
            f"Measured under load: other processes used {percent(float(np.median(kept)))} of the "
            f"cores (median; at most {percent(max(kept))}) and may cause differences."
        )
    return " ".join(notes)


_OF_ARMS = "samples_per_step parameters gradient_bytes lr engine threads affinity"


def _conditions(record: Record) -> Iterator[tuple[str, str]]:
    """Yield names and values of the conditions that are recorded, the most relevant first."""
    rows: dict[str, Any] = {
        "measured": f"{record.started} to {record.ended}",
        "command": shlex.join(record.command),
        "timed blocks": f"{len(record.blocks)}; {len(record.kept_blocks)} count",
        **{name: _per_arm(record, name) for name in _OF_ARMS.split()},
        **record.config,
        **vars(record.machine),
        "commit": record.commit,
        **record.versions,
    }
    own = {name.replace("_", " "): value for name, value in rows.items()}
    for name, value in {**own, **record.environment}.items():
        if value not in (None, "", [], False):
            yield name, str(value)


def _per_arm(record: Record, name: str) -> str:
    """Return the value that all arms share, else each value with its arms. None is left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for arm in record.arms.values():
        value = getattr(arm, name, arm.describe.get(name))
        if name in ("threads", "affinity"):  # as found in the ranks: one for each if they differ
            values = [str(getattr(rank, name)) for rank in arm.in_force]
            value = ", ".join(values[:1] if len(set(values)) == 1 else values)
        if value not in (None, "", []):
            found[str(value)].append(arm.name)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{value} ({', '.join(names)})" for value, names in found.items())
