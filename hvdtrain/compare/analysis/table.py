"""`make_table`: every displayed number and sentence of a comparison, from its record alone.

The terminal, the page, the gate and the manual take its rows. The comparison may still be running,
or may have been interrupted or failed: what is missing becomes None or an empty list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.analysis.stats import Ratio
from hvdtrain.compare.compare_options import CompareOptions
from hvdtrain.compare.formatting import count, percent, times_as_fast
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
    sentences: list[str]
    rows: list[SpeedRow]
    noise: float | None
    """The A/A spread."""
    caution: str | None
    outcome: str
    note: str | None
    parity: list[ParityRow]
    commands: list[tuple[str, str]]
    conditions: list[tuple[str, str]]
    threads: str
    """CPU threads of the ranks, as found there; all in one line."""
    kept: int
    """How many blocks count."""


def make_table(record: Record) -> Table:
    """Return everything that a report shows. The record is not changed."""
    base, arms = record.arm_of("baseline"), record.arms
    blocks: dict[str, dict[int, ArmTimes]] = {name: {} for name in arms}
    for block in record.kept_blocks:
        for name, times in block.arms.items():
            blocks[name][block.index] = times
    ms = {
        name: {i: stats.block_ms(b.step_ms) for i, b in own.items()} for name, own in blocks.items()
    }
    start_of = {block.index: block.generation or 0 for block in record.blocks}
    ratios = {name: stats.ratio(ms.get(base, {}), own, start_of) for name, own in ms.items()}
    again = record.arm_of("again")
    noise = ratios[again].spread if again else None
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
        sentences=list(_sentences(record, rows, base, noise)),
        rows=rows,
        noise=noise,
        caution=_caution(record),
        outcome=record.outcome,
        note=record.note,
        parity=record.parity,
        commands=[(name, arm.command) for name, arm in arms.items() if arm.role != "again"],
        conditions=list(_conditions(record)),
        threads=_per_arm(record, "threads"),
        kept=len(record.kept_blocks),
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


def _sentences(
    record: Record, rows: Iterable[SpeedRow], base: str, noise: float | None
) -> Iterator[str]:
    """Yield a sentence for each arm: its speed against the baseline, or why it failed. There is
    none on arms that do other work: `parity` says so.
    """
    unequal = {row.arm for row in record.parity if row.verdict == "unequal"}
    for row in rows:
        name, found = row.arm, row.ratio
        said = times_as_fast(found)
        if row.status in ("failed", "refused"):
            if not (row.status == "refused" and name in unequal):
                yield f"{name} {row.status}: {row.reason or 'no reason is known'}"
        elif row.role == "baseline" or not record.kept_blocks:
            continue
        elif row.verdict == "unknown":
            few = f"not enough blocks ({found.blocks}, or fewer of the repeat) to tell"
            yield f"{name} against {base}: {few}"
        elif row.role == "again" and found.p is not None and found.p <= 0.05:
            yield (
                f"{name} is the same command as {base}, and yet {said} as fast: something favoured "
                f"one of them, so no difference below {percent(noise)} means anything"
            )
        elif row.verdict == "same":
            yield (
                f"{name} and {base}: no significant difference ({said}; the baseline differs from "
                f"itself by up to {percent(noise)})"
            )
        else:
            yield f"{name} is {'slower: ' * (row.verdict == 'slower')}{said} as fast as {base}"


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
        return None, "not proved: nothing was compared"
    how = "bitwise equal"
    if allowed := max(row.tolerance or 0.0 for row in record.parity if row.arm in equal):
        how = f"equal within {allowed:.0%}" if allowed >= 0.01 else f"equal within {allowed:.0e}"
    rest = [(word, groups[word]) for word in ("failed", "not compared") if groups[word]]
    num_equal = sum(record.arms[name].role != "again" for name in groups["equal"])
    text = "all " * (not rest) + f"{num_equal} trained the same: parameters {how} after "
    text += f"{record.config.get('proof_steps')} steps"
    base = record.arm_of("baseline")
    known = [ends for ends in record.ends if base in ends]
    same = [ends for ends in known if all(ends.get(name) == ends[base] for name in equal)]
    if same:
        text += f", still bitwise equal after {max(ends[base][0] for ends in same)}"
    text += "".join(f"; {word}: {', '.join(names)}" for word, names in rest)
    return (None if rest else True), text


def _caution(record: Record) -> str | None:
    """Return a caveat on figures from one start, or under load; else None."""
    kept = record.kept_blocks
    notes = []
    starts = len({block.generation for block in kept})
    if starts == 1:
        notes.append(
            f"From {count(len(kept), 'block')} of one start: the next start of a program can be "
            "faster by some percent, and no interval shows that; a longer --budget has several"
        )
    if dropped := why_dropped(record):
        notes.append(dropped)
    others = [block.load for block in kept]
    if others and (np.median(others) >= LOADED or max(others) > CompareOptions.max_foreign):
        notes.append(
            f"Measured under load: in the blocks that count others took {np.median(others):.0%} of "
            f"the cores (median; at most {max(others):.0%}), and a difference may be theirs"
        )
    return ". ".join(notes) + "." if notes else None


def why_dropped(record: Record) -> str:
    """Return how many blocks do not count and why, and what to do; "" if all count."""
    others = [block.load for block in record.blocks if not block.kept]
    if not others:
        return ""
    return (
        f"{len(others)} of {count(len(record.blocks), 'block')} do not count, since others took "
        f"{min(others):.1%} to {max(others):.1%} of the cores and --max-foreign allows "
        f"{record.config.get('max_foreign') or 0:.0%}; end what else runs here, or allow more and "
        "mistrust small differences"
    )


_OF_ARMS = "samples_per_step parameters gradient_bytes lr engine threads affinity"


def _conditions(record: Record) -> Iterator[tuple[str, str]]:
    """Yield names and values of the conditions that are recorded, the most relevant first."""
    rows: dict[str, Any] = {
        "measured": f"{record.started} to {record.ended}",
        "command": " ".join(record.command),
        "blocks": f"{len(record.blocks)}, of which {len(record.kept_blocks)} count",
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
