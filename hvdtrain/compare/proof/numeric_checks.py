"""The numeric part of the parity check: gradients, parameters and buffers, within tolerances.

`parity` runs it after `exact_checks`. Where arms must be bitwise equal, no bit may differ.
Differences beyond rounding are still reported first, because they show the cause: on some CPUs a
fault also leaves rounding differences in numbers that it does not otherwise change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compare.formatting import tell_apart
from hvdtrain.compare.proof import diagnosis
from hvdtrain.compare.proof.diagnosis import distance
from hvdtrain.compare.proof.exact_checks import Difference
from hvdtrain.compare.proof.gradient_diagnosis import FirstGradients, explain_gradients
from hvdtrain.compare.proof.work_trace import ArmTraces, Array, StepTrace, paired_steps

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Limits:
    """Tolerances for the rounding differences of two arms, and whether any are allowed."""

    gradient: float
    """For the gradient of one step, relative to its norm."""
    final: float
    """For the final parameters, relative to how far training moved them."""
    noise: float
    """A gradient below this fraction of the RMS over all elements is pure rounding noise."""
    reason: str
    """Why the limits have these values, or why nothing may differ."""
    bitwise: bool = False
    """Whether nothing may differ, not even by rounding."""


def numeric_differences(
    arm: ArmTraces, base: ArmTraces, local: ArmTraces | None, limits: Limits
) -> Iterator[Difference]:
    """Yield the differences of two arms whose counts are equal.

    `local`: the traces of the arm without communication.
    """
    # First within tolerances, then bit by bit: a real fault is reported before mere rounding.
    cause = _diagnose_gradients(arm, base, local, limits)
    yield from _differences(arm, base, replace(limits, bitwise=False), cause)
    if limits.bitwise:
        cause = cause or _diagnose_rounding(arm, base, limits)
        exact = replace(limits, gradient=0.0, final=0.0, noise=0.0)
        for difference in _differences(arm, base, exact, cause):
            yield replace(difference, cause=cause)


def _differences(
    arm: ArmTraces, base: ArmTraces, limits: Limits, cause: str | None
) -> Iterator[Difference]:
    """Yield what differs by more than `limits`. `cause`: why the first gradients differ."""
    steps = f"{len(arm[0].steps)} steps"
    if len({a.final_sha256 for a in arm}) > 1:
        text = f"the ranks of this arm have different parameters after {steps}: not synchronised"
        yield Difference(text, cause)
    yield from _first_gradients(arm, base, limits, cause)
    yield from _norms(arm, base, limits)
    apart, _ = final_distance(arm, base, limits)
    if apart > limits.final or (limits.bitwise and _finals(arm) != _finals(base)):
        text = f"parameters differ by {_percent(apart)} of how far training moved them in {steps}"
        if apart == 0:
            text = f"parameters differ after {steps}, though not in the elements that are sampled"
        yield Difference(text, cause or diagnosis.explain_update(), apart, limits.final)
    yield from _buffers(arm, base, limits)


def _first_gradients(
    arm: ArmTraces, base: ArmTraces, limits: Limits, cause: str | None
) -> Iterator[Difference]:
    """Yield differences in the first step's gradient, as reduced and as the optimizer used it."""
    apart = gradient_distance(arm, base)
    if apart > limits.gradient:
        text = f"the gradient of the first step differs by {_percent(apart)} of its norm"
        yield Difference(_with_hint(text, apart, arm, base, limits), cause, apart, limits.gradient)
    pairs = zip(arm, base, strict=True)
    apart = max(_distance(a.elements.used, b.elements.used) for a, b in pairs)
    if apart > limits.gradient:
        if arm[0].elements.gradient is not None:  # and it is right: else it was refused above
            norms = [ranks[0].steps[0].used_norm or 0.0 for ranks in (arm, base)]
            cause = diagnosis.explain_use(norms[0], norms[1])
        text = f"the first step uses a gradient that differs by {_percent(apart)} of its norm"
        yield Difference(_with_hint(text, apart, arm, base, limits), cause, apart, limits.gradient)


def _norms(arm: ArmTraces, base: ArmTraces, limits: Limits) -> Iterator[Difference]:
    """Yield differences in the gradient norms of all steps.

    The limit is `limits.final`: later gradients are of parameters that already differ by rounding.
    """
    found = list(_differences_by_step(arm, base, limits.final))
    for step, name, rank, mine, its in found:
        if name == _LOSS:
            continue
        first, cause = found[0], None
        if first.name == _LOSS and first.step == step > 1:
            cause = diagnosis.explain_update()
        elif name == _USED and not any((f.step, f.name) == (step, _GRADIENT) for f in found):
            cause = diagnosis.explain_use(mine, its)
        apart = _relative(mine, its)
        text = f"the {name} in step {step} on rank {rank} differs by {_percent(apart)}"
        yield Difference(text, cause, apart, limits.final)


def _buffers(arm: ArmTraces, base: ArmTraces, limits: Limits) -> Iterator[Difference]:
    """Yield differences in the final buffers, between the arm's ranks and from the baseline."""

    def hashes(ranks: ArmTraces) -> list[str]:
        return [a.final_buffers_sha256 for a in ranks]

    policy = arm[0].buffers_policy
    agree = policy == "local" or len({*hashes(arm)}) <= len({*hashes(base)})
    if not agree:  # more versions among the ranks than the baseline has
        yield Difference(
            "the ranks of this arm have different buffers", diagnosis.explain_buffers(policy, False)
        )
    apart = _buffer_distance(arm, base, limits)
    if apart > limits.final or (limits.bitwise and hashes(arm) != hashes(base)):
        text = f"buffers differ by {_percent(apart)} after {len(arm[0].steps)} steps"
        if apart == 0:
            text = "buffers differ, though not in the elements that are sampled"
        yield Difference(text, diagnosis.explain_buffers(policy, True), apart, limits.final)


def _diagnose_gradients(
    arm: ArmTraces, base: ArmTraces, local: ArmTraces | None, limits: Limits
) -> str | None:
    """Return why the first gradients differ; None if they agree or no hypothesis fits."""
    # A hand-written loop never calls finish_backward: only the gradient at step() is recorded.
    known = all(a.elements.gradient is not None for a in (*arm, *base))
    mine = [a.elements.gradient if known else a.elements.used for a in arm]
    mean = base[0].elements.gradient if known else base[0].elements.used
    if mean is None or any(g is None or g.shape != mean.shape for g in mine):
        return None
    grads = [g for g in mine if g is not None]
    parts = [
        (name, part, max(distance(g[part], mean[part]) for g in grads))
        for name, part in arm[0].elements.segments()
    ]
    if any(0 < apart <= limits.gradient for _, _, apart in parts):
        # Some gradients differ by rounding: leave out parameters whose gradient is rounding noise.
        largest = np.max(np.abs([*grads, mean]), axis=0)
        least = limits.noise * _rms(mean[np.isfinite(mean)])
        parts = [of for of in parts if not (largest[of[1]] < least).all()]
    wrong = [(name, part) for name, part, apart in parts if apart > limits.gradient]
    if not wrong:
        return None
    every = len(wrong) == len(parts)
    where = np.concatenate([np.arange(part.start, part.stop) for _, part in wrong])
    names = ", ".join(name for name, _ in wrong[:3]) + (", ..." if len(wrong) > 3 else "")

    def at(values: Sequence[Array | None]) -> list[Array] | None:
        # The wrong elements of each array; None unless all arrays were recorded.
        parts = [v[where] for v in values if v is not None]
        return parts if parts and len(parts) == len(values) else None

    silent = local or ()
    return explain_gradients(
        FirstGradients(
            arm=[g[where] for g in grads],
            mean=mean[where],
            local=at([a.elements.gradient for a in silent]),
            before_last=at([a.elements.before_last for a in silent]),
            norms=[a.steps[0].gradient_norm or 0.0 for a in silent],
            accumulate=base[0].steps[0].micro_batches,
            slack=max(1e-5 if base[0].precision != "fp64" else 1e-10, limits.gradient),
            only="" if every else names,
        )
    )


_PARAMETERS, _LOSS, _GRADIENT = "norm of the parameters", "loss", "norm of the gradient"
_USED = f"{_GRADIENT} that the optimizer used"
_QUANTITIES: dict[str, Callable[[StepTrace], float | None]] = {
    _PARAMETERS: lambda step: step.parameter_norm,  # before the step
    _LOSS: lambda step: step.loss,
    _GRADIENT: lambda step: step.gradient_norm,
    _USED: lambda step: step.used_norm,
}


class _StepDifference(NamedTuple):
    """A quantity of one step that differs between two arms."""

    step: int
    name: str
    rank: int
    mine: float
    its: float


def _differences_by_step(
    arm: ArmTraces, base: ArmTraces, limit: float, names: Sequence[str] = (_LOSS, _GRADIENT, _USED)
) -> Iterator[_StepDifference]:
    """Yield the quantities that differ by more than `limit`, in the order of their computation."""
    for number in range(1, min(len(a.steps) for a in (*arm, *base)) + 1):
        for name in names:
            for a, b in zip(arm, base, strict=True):
                mine, its = (_QUANTITIES[name](x.steps[number - 1]) for x in (a, b))
                if mine is not None and its is not None and _relative(mine, its) > limit:
                    yield _StepDifference(number, name, a.rank, mine, its)


def first_difference(arm: ArmTraces, base: ArmTraces, limits: Limits) -> str:
    """Describe the first difference beyond rounding; else, in bitwise mode, the first at all."""
    for limit in (limits.final, 0.0) if limits.bitwise else (limits.final,):
        if first := next(_differences_by_step(arm, base, limit), None):
            values = tell_apart(first.mine, first.its, 8)
            return (
                f"what differs first is the {first.name} in step {first.step} on rank "
                f"{first.rank}: {values[0]}, not {values[1]}"
            )
    return ""


def _diagnose_rounding(arm: ArmTraces, base: ArmTraces, limits: Limits) -> str | None:
    """Return the cause of differences that may be mere rounding, by what differs first.

    If parameters do, after a step with equal gradients, the update is different, however little.
    """
    first = next(_differences_by_step(arm, base, 0.0, list(_QUANTITIES)), None)
    if first is None and _finals(arm) == _finals(base):
        return diagnosis.explain_buffers(arm[0].buffers_policy, True)
    if first is None or first.name == _PARAMETERS:
        return diagnosis.explain_update()
    if first.name == _USED:
        return diagnosis.explain_use(first.mine, first.its)
    within = _relative(first.mine, first.its) <= limits.gradient
    return diagnosis.explain_rounding() if within else None


def _finals(ranks: ArmTraces) -> list[str]:
    return [a.final_sha256 for a in ranks]


def is_bitwise_equal(arm: ArmTraces, base: ArmTraces) -> bool:
    """Return whether final parameters, final buffers and first gradients are bitwise equal."""
    return (
        len(arm) == len(base)
        and _finals(arm) == _finals(base)
        and [a.final_buffers_sha256 for a in arm] == [b.final_buffers_sha256 for b in base]
        and gradient_distance(arm, base) == 0
    )


def _distance(a: Array | None, b: Array | None, scale: Array | None = None) -> float:
    """Return `distance`, or 0 if an array was not recorded: missing data is no difference."""
    return 0.0 if a is None or b is None else distance(a, b, scale)


def gradient_distance(arm: ArmTraces, base: ArmTraces) -> float:
    """Return the largest distance, over ranks, of the first step's reduced gradient."""
    pairs = zip(arm, base, strict=True)
    return max(_distance(a.elements.gradient, b.elements.gradient) for a, b in pairs)


def final_distance(arm: ArmTraces, base: ArmTraces, limits: Limits) -> tuple[float, float]:
    """Return the largest distance of the final parameters, relative to how far training moved them,
    and the fraction of elements that is left out as rounding noise (see `_noise`).

    Relative to the parameters themselves, the initial values, which all arms share, would hide any
    difference of a few steps.
    """
    noise = _noise(arm, base, limits)

    def of(values: Array | None) -> Array | None:
        return None if values is None else values[~noise]

    start, end = of(base[0].elements.initial), of(base[0].elements.final)
    moved = None if start is None or end is None else end - start
    pairs = zip(arm, base, strict=True)
    apart = max(_distance(of(a.elements.final), of(b.elements.final), moved) for a, b in pairs)
    return apart, float(np.mean(noise))


def _noise(arm: ArmTraces, base: ArmTraces, limits: Limits) -> Mask:
    """Return the elements that differ only because their gradient is pure rounding noise.

    The true gradient of a bias before BatchNorm, or of the bias of attention's keys, is zero. Adam
    and its variants take full-size steps on the rounding error, which the order of a sum decides.
    """
    samples = base[0].elements
    if limits.bitwise or samples.largest is None or samples.final is None:
        return np.zeros(len(samples.initial), dtype=bool)
    size, moved = samples.largest, np.abs(samples.final - samples.initial)
    noise: Mask = (size > 0) & (size < limits.noise * _rms(size[np.isfinite(size) & (size > 0)]))
    # Noise explains at most twice the largest movement of any element, and no more than the
    # baseline moves noisy elements: SGD hardly moves them. (Times 100, because a noisy element may
    # have returned to its start.)
    furthest = min(2 * moved.max(initial=0), 100 * moved[noise].max(initial=0))
    apart = _largest_differences(arm, base)
    noise &= (apart > limits.final * _rms(moved)) & (apart <= furthest)
    return noise


def _rms(values: Array) -> float:
    return float(np.linalg.norm(values)) / math.sqrt(max(1, values.size))


def _buffer_distance(arm: ArmTraces, base: ArmTraces, limits: Limits) -> float:
    """Return the distance of the buffers, less what noisy parameters explain: BatchNorm's running
    mean follows a bias. Its running variance does not, and shows another policy all the same.
    """
    noise = _noise(arm, base, limits)
    # Twice: the parameters may have been further apart before the last step.
    slack = 2 * _largest_differences(arm, base)[noise].max(initial=0)
    means = base[0].elements.means

    def distance_of(a: Array | None, b: Array | None) -> float:
        if slack and a is not None and b is not None and a.shape == b.shape:
            follows = True if means is None else means > 0
            a = np.where(follows & (np.abs(a - b) <= slack), b, a)
        return _distance(a, b)

    pairs = zip(arm, base, strict=True)
    return max(distance_of(a.elements.buffers, b.elements.buffers) for a, b in pairs)


def _largest_differences(arm: ArmTraces, base: ArmTraces) -> Array:
    """Return the largest difference, over ranks, of every element of the final parameters."""
    pairs = [(a.elements.final, b.elements.final) for a, b in zip(arm, base, strict=True)]
    with np.errstate(invalid="ignore"):
        apart = [np.abs(a - b) for a, b in pairs if a is not None and b is not None]
    return np.asarray(np.max(apart or [np.zeros(len(base[0].elements.initial))], axis=0))


def largest_distance(arm: ArmTraces, base: ArmTraces, limits: Limits) -> float:
    """Return the largest of all distances that `limits.final` bounds."""
    norms = (
        max(
            _relative(a.gradient_norm, b.gradient_norm),
            _relative(a.used_norm, b.used_norm),
        )
        for _, _, a, b in paired_steps(arm, base)
    )
    return max(final_distance(arm, base, limits)[0], _buffer_distance(arm, base, limits), *norms)


def _relative(a: float | None, b: float | None) -> float:
    """Return the relative difference of two numbers; 0 if one is unknown or both are NaN."""
    if a is None or b is None or a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / abs(b) if b and math.isfinite(a) and math.isfinite(b) else math.inf


def _percent(apart: float) -> str:
    if not math.isfinite(apart):
        return "more than can be said"
    return f"{apart:.0%}" if apart >= 0.01 else f"{apart:.1e}"


def _with_hint(text: str, apart: float, arm: ArmTraces, base: ArmTraces, limits: Limits) -> str:
    """Append to `text`, where it applies, that the parameters hide the difference."""
    final, _ = final_distance(arm, base, limits)
    if final > apart / 10 or not limits.gradient:
        return text
    return (
        f"{text}, although the parameters differ by {_percent(final)} only: Adam and its kind "
        "take the same step whatever the scale of the gradients"
    )
