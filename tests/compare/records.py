"""Synthetic records: what `compare` would have written of a comparison that never took place.

`make_record` is complete and plausible, and its true speeds are in TRUE_STEP_MS. `exact_record` has
no noise: its numbers are known to the last digit.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np

from hvdtrain.compare.analysis.summary import summarise
from hvdtrain.compare.record import parse

Record = dict[str, Any]
BASELINE = "ddp/gloo"
GRADIENT_BYTES = 25_000_000
STEPS = 12

# The time of a step at 2 ranks, and of it: computing, communication that is not hidden, the rest.
TRUE_STEP_MS = {
    "ddp/gloo": 60.0,
    "ddp/gloo (repeat)": 60.0,
    "ddp/shm": 44.0,
    "compat/shm": 45.0,
    "ddp/mpi": 72.0,
    "by hand (gloo)": 59.5,
    "no communication": 36.0,
    "horovod/gloo": 66.0,
}
ROLES = {
    "ddp/gloo": "baseline",
    "ddp/gloo (repeat)": "again",
    "by hand (gloo)": "by hand",
    "no communication": "ceiling",
}
FAILED = "horovod/gloo"


def summary_of(found: Record) -> dict[str, Any]:
    """The summary of a record, both as JSON: what `hvdtrain report --json` prints."""
    return dict(json.loads(json.dumps(summarise(parse(found)), default=vars, allow_nan=False)))


def exact_record(
    step_ms: dict[str, float], *, blocks: int = 8, scaling: str | None = None
) -> Record:
    """A record without noise: of three steps the slowest rank takes `step_ms`, as much, and four
    times as much, all slower by a tenth in each block. Block 3 is dropped.

    A key has its number of ranks, which is 2 by default: "a x4". The baseline is a.
    """
    roles = {"a": "baseline", "a (repeat)": "again", "alone": "ceiling"}
    arms: dict[str, Record] = {}
    for key in step_ms:
        name, _, size = key.partition(" x")
        arms[key] = {"name": name, "key": key, "ranks": int(size or 2), "status": "measured"}
        arms[key] |= {"role": roles.get(name, "arm"), "samples_per_step": 64}
        arms[key] |= {"peak_mib": [100.0, 120.0]}
    found = []
    for index in range(blocks):
        windows = {}
        for key, arm in arms.items():
            ms = step_ms[key] * (1 + index / 10) * (1 if index != 3 else 1000)
            steps = [[ms, 1.0, ms]] * (arm["ranks"] - 1) + [[1.0, ms, 4 * ms]]
            load = {"foreign": 0.1 + index / 100, "steal": 0.01}
            waits = [[0.1, 0.2, 0.1], [0.3, 0.1, 0.5]]
            windows[key] = {"step_ms": steps, "input_ms": waits, "cpu_s": [0.03, 0.06], **load}
        dropped = "too busy" if index == 3 else None
        found.append({"index": index, "kept": index != 3, "dropped": dropped, "arms": windows})
    return {
        "baseline": "a",
        "arms": arms,
        "blocks": found,
        "config": {"max_foreign": 0.5, "proof_steps": 20, "scaling": scaling},
    }


def make_record(
    *,
    blocks: int = 30,
    ranks: tuple[int, ...] = (2,),
    scaling: str | None = None,
    failed: str | None = FAILED,
    outcome: str = "finished",
) -> Record:
    """A record of `blocks` blocks at the given world sizes; `failed` failed in block 3."""
    rng = np.random.default_rng(0)
    arms = {}
    for size in ranks:
        for name in TRUE_STEP_MS:
            arm = _arm(name, size, len(ranks) > 1, scaling)
            arms[arm["key"]] = arm
    if 1 in ranks:
        arm = _arm("single", 1, True, scaling) | {"launcher": None}
        arms[arm["key"]] = arm
    if failed is not None:
        for arm in arms.values():
            if arm["name"] == failed:
                arm["status"] = "failed"
                arm["reason"] = "rank 1 ended with exit code 134 in block 3: gloo::EnforceNotMet"
                arm["log"] = f"logs/{arm['key'].replace('/', '-')}.log"
    record = _head(ranks, scaling, outcome, blocks) | {"arms": arms}
    record["parity"] = [_parity(arm) for arm in arms.values() if arm["role"] != "ceiling"]
    record["blocks"] = [_block(rng, index, arms) for index in range(blocks)]
    return record


def true_step_ms(arm: Record) -> float:
    """What a step of the arm takes but for noise, in ms."""
    name, size = arm["name"], int(arm["ranks"])
    compute = TRUE_STEP_MS["no communication"]
    communication = TRUE_STEP_MS.get(name, compute) - compute
    compute *= arm["samples_per_step"] / size / 32
    if name == "single" or size == 1:
        return float(compute * 0.95)
    return float(compute + communication * (2 * (size - 1) / size))


def _arm(name: str, size: int, several: bool, scaling: str | None) -> Record:
    backend, _, transport = name.removesuffix(" (repeat)").partition("/")
    if name.startswith("by hand"):
        backend, transport = "by hand", "gloo"
    elif name in ("no communication", "single"):
        backend, transport = name, ""
    launcher = {"mpi": "mpirun"}.get(transport, "torchrun")
    if backend == "horovod":
        launcher = "horovodrun"
    in_force = {
        "threads": 1,
        "interop_threads": 1,
        "affinity": [0, 1],
        "variables": {"OMP_NUM_THREADS": "1"},
    }
    return {
        "name": name,
        "key": f"{name} x{size}" if several else name,
        "ranks": size,
        "role": ROLES.get(name, "arm"),
        "backend": backend,
        "transport": transport or None,
        "launcher": launcher,
        "command": f"{launcher} -np {size} python -m hvdtrain.compare.run.arm_script",
        "status": "measured",
        "reason": None,
        "log": None,
        "in_force": [copy.deepcopy(in_force) for _ in range(size)],
        "samples_per_step": 64 if scaling == "strong" else 32 * size,
        "gradient_bytes": GRADIENT_BYTES,
        "parameters": GRADIENT_BYTES // 4,
        "peak_mib": [410.5 + rank for rank in range(size)],
        "warm_up_steps": 14,
    }


def _head(ranks: tuple[int, ...], scaling: str | None, outcome: str, blocks: int) -> Record:
    return {
        "schema": 1,
        "outcome": outcome,
        "note": "stopped by Ctrl-C" if outcome == "interrupted" else None,
        "command": ["hvdtrain", "compare", "--np", ",".join(map(str, ranks))],
        "started": "2026-11-21T04:29:26+00:00",
        "ended": "2026-11-21T04:33:58+00:00",
        "commit": "ca6853a",
        "config": {
            "task": "digits",
            "ranks": list(ranks),
            "scaling": scaling,
            "baseline": BASELINE,
            "budget_s": 300.0,
            "target_ci": 0.02,
            "batch_size": 32,
            "precision": "fp32",
            "data": "real",
            "threads": 1,
            "steps_per_block": STEPS,
            "proof_steps": 20,
            "max_foreign": 0.5,
            "min_blocks": min(blocks, 15),
            "least_blocks": 6,
        },
        "machine": {
            "cpu": "Intel(R) Xeon(R) Processor @ 2.70GHz",
            "cores": 2,
        },
        "versions": {"hvdtrain": "0.1", "torch": "2.13.0+cpu", "python": "3.11.9"},
        "environment": {"OMP_NUM_THREADS": "1"},
        "baseline": BASELINE,
    }


def _parity(arm: Record) -> Record:
    return {
        "arm": arm["key"],
        "verdict": "bitwise",
        "text": f"the same samples and, after 20 steps, the same bits as {BASELINE}",
        "difference": 0.0,
        "tolerance": 1e-5,
        "cause": None,
    }


def _noise(rng: np.random.Generator, sigma: float = 0.05, spikes: float = 0.04) -> float:
    spike = 1 + rng.exponential(0.4) if rng.random() < spikes else 1.0
    return float(np.exp(sigma * rng.standard_normal()) * spike)


def _r(value: float) -> float:
    return round(value, 4)


def _steps(rng: np.random.Generator, ms: float, size: int, steps: int = STEPS) -> list[list[float]]:
    """[rank][step]: ranks in lockstep, so a step's times differ little between them."""
    whole = ms * np.exp(0.06 * rng.standard_normal(steps))
    return [[_r(t * (1 - 0.01 * rng.random())) for t in whole] for _ in range(size)]


def _block(rng: np.random.Generator, index: int, arms: dict[str, Record]) -> Record:
    drift = 1.2 + 0.2 * np.sin(index / 4) if index % 11 == 7 else 1 + 0.1 * np.sin(index / 4)
    busy = index % 11 == 7  # something else ran: the block is dropped
    rows = {}
    for key, arm in arms.items():
        if arm["status"] == "failed" and index >= 3:
            continue
        ms = true_step_ms(arm) * drift * _noise(rng) * (1.3 if busy else 1)
        rows[key] = {
            "step_ms": _steps(rng, ms, arm["ranks"]),
            "cpu_s": [_r(STEPS * ms / 1000 * 0.93) for _ in range(arm["ranks"])],
            "foreign": _r(0.6 if busy else abs(rng.normal(0.03, 0.02))),
            "steal": _r(abs(rng.normal(0, 0.004))),
        }
    why = "other processes took 60 % of the cores" if busy else None
    return {"index": index, "generation": 0, "kept": not busy, "dropped": why, "arms": rows}
