"""Synthetic records: what `compare` would have written of a comparison that never took place."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.compare.analysis.table import Table, make_table
from hvdtrain.compare.record import parse

Record = dict[str, Any]
ROLES = {"a": "baseline", "a (repeat)": "again"}
TRUE_STEP_MS = {"a": 60.0, "shm": 44.0, "mpi": 72.0, "gloo": 66.0, "a (repeat)": 60.0}
FAILED = "gloo"


def table_of(found: Record) -> Table:
    """The table of a record as JSON."""
    return make_table(parse(found))


def exact_record(step_ms: dict[str, float], *, blocks: int = 8, starts: int = 1) -> Record:
    """A record without noise: of three steps the slowest rank takes `step_ms`, as much, and four
    times as much, all slower by a tenth in each block. Block 3 is dropped.
    """
    record = _record({name: _arm(name) for name in step_ms})
    for index in range(blocks):
        windows = {}
        for name, usual in step_ms.items():
            ms = usual * (1 + index / 10) * (1 if index != 3 else 1000)
            steps = [[ms, 1.0, ms], [ms, ms, 4 * ms]]
            waits = [[0.1, 0.2, 0.1], [0.3, 0.1, 0.5]]
            windows[name] = {"step_ms": steps, "input_ms": waits, "cpu_s": [0.03, 0.06]}
        load = {"foreign": 0.1, "steal": 0.01, "kept": index != 3}
        generation = index * starts // blocks
        record["blocks"].append({"index": index, "generation": generation, "arms": windows, **load})
    return record


def make_record(blocks: int = 30, failed: str | None = FAILED) -> Record:
    """A noisy record of TRUE_STEP_MS in three starts; `failed` failed in block 3."""
    rng = np.random.default_rng(0)
    arms = {name: _arm(name) for name in TRUE_STEP_MS}
    record = _record(arms)
    if failed is not None:
        why = "rank 1 ended with exit code 134 in block 3: gloo::EnforceNotMet"
        arms[failed] |= {"status": "failed", "reason": why, "log": f"logs/{failed}.log"}
    for index in range(blocks):
        busy = index % 11 == 7  # something else ran: the block is dropped
        windows = {}
        for name in arms:
            if name == failed and index >= 3:
                continue
            mean = TRUE_STEP_MS[name] * np.exp(0.02 * rng.standard_normal()) * (1 + 0.3 * busy)
            steps = (mean * np.exp(0.06 * rng.standard_normal(12))).round(4).tolist()
            waits = [[0.5] * 12] * 2
            windows[name] = {"step_ms": [steps] * 2, "input_ms": waits, "cpu_s": [0.5, 0.5]}
        load = {"foreign": 0.6 if busy else 0.03, "kept": not busy}
        generation = 3 * index // blocks
        record["blocks"].append({"index": index, "generation": generation, "arms": windows, **load})
    record["parity"] = [
        {"arm": name, "verdict": "bitwise", "text": f"the same bits as a ({name})"}
        for name in list(arms)[1:]
    ]
    return record


def _arm(name: str) -> Record:
    return {
        "name": name,
        "ranks": 2,
        "role": ROLES.get(name, "arm"),
        "command": f"torchrun --nproc-per-node 2 {name}.py",
        "status": "measured",
        "in_force": [{"threads": 1, "affinity": [rank]} for rank in range(2)],
        "samples_per_step": 64,
        "peak_mib": [100.0, 120.0],
    }


def _record(arms: dict[str, Record]) -> Record:
    config = {"max_foreign": 0.5, "proof_steps": 20, "budget_s": 300.0, "target_ci": 0.02}
    return {
        "schema": 1,
        "outcome": "finished",
        "command": ["hvdtrain", "compare"],
        "started": "2026-11-21T04:29:26Z",
        "ended": "2026-11-21T04:34:26Z",
        "config": config,
        "machine": {"cpu": "Intel(R) Xeon(R) Processor @ 2.70GHz", "cores": 2},
        "versions": {"torch": "2.13.0+cpu"},
        "arms": arms,
        "blocks": [],
    }
