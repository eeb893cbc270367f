"""`summarise`: every displayed number of a comparison, computed from its record alone.

`report` displays it. The comparison may still be running, or may have been interrupted or failed:
missing data becomes None or an empty list, never an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.compare.analysis import speed
from hvdtrain.compare.analysis.conditions import condition_rows
from hvdtrain.compare.analysis.efficiency import EfficiencyRow, efficiency_rows
from hvdtrain.compare.analysis.foreign_load import LoadSummary, caution, load_summary
from hvdtrain.compare.analysis.speed import AgainRow, Measurements, SpeedRow
from hvdtrain.compare.formatting import count
from hvdtrain.compare.record import ParityRow, Record


@dataclass(frozen=True)
class WorkVerdict:
    """Whether all arms did the same work. None: not known yet, or not of all arms."""

    equal: bool | None
    text: str


@dataclass(frozen=True)
class Summary:
    """Everything that a report shows: `hvdtrain report --json` prints it."""

    title: str
    outcome: str
    note: str | None
    when: str | None
    ended: str | None
    command: str
    commit: str | None
    baseline: str | None
    verdict: WorkVerdict
    caution: str | None
    parity: list[ParityRow]
    aa: list[AgainRow]
    speed: list[SpeedRow]
    sentences: list[str]
    scaling: list[EfficiencyRow]
    load: LoadSummary
    environment: list[tuple[str, str]]


def summarise(record: Record) -> Summary:
    """Return everything that a report shows. The record is not changed."""
    measured = Measurements(record)
    sizes = record.config.ranks
    ranks = "1 rank" if sizes == [1] else f"{', '.join(map(str, sizes)) or 'no'} ranks"
    hosts = count(record.config.num_hosts, "host")
    return Summary(
        title=f"{record.config.task or 'commands'}, {ranks} on {hosts}",
        outcome=record.outcome,
        note=record.note,
        when=record.started,
        ended=record.ended,
        command=" ".join(record.command),
        commit=record.commit,
        baseline=record.baseline,
        verdict=_verdict(record),
        caution=caution(record),
        parity=record.parity,
        aa=speed.again_rows(measured),
        speed=speed.speed_rows(measured),
        sentences=speed.sentences(measured),
        scaling=efficiency_rows(record.config.scaling, measured),
        load=load_summary(record),
        environment=condition_rows(record),
    )


def _verdict(record: Record) -> WorkVerdict:
    """Return whether all arms did the same work, from the parity check and how each arm ended."""
    verdicts = {row.arm: row.verdict for row in record.parity}
    # Every arm is in exactly one of these, except a baseline that did not fail, and the ceiling,
    # which does other work by design.
    equal: list[str] = []
    other: list[str] = []
    unequal: list[str] = []
    failed: list[str] = []
    unknown: list[str] = []
    bases = 0  # one for each world size
    for key, arm in record.arms.items():
        verdict = verdicts.get(key)
        if arm.role == "ceiling":
            continue
        if arm.status == "refused" or verdict == "unequal":
            unequal.append(key)
        elif arm.role == "baseline" and arm.status != "failed":
            bases += 1  # the reference of the other arms
        elif verdict in ("bitwise", "within tolerance"):
            equal.append(key)
        elif verdict == "other method":
            other.append(key)
        else:
            (failed if arm.status == "failed" else unknown).append(key)
    if unequal:
        return WorkVerdict(False, f"not the same training: {', '.join(unequal)}")
    if not equal:
        return WorkVerdict(None, "not proved: nothing was compared")
    bitwise = all(verdicts[key] == "bitwise" for key in equal)
    how = "bitwise equal" if bitwise else "equal within the tolerance"
    text = f"{len(equal) + bases} trained the same: parameters {how} after "
    text += f"{record.config.proof_steps} steps"
    if later := _last_equal_step(record, equal):
        text += f", bitwise again after {later}"
    text = text if unknown or failed or other else f"all {text}"
    text += f"; by another method, as asked: {', '.join(other)}" if other else ""
    text += f"; failed before: {', '.join(failed)}" if failed else ""
    text += f"; not compared: {', '.join(unknown)}" if unknown else ""
    return WorkVerdict(None if unknown else True, text)


def _last_equal_step(record: Record, equal: list[str]) -> int | None:
    """Return the most steps after which all these arms had the parameters of their baselines."""
    found = []
    base = {key: record.key_of("baseline", record.arms[key].ranks) for key in equal}
    for ends in record.ends:
        if all(key in ends and ends[key] == ends.get(base[key]) for key in equal):
            found.append(min(ends[key][0] for key in equal))
    return max(found, default=None)
