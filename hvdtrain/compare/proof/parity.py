"""The parity check: whether every arm did the same work as the baseline.

`runner` calls `compare` with the work traces of all ranks. Counts (samples, steps, rates, dtypes)
must be equal. Computed numbers must be bitwise equal with up to two ranks, if the baseline repeats
itself bitwise, because the mean of two is the same in any order. With more, the transport chooses
the order of a sum, and numbers must agree within a tolerance; parameters whose gradient is pure
rounding noise depend on that order, and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from hvdtrain.compare.proof.diagnosis import Cause
from hvdtrain.compare.proof.exact_checks import counted
from hvdtrain.compare.proof.numeric_checks import (
    Limits,
    bitwise,
    computed,
    final_distance,
    gradient_distance,
    spread,
    where_they_part,
)
from hvdtrain.compare.proof.work_trace import Account, Ranks

# For the gradients of one step, relative to their norm. fp32: a hundred times its resolution, for
# sums of many terms in any order. Autocast: the resolution of the narrow type, because a parameter
# that differs in its last bit may round the other way.
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "fp16": 2.0**-11, "bf16": 2.0**-8}

# An arm may differ from the baseline by this many times the difference of the A/A pair.
_AGAIN = 4
# If that allows more than this, the baseline is too random to prove anything.
_USELESS = 0.1


def compare(
    accounts: Mapping[str, Ranks], baseline: str, again: str = "", ceiling: str = ""
) -> list[dict[str, Any]]:
    """Return a verdict on every arm but the baseline: rows `parity` of the record. Not collective.

    `accounts`: the traces of all ranks by arm, all arms of one world size. `again`: the baseline's
    duplicate (A/A); a difference of these two is the task's own randomness. `ceiling`: the arm
    without communication; its gradients help to find causes, and it is not compared itself.
    """
    others = {name: ranks for name, ranks in accounts.items() if name != baseline}
    base, local = accounts.get(baseline, ()), accounts.get(ceiling, ())
    problem = baseline_problem(baseline, base, others.get(again))
    if problem:
        return [_row(name, "not compared", problem) for name in others]
    limits = _limits(base, others.get(again))
    rows = []
    for name, ranks in others.items():
        if name == ceiling:
            text = "does not communicate: its ranks train apart, and show how fast a step can be"
            rows.append(_row(name, "not compared", text))
        elif not ranks:
            rows.append(_row(name, "not compared", "it left no account of its work"))
        else:
            rows.append(_judge(name, ranks, base, _usable(local, base), limits, baseline))
    return rows


def _row(arm: str, verdict: str, text: str, **more: Any) -> dict[str, Any]:
    empty = {"difference": None, "tolerance": None, "cause": None, "row": None}
    return {"arm": arm, "verdict": verdict, "text": text, **empty, **more}


def _judge(
    name: str, arm: Ranks, base: Ranks, local: Ranks | None, limits: Limits, baseline: str
) -> dict[str, Any]:
    if len(arm) != len(base):
        text = f"{len(arm)} ranks, and {baseline} has {len(base)}"
        return _row(name, "unequal", text, cause="other numbers of ranks are not the same work")
    # Lazily: the first difference explains the others, and later checks rely on earlier ones.
    refusal = next(chain(counted(arm, base, baseline), computed(arm, base, local, limits)), None)
    if refusal is not None:
        where = where_they_part(arm, base, limits) or "losses and gradients are the same throughout"
        cause = refusal.cause or Cause(f"no known cause fits; {where}")
        return _row(
            name,
            "unequal",
            refusal.text,
            difference=_finite(refusal.difference),
            tolerance=0.0 if limits.bitwise and refusal.tolerance else refusal.tolerance,
            cause=cause.text,
            row=cause.row,
        )
    steps = f"{len(base[0].steps)} steps"
    if bitwise(arm, base):
        return _row(
            name,
            "bitwise",
            f"parameters bitwise equal after {steps}",
            difference=0.0,
            tolerance=0.0,
        )
    apart, left_out = final_distance(arm, base, limits)
    text = (
        f"parameters equal within {apart:.1e} after {steps}, relative to how far training moved "
        f"them ({limits.final:.1e} is allowed: {limits.reason})"
    )
    if left_out:
        text = (
            f"{text}; {100 * left_out:.2g} % of the elements, whose gradients were nothing but "
            "rounding, are left out"
        )
    return _row(name, "within tolerance", text, difference=_finite(apart), tolerance=limits.final)


# The baseline, and the tolerances for other arms


def baseline_problem(name: str, base: Ranks, again: Ranks | None) -> str:
    """Return why the baseline is unfit for comparison, else "". `again`: its duplicate (A/A)."""
    if not base:
        return f"the baseline {name} left no account of its work"
    if len({a.initial_sha256 for a in base}) > 1:
        return f"the ranks of the baseline {name} start from different parameters"
    if len({a.final_sha256 for a in base}) > 1:
        return f"the ranks of the baseline {name} end with different parameters"
    if again and len(again) == len(base):
        own = "; seed what is random in the task"
        if any(a.initial_sha256 != b.initial_sha256 for a, b in zip(again, base, strict=True)):
            return f"the baseline {name} starts from other weights when it is run again{own}"
        if any(_content(a) != _content(b) for a, b in zip(again, base, strict=True)):
            return f"the baseline {name} sees other samples when it is run again{own}"
        apart = max(spread(again, base, _allowed(base)), gradient_distance(again, base))
        if _AGAIN * apart > _USELESS:
            return f"the baseline {name} is {apart:.2g} apart from itself when it is run again{own}"
    return ""


def _limits(base: Ranks, again: Ranks | None) -> Limits:
    """Return the tolerances, tighter or wider than `_allowed` by what the A/A pair shows."""
    n, limits = len(base), _allowed(base)
    repeats = bool(again) and bitwise(again or (), base)
    if repeats and _width(base) != "fp64":
        # If the A/A pair is bitwise equal, every arm has the same local gradients, whatever
        # autocast does; they are averaged in the dtype of the weights.
        limits = replace(limits, gradient=TOLERANCE["fp32"])
    if repeats and n <= 2:
        why = f"the baseline repeats itself bit by bit, and {n} ranks sum exactly"
        return replace(limits, reason=why, bitwise=True)
    if not repeats and again:
        # No arm has to reproduce what the baseline itself does not.
        return replace(
            limits,
            gradient=max(limits.gradient, _AGAIN * gradient_distance(again, base)),
            final=max(limits.final, _AGAIN * spread(again, base, limits)),
            reason="the model itself is not deterministic",
        )
    return limits


def _allowed(base: Ranks) -> Limits:
    """Return the tolerances for this precision and number of steps, without use of the A/A pair."""
    account, n = base[0], len(base)
    width = _width(base)
    # Differences accumulate: each step adds its own.
    final = TOLERANCE[width] * max(1, len(account.steps))
    reason = f"{n} ranks sum in the transport's order" if n > 2 else "nothing shows that it repeats"
    return Limits(TOLERANCE[width], final, 10 * TOLERANCE[width], reason)


def _width(base: Ranks) -> str:
    """Return the narrowest floating-point type of the computation."""
    return "fp64" if set(base[0].parameters) == {"float64"} else base[0].precision


def _usable(local: Ranks, base: Ranks) -> Ranks | None:
    """Return the traces without communication, if their weights and first samples are the same."""
    same = len(local) == len(base) and all(
        a.initial_sha256 == b.initial_sha256
        and a.samples.gradient is not None
        and _content(a)[:1] == _content(b)[:1]
        for a, b in zip(local, base, strict=True)
    )
    return local if same else None


def _content(account: Account) -> list[list[str]]:
    return [step.samples for step in account.steps]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
