"""The load of other processes during the blocks of a comparison, and the blocks dropped for it.

`summary` shows it, and `comparison` says with it why no arm has a verdict. `run.cpu_load` measures
the shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.compare.compare_options import MIN_BLOCKS, CompareOptions
from hvdtrain.compare.formatting import count, tell_apart
from hvdtrain.compare.record import Block, Record

FEW_BLOCKS = 15
LOADED = 0.2
"""A share of the cores: `caution` warns if others took at least this in half of the blocks."""


@dataclass(frozen=True)
class DroppedBlock:
    """A block that does not count, and why."""

    block: int
    reason: str | None


@dataclass(frozen=True)
class LoadSummary:
    """How many blocks count, and the shares of the cores that others took meanwhile."""

    blocks_measured: int
    blocks_kept: int
    rule: str
    dropped: list[DroppedBlock]
    foreign_median: float | None
    foreign_max: float | None
    steal_max: float | None
    load_before: list[float] | None
    load_after: list[float] | None


def load_summary(record: Record) -> LoadSummary:
    """Return the load in all blocks of a record, and the rule by which blocks are dropped."""
    # The rule uses the load of whole blocks. Older records have only that of each arm's steps.
    parts = [
        part
        for block in record.blocks
        for part in ([block] if block.foreign is not None else block.arms.values())
    ]
    foreign = [part.foreign for part in parts if part.foreign is not None]
    limit = record.config.max_foreign
    rule = "no rule was set: all blocks are kept"
    if limit is not None:
        rule = (
            "blocks during which other processes, and the host of a virtual machine, took over "
            f"{100 * limit:.0f} % of the cores are dropped (--max-foreign)"
        )
        if record.blocks and not foreign:
            rule += "; this machine does not say, so none was"
    return LoadSummary(
        blocks_measured=len(record.blocks),
        blocks_kept=len(record.kept_blocks),
        rule=rule,
        dropped=[DroppedBlock(b.index, b.dropped) for b in record.blocks if not b.kept],
        foreign_median=float(np.median(foreign)) if foreign else None,
        foreign_max=max(foreign, default=None),
        steal_max=max((part.steal for part in parts if part.steal is not None), default=None),
        load_before=record.machine.load_before,
        load_after=record.machine.load_after,
    )


def caution(record: Record) -> str | None:
    """Return a caveat on figures from few blocks, from one start, or under load; else None."""
    kept = record.kept_blocks
    if not kept:
        return None
    dropped = [block for block in record.blocks if not block.kept]
    starts = len({block.generation for block in kept})
    notes, limit = [], record.config.max_foreign
    if len(kept) < FEW_BLOCKS or starts == 1 or dropped:
        text = f"From {count(len(kept), 'block')} of {count(starts, 'start')}"
        if starts == 1:
            text += ": one start of a program can be faster than the next by some percent, as long "
            text += "as it lives, and no interval shows that; a longer --budget has several"
        notes.append(text)
    if dropped:
        more = f"{count(len(dropped), 'more block was', 'more blocks were')} dropped"
        notes.append(f"{more}, {why_dropped(dropped, limit)}")
    others = shares(kept)
    if others and (np.median(others) >= LOADED or max(others) > CompareOptions.max_foreign):
        text = "Measured under load: in the blocks that count others took "
        text += f"{100 * np.median(others):.0f} % of the cores (median; at most "
        text += f"{100 * max(others):.0f} %), and a difference may be theirs"
        notes.append(text)
    return ". ".join(notes) + "." if notes else None


def shares(blocks: Iterable[Block]) -> list[float]:
    """Return the share of the cores that others and the host took in each block that records it."""
    return [block.foreign + (block.steal or 0.0) for block in blocks if block.foreign is not None]


def no_verdict_note(blocks: Sequence[Block], limit: float | None) -> str | None:
    """Return why no arm has a verdict on its speed: too many blocks were dropped; else None."""
    dropped = [block for block in blocks if not block.kept]
    num_kept = len(blocks) - len(dropped)
    if not dropped or num_kept >= MIN_BLOCKS:
        return None
    if not num_kept:
        return f"no block counts: {len(dropped)} were dropped, {why_dropped(dropped, limit)}"
    verb = "counts" if num_kept == 1 else "count"
    return (
        f"no verdict on any speed: {num_kept} of {len(blocks)} blocks {verb}, and a "
        f"verdict needs {MIN_BLOCKS}; the others were dropped, {why_dropped(dropped, limit)}"
    )


def why_dropped(blocks: Sequence[Block], limit: float | None) -> str:
    """Return one text for all dropped blocks: why they do not count, and what to do."""
    others = [100 * share for share in shares(blocks)]
    text = "for the load of others"
    if others:
        low, high = f"{min(others):.0f}", f"{max(others):.0f}"
        if limit is not None:
            low, _ = tell_apart(min(others), 100 * limit, 0, "f")
        text = f"since others took {low if low == high else f'{low} to {high}'} % of the cores"
    if limit is not None:
        text += f", and --max-foreign allows {100 * limit:g}%"
    return f"{text}; end what else runs here, or allow more and mistrust small differences"
