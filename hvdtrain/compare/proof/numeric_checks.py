"""The numeric part of the parity check: gradients, parameters and buffers, within tolerances.

`parity` runs it after `exact_checks`. Where arms must be bitwise equal, no bit may differ.
Differences beyond rounding are still reported first, because they show the cause: on some CPUs a
fault also leaves rounding differences in numbers that it does not otherwise change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hvdtrain.compare.formatting import tell_apart
from hvdtrain.compare.proof import diagnosis
from hvdtrain.compare.proof.distances import ArmPair, distance, relative_difference, rms
from hvdtrain.compare.proof.exact_checks import Difference
from hvdtrain.compare.proof.gradient_diagnosis import FirstGradients, explain_gradients
from hvdtrain.compare.proof.work_trace import Array


def numeric_differences(pair: ArmPair) -> Iterator[Difference]:
    """Yield the differences of two arms whose counts are equal."""
    # First within tolerances, then bit by bit: a real fault is reported before mere rounding.
    limits = pair.limits
    cause = _diagnose_gradients(pair)
    yield from _differences(replace(pair, limits=replace(limits, bitwise=False)), cause)
    # Gradients may differ in the last bits of denormal numbers, which move no parameter.
    if limits.bitwise and not pair.is_bitwise_equal:
        cause = cause or _diagnose_rounding(pair)
        exact = replace(limits, gradient=0.0, final=0.0, noise=0.0)
        for found in _differences(replace(pair, limits=exact), cause):
            yield replace(found, cause=cause)


def _differences(pair: ArmPair, cause: str | None) -> Iterator[Difference]:
    """Yield what differs by more than the limits. `cause`: why the first gradients differ."""
    arm, limits = pair.arm, pair.limits
    steps = f"{len(arm[0].steps)} steps"
    if len({a.final_sha256 for a in arm}) > 1:
        text = f"its ranks have different parameters after {steps}: not synchronised"
        yield Difference(text, cause)
    yield from _first_gradients(pair, cause)
    yield from _norms(pair)
    apart, _ = pair.final_distance()
    if apart > limits.final or (limits.bitwise and not pair.has_equal_parameters):
        text = f"parameters differ by {percent(apart)} of how far training moved them in {steps}"
        if apart == 0:
            text = f"parameters differ after {steps}, though not in the elements that are sampled"
        yield Difference(text, cause or diagnosis.OTHER_UPDATE, apart, limits.final)
    yield from _buffers(pair)


def _first_gradients(pair: ArmPair, cause: str | None) -> Iterator[Difference]:
    """Yield differences in the first step's gradient."""
    limit = pair.limits.gradient
    apart = pair.distance("gradient")
    if apart > limit:
        text = f"the gradient of the first step differs by {percent(apart)} of its norm"
        yield Difference(_with_hint(text, apart, pair), cause, apart, limit)


def _norms(pair: ArmPair) -> Iterator[Difference]:
    """Yield differences in the gradient norms of all steps.

    The limit is `limits.final`: later gradients are of parameters that already differ by rounding.
    """
    limit = pair.limits.final
    found = list(_differences_by_step(pair, limit))
    cause = diagnosis.OTHER_UPDATE if found and found[0].name == _PARAMETERS else None
    for step, name, rank, mine, its in found:
        if name == _GRADIENT:
            apart = relative_difference(mine, its)
            text = f"the {name} in step {step} on rank {rank} differs by {percent(apart)}"
            yield Difference(text, cause, apart, limit)


def _buffers(pair: ArmPair) -> Iterator[Difference]:
    """Yield differences in the final buffers."""
    limits, apart = pair.limits, pair.buffer_distance()
    if apart > limits.final or (limits.bitwise and not pair.has_equal_buffers):
        text = f"buffers differ by {percent(apart)} after {len(pair.arm[0].steps)} steps"
        if apart == 0:
            text = "buffers differ, though not in the elements that are sampled"
        yield Difference(text, diagnosis.OTHER_BUFFERS, apart, limits.final)


def _diagnose_gradients(pair: ArmPair) -> str | None:
    """Return why the first gradients differ; None if they agree or no hypothesis fits."""
    arm, base = pair.arm, pair.base
    grads, mean = [a.elements.gradient for a in arm], base[0].elements.gradient
    if any(g.shape != mean.shape for g in grads):
        return None
    wrong, are_all = _wrong_parameters(pair, grads, mean)
    if not wrong:
        return None
    elements = np.concatenate([np.arange(part.start, part.stop) for part in wrong.values()])

    def wrong_of(values: Sequence[Array | None]) -> list[Array] | None:
        # The wrong elements of each array; None unless all arrays were recorded.
        found = [v[elements] for v in values if v is not None]
        return found if found and len(found) == len(values) else None

    return explain_gradients(
        FirstGradients(
            arm=[g[elements] for g in grads],
            mean=mean[elements],
            local=wrong_of([a.elements.local for a in base]),
            before_last=wrong_of([a.elements.before_last for a in base]),
            norms=[a.steps[0].local_norm or 0.0 for a in base],
            accumulate=base[0].steps[0].micro_batches,
            slack=max(1e-5 if base[0].precision != "fp64" else 1e-10, pair.limits.gradient),
            only="" if are_all else ", ".join(list(wrong)[:3]) + ", ..." * (len(wrong) > 3),
        )
    )


def _wrong_parameters(
    pair: ArmPair, grads: list[Array], mean: Array
) -> tuple[dict[str, slice], bool]:
    """Return the parameters whose first gradient differs by more than rounding, with their slices
    of the arrays, and whether they are all whose gradient is more than rounding noise.
    """
    limits = pair.limits
    parts = [
        (name, part, max(distance(g[part], mean[part]) for g in grads))
        for name, part in pair.arm[0].elements.segments()
    ]
    if any(0 < apart <= limits.gradient for _, _, apart in parts):
        # Some gradients differ by rounding: leave out parameters whose gradient is rounding noise.
        largest = np.max(np.abs([*grads, mean]), axis=0)
        least = limits.noise * rms(mean[np.isfinite(mean)])
        parts = [found for found in parts if not (largest[found[1]] < least).all()]
    wrong = {name: part for name, part, apart in parts if apart > limits.gradient}
    return wrong, len(wrong) == len(parts)


_PARAMETERS, _GRADIENT = "norm of the parameters", "norm of the gradient"
# In the order of their computation.
_QUANTITIES = {_PARAMETERS: "parameter_norm", _GRADIENT: "gradient_norm"}


class _StepDifference(NamedTuple):
    """A quantity of one step that differs between two arms."""

    step: int
    name: str
    rank: int
    mine: float
    its: float


def _differences_by_step(pair: ArmPair, limit: float) -> Iterator[_StepDifference]:
    """Yield the quantities that differ by more than `limit`, in the order of their computation."""
    for index in range(min(len(a.steps) for a in (*pair.arm, *pair.base))):
        for name, field in _QUANTITIES.items():
            for a, b in pair.ranks:
                mine, its = (getattr(x.steps[index], field) for x in (a, b))
                if relative_difference(mine, its) > limit:
                    yield _StepDifference(index + 1, name, a.rank, mine, its)


def first_difference(pair: ArmPair) -> str:
    """Describe the first difference beyond rounding; else, in bitwise mode, the first at all."""
    limits = pair.limits
    for limit in (limits.final, 0.0) if limits.bitwise else (limits.final,):
        if first := next(_differences_by_step(pair, limit), None):
            values = tell_apart(first.mine, first.its, 8)
            return (
                f"what differs first is the {first.name} in step {first.step} on rank "
                f"{first.rank}: {values[0]}, not {values[1]}"
            )
    return ""


def _diagnose_rounding(pair: ArmPair) -> str | None:
    """Return the cause of differences that may be mere rounding, by what differs first.

    If parameters do, after a step with equal gradients, the update is different, however little.
    """
    first = next(_differences_by_step(pair, 0.0), None)
    if first is None and pair.has_equal_parameters:
        return diagnosis.OTHER_BUFFERS
    if first is None or first.name == _PARAMETERS:
        return diagnosis.OTHER_UPDATE
    within = relative_difference(first.mine, first.its) <= pair.limits.gradient
    return diagnosis.ROUNDING if within else None


def percent(apart: float) -> str:
    """Return a relative difference as text."""
    if not np.isfinite(apart):
        return "a non-finite amount"
    return f"{apart:.0%}" if apart >= 0.01 else f"{apart:.1e}"


def _with_hint(text: str, apart: float, pair: ArmPair) -> str:
    """Append to `text`, where it applies, that the parameters hide the difference."""
    final, _ = pair.final_distance()
    if final > apart / 10 or not pair.limits.gradient:
        return text
    return (
        f"{text}, although the parameters differ by {percent(final)} only: Adam and its kind "
        "take the same step whatever the scale of the gradients"
    )
