"""The parity check: whether every arm did the same work as the baseline.

`comparison` calls `compare` with the work traces of all ranks. Counts (samples, steps, rates,
dtypes) must be equal. Computed numbers must be bitwise equal with up to two ranks, if the baseline
repeats itself bitwise, because the mean of two is the same in any order. With more, the transport
chooses the order of a sum, and numbers must agree within a tolerance; parameters whose gradient is
pure rounding noise depend on that order, and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hvdtrain.compare.formatting import count
from hvdtrain.compare.proof.distances import ArmPair, Limits
from hvdtrain.compare.proof.equal_work import differences
from hvdtrain.compare.proof.work_trace import ArmTraces
from hvdtrain.compare.record import ParityRow

# For the gradients of one step, relative to their norm. fp32: a hundred times its resolution, for
# sums of many terms in any order. Autocast: the resolution of the narrow type, because a parameter
# that differs in its last bit may round the other way.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 2.0**-11, "bfloat16": 2.0**-8}

# An arm may differ from the baseline by this many times the difference of the A/A pair.
_AGAIN_FACTOR = 4
# If that allows more than this, the baseline is too random to prove anything.
_MAX_RANDOM = 0.1


def compare(
    traces: Mapping[str, ArmTraces],
    baseline: str,
    again: str = "",
) -> list[ParityRow]:
    """Return a verdict on every arm but the baseline: rows `parity` of the record. Not collective.

    `traces`: the traces of all ranks by arm. `again`: the baseline's duplicate (A/A); a difference
    of these two is the task's own randomness.
    """
    others = {name: ranks for name, ranks in traces.items() if name != baseline}
    base = traces.get(baseline, ())
    problem = baseline_problem(baseline, base, others.get(again))
    rows = []
    for name, ranks in others.items():
        if problem:
            rows.append(ParityRow(name, "not compared", problem))
        elif len(ranks) != len(base):
            text = f"{count(len(ranks), 'rank')}, and {baseline} has {len(base)}; give both as many"
            rows.append(ParityRow(name, "unequal", text))
        else:
            pair = ArmPair(ranks, base, _limits(base, others.get(again)))
            rows.append(_judge(name, pair, baseline))
    return rows


def _judge(name: str, pair: ArmPair, baseline: str) -> ParityRow:
    """Return the verdict on one arm."""
    limits = pair.limits
    # Lazily: the first difference explains the others, and later checks rely on earlier ones.
    if found := next(differences(pair, baseline), None):
        return ParityRow(name, "unequal", found.text, found.distance, found.tolerance, found.cause)
    steps, note = f"{len(pair.base[0].steps)} steps", _buffers_note(pair)
    if not all(trace.steps[0].samples for ranks in pair.ranks for trace in ranks):
        steps += "; the samples could not be recorded"
    if pair.is_bitwise_equal:
        text = f"parameters bitwise equal after {steps}"
        return ParityRow(name, "bitwise", text, 0.0, 0.0, note=note)
    apart, left_out = pair.final_distance()
    text = (
        f"parameters equal within {apart:.1e} after {steps}, relative to how far training moved "
        f"them ({limits.final:.1e} is allowed: {limits.reason})"
    )
    if left_out:
        text = (
            f"{text}; {100 * left_out:.2g} % of the elements are left out: their gradients are "
            "rounding errors"
        )
    return ParityRow(name, "within tolerance", text, apart, limits.final, note=note)


def _buffers_note(pair: ArmPair) -> str:
    """Return that buffers differ where they may, if they do."""
    if all(pair.buffer_distance(r) <= pair.limits.final for r in range(1, len(pair.arm))):
        return ""
    return (
        "the buffers of rank 0, such as BatchNorm's statistics, are equal; those of other ranks "
        "differ: DDP overwrites them with rank 0's before each forward pass, Horovod does not"
    )


# The baseline, and the limits for other arms


def baseline_problem(name: str, base: ArmTraces, again: ArmTraces | None) -> str:
    """Return why the baseline is unfit for comparison, else "". `again`: its duplicate (A/A)."""
    if not base:
        return f"the baseline {name} recorded no steps"
    if len({a.initial_sha256 for a in base}) > 1:
        return f"the ranks of the baseline {name} start from different parameters"
    if len({a.final_sha256 for a in base}) > 1:
        return f"the ranks of the baseline {name} end with different parameters"
    if again and len(again) == len(base):
        own = "; seed its random numbers"
        if len({trace.initial_sha256 for trace in (*again, *base)}) > 1:
            return f"the baseline {name} starts from other weights when it runs again{own}"
        pair = ArmPair(again, base, _default_limits(base))
        if any(one.samples != other.samples for *_, one, other in pair.steps):
            return f"the baseline {name} reads other samples when it runs again{own}"
        apart = max(pair.largest_distance(), pair.distance("gradient"))
        if _AGAIN_FACTOR * apart > _MAX_RANDOM:
            return f"the baseline {name} differs by {apart:.2g} when it runs again{own}"
    return ""


def _limits(base: ArmTraces, again: ArmTraces | None) -> Limits:
    """Return the limits, tighter or wider than `_default_limits` by what the A/A pair shows."""
    n, limits = len(base), _default_limits(base)
    pair = ArmPair(again, base, limits) if again and len(again) == n else None
    repeats = pair is not None and pair.is_bitwise_equal
    if repeats and _narrowest_type(base) != "float64":
        # If the A/A pair is bitwise equal, every arm has the same local gradients, whatever
        # autocast does; they are averaged in the type in which they are sent. A sum of n numbers
        # rounds n - 1 times, and fp32's tolerance has room for that.
        sent = _sent_type(base)
        limits = replace(limits, gradient=TOLERANCE[sent] * (1 if sent == "float32" else n))
    if repeats and n <= 2:
        why = f"the baseline repeats bit by bit, and a sum over {n} ranks is exact"
        return replace(limits, reason=why, bitwise=True)
    if pair is not None and not repeats:
        # No arm has to reproduce what the baseline itself does not.
        return replace(
            limits,
            gradient=max(limits.gradient, _AGAIN_FACTOR * pair.distance("gradient")),
            final=max(limits.final, _AGAIN_FACTOR * pair.largest_distance()),
            reason="the baseline is not deterministic",
        )
    return limits


def _default_limits(base: ArmTraces) -> Limits:
    """Return the limits for this precision and number of steps, without use of the A/A pair."""
    trace, n = base[0], len(base)
    width = _narrowest_type(base)
    # Differences accumulate: each step adds its own.
    final = TOLERANCE[width] * max(1, len(trace.steps))
    reason = f"{n} ranks sum in the transport's order" if n > 2 else "the baseline was not repeated"
    return Limits(TOLERANCE[width], final, 10 * TOLERANCE[width], reason)


def _narrowest_type(base: ArmTraces) -> str:
    """Return the narrowest floating-point type of the computation."""
    if set(base[0].parameters) == {"float64"}:
        return "float64"
    return max(base[0].precision, _sent_type(base), key=TOLERANCE.__getitem__)


def _sent_type(base: ArmTraces) -> str:
    """Return the type in which gradients are averaged: the narrowest that the optimizer gets."""
    found = TOLERANCE.keys() & base[0].steps[0].gradient_dtypes
    return max(found, key=TOLERANCE.__getitem__, default="float32")
