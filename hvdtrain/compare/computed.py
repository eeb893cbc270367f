"""What two arms have computed: gradients, parameters and buffers, within limits.

Bits that differ are refused where arms must be bitwise equal, but a cause is looked for beyond
rounding first: on some CPUs a fault leaves rounding in numbers that it does not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.compare import causes, gradients
from hvdtrain.compare.account import Array, Ranks, StepAccount, steps_of
from hvdtrain.compare.causes import Cause, distance
from hvdtrain.compare.counted import Refusal
from hvdtrain.compare.gradients import Gradients
from hvdtrain.compare.wording import tell_apart

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Limits:
    """How far rounding takes two arms apart, and whether they may be."""

    gradient: float
    """Of one step, relative to the norm of the gradient."""
    final: float
    """Of the parameters at the end, relative to how far training moved them."""
    noise: float
    """A gradient this small beside those of the other elements is nothing but rounding."""
    reason: str
    """Why this much, or why nothing."""
    bitwise: bool = False
    """Whether nothing may differ, rounding included."""


def computed(arm: Ranks, base: Ranks, local: Ranks | None, limits: Limits) -> Iterator[Refusal]:
    """The differences; all that is counted is the same. `local`: accounts without communication."""
    cause = _gradient_cause(arm, base, local, limits)
    yield from _differences(arm, base, replace(limits, bitwise=False), cause)
    if limits.bitwise:
        cause = cause or _cause_of_bits(arm, base, limits)
        exact = replace(limits, gradient=0.0, final=0.0, noise=0.0)
        for refusal in _differences(arm, base, exact, cause):
            yield replace(refusal, cause=cause)


def _differences(arm: Ranks, base: Ranks, limits: Limits, cause: Cause | None) -> Iterator[Refusal]:
    """What is further apart than `limits`. `cause`: why the first gradients are."""
    steps = f"{len(arm[0].steps)} steps"
    if len({a.final_sha256 for a in arm}) > 1:
        text = f"the ranks of this arm have different parameters after {steps}: not synchronised"
        yield Refusal(text, cause)
    yield from _first_gradients(arm, base, limits, cause)
    yield from _norms(arm, base, limits)
    apart, _ = final_distance(arm, base, limits)
    if apart > limits.final or (limits.bitwise and _finals(arm) != _finals(base)):
        text = f"parameters differ by {_relative(apart)} of how far training moved them in {steps}"
        if apart == 0:
            text = f"parameters differ after {steps}, though not in the elements that are sampled"
        yield Refusal(text, cause or causes.of_update(), apart, limits.final)
    yield from _buffers(arm, base, limits)


def _first_gradients(
    arm: Ranks, base: Ranks, limits: Limits, cause: Cause | None
) -> Iterator[Refusal]:
    apart = gradient_distance(arm, base)
    if apart > limits.gradient:
        text = f"the gradient of the first step differs by {_relative(apart)} of its norm"
        yield Refusal(_hint(text, apart, arm, base, limits), cause, apart, limits.gradient)
    pairs = zip(arm, base, strict=True)
    apart = max(_distance(a.samples.used, b.samples.used) for a, b in pairs)
    if apart > limits.gradient:
        if arm[0].samples.gradient is not None:  # and that was right
            norms = [ranks[0].steps[0].used_norm or 0.0 for ranks in (arm, base)]
            cause = causes.of_use(norms[0], norms[1])
        text = f"the first step uses a gradient that differs by {_relative(apart)} of its norm"
        yield Refusal(_hint(text, apart, arm, base, limits), cause, apart, limits.gradient)


def _norms(arm: Ranks, base: Ranks, limits: Limits) -> Iterator[Refusal]:
    """Of later gradients: `limits.final`, since they are those of parameters that have parted."""
    found = list(_parted(arm, base, limits.final))
    for step, name, rank, mine, its in found:
        if name == _LOSS:
            continue
        first, cause = found[0], None
        if first.name == _LOSS and first.step == step > 1:
            cause = causes.of_update()
        elif name == _USED and not any((f.step, f.name) == (step, _GRADIENT) for f in found):
            cause = causes.of_use(mine, its)
        apart = _apart(mine, its)
        text = f"the {name} in step {step} on rank {rank} differs by {_relative(apart)}"
        yield Refusal(text, cause, apart, limits.final)


def _buffers(arm: Ranks, base: Ranks, limits: Limits) -> Iterator[Refusal]:
    def hashes(ranks: Ranks) -> list[str]:
        return [a.final_buffers_sha256 for a in ranks]

    policy = arm[0].buffers_policy
    agree = policy == "local" or len({*hashes(arm)}) <= len({*hashes(base)})
    if not agree:
        yield Refusal(
            "the ranks of this arm have different buffers", causes.of_buffers(policy, False)
        )
    apart = _buffer_distance(arm, base, limits)
    if apart > limits.final or (limits.bitwise and hashes(arm) != hashes(base)):
        text = f"buffers differ by {_relative(apart)} after {len(arm[0].steps)} steps"
        if apart == 0:
            text = "buffers differ, though not in the elements that are sampled"
        yield Refusal(text, causes.of_buffers(policy, True), apart, limits.final)


def _gradient_cause(arm: Ranks, base: Ranks, local: Ranks | None, limits: Limits) -> Cause | None:
    """Why the gradients of the first step differ; None if they do not, or nothing explains it."""
    # A hand-written loop has no finish_backward: what its optimizer used is all that is known.
    known = all(a.samples.gradient is not None for a in (*arm, *base))
    mine = [a.samples.gradient if known else a.samples.used for a in arm]
    mean = base[0].samples.gradient if known else base[0].samples.used
    if mean is None or any(g is None or g.shape != mean.shape for g in mine):
        return None
    grads = [g for g in mine if g is not None]
    parts = [
        (name, part, max(distance(g[part], mean[part]) for g in grads))
        for name, part in arm[0].samples.segments()
    ]
    if any(0 < apart <= limits.gradient for _, _, apart in parts):
        # Rounding is at work, and may be all that some parameters have for a gradient.
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
        parts = [v[where] for v in values if v is not None]
        return parts if parts and len(parts) == len(values) else None

    silent = local or ()
    return gradients.explain(
        Gradients(
            arm=[g[where] for g in grads],
            mean=mean[where],
            local=at([a.samples.gradient for a in silent]),
            before_last=at([a.samples.before_last for a in silent]),
            norms=[a.steps[0].gradient_norm or 0.0 for a in silent],
            accumulate=base[0].steps[0].micro_batches,
            slack=max(1e-5 if base[0].precision != "fp64" else 1e-10, limits.gradient),
            only="" if every else names,
        )
    )


_PARAMETERS, _LOSS, _GRADIENT = "norm of the parameters", "loss", "norm of the gradient"
_USED = f"{_GRADIENT} that the optimizer used"
_QUANTITIES: dict[str, Callable[[StepAccount], float | None]] = {
    _PARAMETERS: lambda step: step.parameter_norm,  # before the step
    _LOSS: lambda step: step.loss,
    _GRADIENT: lambda step: step.gradient_norm,
    _USED: lambda step: step.used_norm,
}


class _Parted(NamedTuple):
    """A quantity of a step in which two arms differ."""

    step: int
    name: str
    rank: int
    mine: float
    its: float


def _parted(
    arm: Ranks, base: Ranks, limit: float, names: Sequence[str] = (_LOSS, _GRADIENT, _USED)
) -> Iterator[_Parted]:
    """The quantities that differ by more than `limit`, in the order in which steps make them."""
    for number in range(1, min(len(a.steps) for a in (*arm, *base)) + 1):
        for name in names:
            for a, b in zip(arm, base, strict=True):
                mine, its = (_QUANTITIES[name](x.steps[number - 1]) for x in (a, b))
                if mine is not None and its is not None and _apart(mine, its) > limit:
                    yield _Parted(number, name, a.rank, mine, its)


def where_they_part(arm: Ranks, base: Ranks, limits: Limits) -> str:
    """The first quantity and step that differ: beyond rounding, else at all if none may."""
    for limit in (limits.final, 0.0) if limits.bitwise else (limits.final,):
        if first := next(_parted(arm, base, limit), None):
            values = tell_apart(first.mine, first.its, 8)
            return (
                f"what differs first is the {first.name} in step {first.step} on rank "
                f"{first.rank}: {values[0]}, not {values[1]}"
            )
    return ""


def _cause_of_bits(arm: Ranks, base: Ranks, limits: Limits) -> Cause | None:
    """Why bits differ where all may be rounding: what differs first tells.

    Parameters that do, after a step that was the same until then, have been moved, however little.
    """
    first = next(_parted(arm, base, 0.0, list(_QUANTITIES)), None)
    if first is None and _finals(arm) == _finals(base):
        return causes.of_buffers(arm[0].buffers_policy, True)
    if first is None or first.name == _PARAMETERS:
        return causes.of_update()
    if first.name == _USED:
        return causes.of_use(first.mine, first.its)
    within = _apart(first.mine, first.its) <= limits.gradient
    return causes.of_rounding() if within else None


def _finals(ranks: Ranks) -> list[str]:
    return [a.final_sha256 for a in ranks]


def bitwise(arm: Ranks, base: Ranks) -> bool:
    """Whether parameters and buffers are the same at the end, and the first gradients were."""
    return (
        len(arm) == len(base)
        and _finals(arm) == _finals(base)
        and [a.final_buffers_sha256 for a in arm] == [b.final_buffers_sha256 for b in base]
        and gradient_distance(arm, base) == 0
    )


def _distance(a: Array | None, b: Array | None, scale: Array | None = None) -> float:
    """Nothing is known, and nothing held against an arm, where one of them was not recorded."""
    return 0.0 if a is None or b is None else distance(a, b, scale)


def gradient_distance(arm: Ranks, base: Ranks) -> float:
    """Of the first step, after `finish_backward`, relative to its norm."""
    pairs = zip(arm, base, strict=True)
    return max(_distance(a.samples.gradient, b.samples.gradient) for a, b in pairs)


def final_distance(arm: Ranks, base: Ranks, limits: Limits) -> tuple[float, float]:
    """Relative to how far training moved the parameters: what is left of the initial values, which
    all share, would hide any difference after a few steps.

    Then the share of the elements that is left out of both, as `_noise`.
    """
    noise = _noise(arm, base, limits)

    def of(values: Array | None) -> Array | None:
        return None if values is None else values[~noise]

    start, end = of(base[0].samples.initial), of(base[0].samples.final)
    moved = None if start is None or end is None else end - start
    pairs = zip(arm, base, strict=True)
    apart = max(_distance(of(a.samples.final), of(b.samples.final), moved) for a, b in pairs)
    return apart, float(np.mean(noise))


def _noise(arm: Ranks, base: Ranks, limits: Limits) -> Mask:
    """The elements that have parted, and whose gradient is nothing but rounding: it explains that.

    The true gradient of a bias before BatchNorm, or of attention's keys, is zero. Adam and its kind
    take steps of full size on what rounding leaves, which the order of a sum decides.
    """
    samples = base[0].samples
    if limits.bitwise or samples.largest is None or samples.final is None:
        return np.zeros(len(samples.initial), dtype=bool)
    size, moved = samples.largest, np.abs(samples.final - samples.initial)
    noise: Mask = (size > 0) & (size < limits.noise * _rms(size[np.isfinite(size) & (size > 0)]))
    # Twice as far apart as training takes any element, at most. And by no more than the baseline
    # moves these: SGD hardly does. (A hundredfold, since one may have come back to its start.)
    furthest = min(2 * moved.max(initial=0), 100 * moved[noise].max(initial=0))
    apart = _furthest_apart(arm, base)
    noise &= (apart > limits.final * _rms(moved)) & (apart <= furthest)
    return noise


def _rms(values: Array) -> float:
    return float(np.linalg.norm(values)) / math.sqrt(max(1, values.size))


def _buffer_distance(arm: Ranks, base: Ranks, limits: Limits) -> float:
    """Of those that noise in the parameters does not explain: BatchNorm's mean follows a bias."""
    noise = _noise(arm, base, limits)
    # Twice: they may have been further apart before the end.
    slack = 2 * _furthest_apart(arm, base)[noise].max(initial=0)

    def distance_of(a: Array | None, b: Array | None) -> float:
        if slack and a is not None and b is not None and a.shape == b.shape:
            a = np.where(np.abs(a - b) <= slack, b, a)
        return _distance(a, b)

    pairs = zip(arm, base, strict=True)
    return max(distance_of(a.samples.buffers, b.samples.buffers) for a, b in pairs)


def _furthest_apart(arm: Ranks, base: Ranks) -> Array:
    """Of every element of the final parameters, over the ranks."""
    pairs = [(a.samples.final, b.samples.final) for a, b in zip(arm, base, strict=True)]
    with np.errstate(invalid="ignore"):
        apart = [np.abs(a - b) for a, b in pairs if a is not None and b is not None]
    return np.asarray(np.max(apart or [np.zeros(len(base[0].samples.initial))], axis=0))


def spread(arm: Ranks, base: Ranks, limits: Limits) -> float:
    """The largest distance of all that `limits.final` limits."""
    norms = (
        max(_apart(a.gradient_norm, b.gradient_norm), _apart(a.used_norm, b.used_norm))
        for _, _, a, b in steps_of(arm, base)
    )
    return max(final_distance(arm, base, limits)[0], _buffer_distance(arm, base, limits), *norms)


def _apart(a: float | None, b: float | None) -> float:
    if a is None or b is None or a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    return abs(a - b) / abs(b) if b and math.isfinite(a) and math.isfinite(b) else math.inf


def _relative(apart: float) -> str:
    if not math.isfinite(apart):
        return "more than can be said"
    return f"{apart:.0%}" if apart >= 0.01 else f"{apart:.1e}"


def _hint(text: str, apart: float, arm: Ranks, base: Ranks, limits: Limits) -> str:
    """Say where the parameters hide what is wrong."""
    final, _ = final_distance(arm, base, limits)
    if final > apart / 10 or not limits.gradient:
        return text
    return (
        f"{text}, although the parameters differ by {_relative(final)} only: Adam and its kind "
        "take the same step whatever the scale of the gradients"
    )
