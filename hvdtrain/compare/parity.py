"""Did the arms do equal work? Their accounts against those of the baseline.

What is decided by counting (samples, steps, rates, dtypes) must be equal. Numbers must be bitwise
equal with up to two ranks: a sum of two and the division by two are exact in any order. With more
the order of a sum is the transport's own, and they must agree within a tolerance; parameters whose
gradient is nothing but rounding go where that order takes them, and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from hvdtrain.compare.account import Account, Ranks
from hvdtrain.compare.causes import Cause
from hvdtrain.compare.computed import (
    Limits,
    bitwise,
    computed,
    final_distance,
    gradient_distance,
    spread,
    where_they_part,
)
from hvdtrain.compare.counted import counted

# Of the gradients of one step, relative to their norm. fp32: a hundred times its resolution, for
# sums of many terms in any order. Autocast: the resolution of the narrow type, since a parameter
# that differs in its last bit may be rounded the other way.
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "fp16": 2.0**-11, "bf16": 2.0**-8}

# Others may be so many times further from the baseline than it is from itself, run again.
_AGAIN = 4
# A baseline that would have more than this allowed so proves nothing.
_USELESS = 0.1


def compare(
    accounts: Mapping[str, Ranks], baseline: str, again: str = "", ceiling: str = ""
) -> list[dict[str, Any]]:
    """A verdict on every arm but the baseline: the rows `parity` of the record. Not collective.

    `accounts`: those of every rank, by arm, all of one number of ranks. `again` is the baseline a
    second time: what differs between these two is the task's own doing. `ceiling` does not
    communicate: its gradients tell causes apart, and it is not compared.
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
    # Lazily: what comes first explains the rest, and the rest may rely on its being equal.
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


# The baseline, and how far others may be from it


def baseline_problem(name: str, base: Ranks, again: Ranks | None) -> str:
    """Why nothing can be compared with the baseline; empty if it can. `again`: a second time."""
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
    n, limits = len(base), _allowed(base)
    repeats = bool(again) and bitwise(again or (), base)
    if repeats and _width(base) != "fp64":
        # A model that repeats itself bit by bit has the same local gradients on every arm, whatever
        # autocast does; they are averaged in the dtype of the weights.
        limits = replace(limits, gradient=TOLERANCE["fp32"])
    if repeats and n <= 2:
        why = f"the baseline repeats itself bit by bit, and {n} ranks sum exactly"
        return replace(limits, reason=why, bitwise=True)
    if not repeats and again:
        # What the baseline itself does not repeat is asked of nobody.
        return replace(
            limits,
            gradient=max(limits.gradient, _AGAIN * gradient_distance(again, base)),
            final=max(limits.final, _AGAIN * spread(again, base, limits)),
            reason="the model itself is not deterministic",
        )
    return limits


def _allowed(base: Ranks) -> Limits:
    """For its precision and number of steps, if nothing is known of its repeating itself."""
    account, n = base[0], len(base)
    width = _width(base)
    # Each step adds its own difference; those before are carried along.
    final = TOLERANCE[width] * max(1, len(account.steps))
    reason = f"{n} ranks sum in the transport's order" if n > 2 else "nothing shows that it repeats"
    return Limits(TOLERANCE[width], final, 10 * TOLERANCE[width], reason)


def _width(base: Ranks) -> str:
    """The narrowest type that it computes in."""
    return "fp64" if set(base[0].parameters) == {"float64"} else base[0].precision


def _usable(local: Ranks, base: Ranks) -> Ranks | None:
    """The accounts without communication, if they are of the same weights and samples."""
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
