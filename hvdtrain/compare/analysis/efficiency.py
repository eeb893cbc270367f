"""Scaling: measured efficiency, and step times that a cost model predicts for larger worlds.

`summary` takes both. The model of a ring is from Patarasuk and Yuan (2009); that of a parameter
server assumes one server. n is the number of ranks, alpha the latency of a message, B the
bandwidth, K the bytes of the gradients; alpha and B are fitted to measured all-reduces:

    ring               2 (n-1) alpha + 2 (n-1)/n K/B
    parameter server   2 alpha + 2 (n-1) K/B
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.analysis.speed import Measured, number

Json = dict[str, Any]
WORLDS = (1, 2, 4, 8, 16, 32, 64)
MIN_SIZES = 3  # different sizes of all-reduces for a fit of two parameters
MAX_ERROR = 0.5  # RMS of the relative errors; a worse fit is rejected

ASSUMPTIONS = (
    "This is a prediction from a model, nothing of it was measured.",
    "Ranks beyond those measured are on further machines or cores as fast as these, joined by links"
    " with the latency and bandwidth that all-reduces between the ranks measured here had.",
    "Those were of tensors that the transport saw for the first time, one at a time: gradients in"
    " buckets that it keeps may go faster.",
    "Communication of K bytes between n ranks takes 2(n-1) alpha + 2(n-1)/n K/B in a ring, and"
    " 2 alpha + 2(n-1) K/B through one parameter server, whose link carries everything.",
    "What computing hides of the communication at the ranks measured, in ms, it hides at any number"
    " of ranks; what an arm takes beyond computing and communication it takes at any number.",
    "No rank is slower than another: stragglers, of which more ranks have more, are left out.",
)
WEAK = "The batch per rank stays as it is (weak scaling): each rank computes as long as here."
STRONG = (
    "The global batch stays as it is (strong scaling): n ranks compute 1/n as long as one, and"
    " hide as much less."
)


@dataclass(frozen=True)
class Link:
    """The fitted parameters of the model, and its relative errors on the measurements."""

    alpha_s: float
    s_per_byte: float
    rms_error: float
    worst_error: float

    def ring_s(self, ranks: int, num_bytes: float) -> float:
        """Return the seconds of an all-reduce in a ring."""
        if ranks == 1:
            return 0.0
        steps = 2 * (ranks - 1)
        return steps * self.alpha_s + steps / ranks * num_bytes * self.s_per_byte

    def server_s(self, ranks: int, num_bytes: float) -> float:
        """Return the seconds until all ranks have received the sum from one server."""
        if ranks == 1:
            return 0.0
        return 2 * self.alpha_s + 2 * (ranks - 1) * num_bytes * self.s_per_byte


def fit(points: Iterable[tuple[int, int, float]]) -> Link | str:
    """Return the ring model fitted to all-reduces, (ranks, bytes, seconds) each, or why it fails.

    The fit minimises squared relative errors, because the absolute ones are all in the largest
    messages, with both parameters at least zero. The model is linear in both: the minimum is exact.
    """
    usable = [(n, k, t) for n, k, t in points if n > 1 and k > 0 and 0 < t < math.inf]
    sizes = {k for _, k, _ in usable}
    if len(sizes) < MIN_SIZES:
        return f"all-reduces of {len(sizes)} sizes were measured, and it takes {MIN_SIZES} to fit"
    # Each row is the model divided by the measured time: it predicts 1, and errors are relative.
    rows = np.array([[2 * (n - 1) / t, 2 * (n - 1) / n * k / t] for n, k, t in usable])
    scale = rows.max(axis=0)  # the columns differ by many orders of magnitude
    found, _ = nnls(rows / scale, np.ones(len(rows)))
    alpha_s, s_per_byte = (float(x) for x in found / scale)
    errors = np.abs(rows @ (found / scale) - 1)
    link = Link(alpha_s, s_per_byte, float(np.sqrt(np.mean(errors**2))), float(errors.max()))
    if s_per_byte == 0:  # infinite bandwidth: the number of bytes would not matter
        return "the all-reduces measured do not take longer the larger they are"
    if link.rms_error > MAX_ERROR:
        return f"the model is {100 * link.rms_error:.0f} % off the all-reduces measured"
    return link


def prediction(record: Json, measured: Measured) -> Json | None:
    """Return the predicted step times at each of WORLDS; None if no all-reduces were measured or no
    block counts.

    An arm without a prediction is in `refused`, with the reason.
    """
    collectives = record.get("collectives") or {}
    if not any(collectives.values()) or not any(measured.times.values()):
        return None
    strong = (record.get("config") or {}).get("scaling") == "strong"
    rows, refused = [], []
    for key in _largest(measured, collectives):
        points = _points(measured, collectives, measured.arms[key])
        found = _row(measured, key, fit(points), strong)
        if isinstance(found, str):
            refused.append({"arm": key, "reason": found})
        else:
            rows.append(found)
    errors = [row["fit_error"] for row in rows]
    said = [] if not rows else [f"The model misses the all-reduces measured by {_range(errors)}."]
    return {
        "kind": "strong" if strong else "weak",
        "assumptions": [*ASSUMPTIONS, STRONG if strong else WEAK, *said],
        "fit_error": max(errors, default=None),
        "rows": rows,
        "refused": refused,
    }


def _range(errors: list[float]) -> str:
    low, high = f"{100 * min(errors):.0f}", f"{100 * max(errors):.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %, depending on the arm"


def _largest(measured: Measured, collectives: Json) -> list[str]:
    """Return the key of each arm's largest world size with collectives: predictions start there."""
    best: dict[tuple[str, str], str] = {}
    for key in collectives:
        arm = measured.arms.get(key)
        if arm is not None:
            same = (arm["name"], arm.get("level", "defaults"))
            if same not in best or measured.arms[best[same]]["ranks"] < arm["ranks"]:
                best[same] = key
    return list(best.values())


def _points(measured: Measured, collectives: Json, arm: Json) -> list[tuple[int, int, float]]:
    """Return (ranks, bytes, median seconds) of an arm's all-reduces, at all its world sizes."""
    found = []
    for key, rows in collectives.items():
        other = measured.arms.get(key, {})
        if all(other.get(name) == arm.get(name) for name in ("name", "level")):
            for row in rows:
                if row.get("ms"):
                    found.append((other["ranks"], row["bytes"], float(np.median(row["ms"])) / 1e3))
    return found


def _row(measured: Measured, key: str, link: Link | str, strong: bool) -> Json | str:
    arm = measured.arms[key]
    if arm.get("status") in ("failed", "refused"):
        return f"the arm {arm['status']}"
    if isinstance(link, str):
        return link
    here, num_bytes = arm["ranks"], arm.get("gradient_bytes")
    ceiling = measured.role("ceiling", here)
    alone = _median_ms(measured, ceiling)
    step = _median_ms(measured, key)
    if not num_bytes or math.isnan(alone) or math.isnan(step):
        return "its step, or that without communication, was not measured"
    # Hidden communication if negative, else copies and bookkeeping.
    other = step - alone - 1e3 * link.ring_s(here, num_bytes)

    def predict(ranks: int, communication_s: float) -> float:
        share = here / ranks if strong else 1.0
        # Only computing can hide communication, so the hidden part shrinks with it.
        hidden = other * share if other < 0 else other
        if ranks == 1:
            return alone * share
        return alone * share + max(0.0, 1e3 * communication_s + hidden)

    return {
        "arm": key,
        "alpha_us": link.alpha_s * 1e6,
        "beta_gb_s": 1e-9 / link.s_per_byte,
        "fit_error": link.rms_error,
        "fit_worst": link.worst_error,
        "compute_ms": alone,
        "hidden_ms": max(0.0, -other),
        "measured_ranks": here,
        "measured_ms": step,
        "ranks": list(WORLDS),
        "ring_ms": [predict(n, link.ring_s(n, num_bytes)) for n in WORLDS],
        "server_ms": [predict(n, link.server_s(n, num_bytes)) for n in WORLDS],
    }


def _median_ms(measured: Measured, key: str | None) -> float:
    times = list(measured.times.get(key, {}).values()) if key else []
    return float(np.median(times)) if times else math.nan


def efficiency_rows(record: Json, measured: Measured) -> list[Json]:
    """Return the efficiency of each arm, against itself at one rank and the `single` process.

    Weak scaling, constant batch per rank: T(1) / T(n). Strong scaling, constant global batch:
    T(1) / (n T(n)).
    """
    kind = (record.get("config") or {}).get("scaling")
    if kind not in ("weak", "strong"):
        return []
    rows = []
    for key, arm in measured.arms.items():
        if arm["ranks"] > 1 and arm.get("role") != "again":
            for base, what in _bases(measured, arm):
                ratio = measured.against(base, key)
                share = 1 / arm["ranks"] if kind == "strong" else 1.0
                if ratio.blocks:
                    rows.append(_efficiency_row(key, arm, kind, base, what, ratio, share))
    return rows


def _efficiency_row(
    key: str, arm: Json, kind: str, base: str, what: str, ratio: stats.Interval, share: float
) -> Json:
    return {
        "arm": key,
        "name": arm["name"],
        "level": arm.get("level"),
        "ranks": arm["ranks"],
        "kind": kind,
        "base": base,
        "base_kind": what,
        "efficiency": number(ratio.median * share),
        "low": number(ratio.low * share),
        "high": number(ratio.high * share),
        "blocks": ratio.blocks,
    }


def _bases(measured: Measured, arm: Json) -> list[tuple[str, str]]:
    """Return (key, kind) of the one-rank arms that this arm is compared with."""
    found = []
    for key, other in measured.arms.items():
        if other["ranks"] == 1 and other.get("name") == "single":
            found.append((key, "single"))
        elif other["ranks"] == 1 and all(
            other.get(name) == arm.get(name) for name in ("name", "level")
        ):
            found.append((key, "same arm"))
    return sorted(found, key=lambda base: base[1])
