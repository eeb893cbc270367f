"""What must be equal in two arms, in one order: what is counted first, then what is computed.

`parity` takes the first difference: a cause stands before its effects, so that it explains the
later ones. Counts are the same or not. Numbers are held against limits; where arms must be bitwise
equal, first within tolerances and then bit by bit, because on some CPUs a fault leaves rounding
differences in numbers that it does not otherwise change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from hvdtrain.compare.formatting import tell_apart
from hvdtrain.compare.proof import diagnosis
from hvdtrain.compare.proof.diagnosis import Found
from hvdtrain.compare.proof.distances import ArmPair, distance
from hvdtrain.compare.proof.gradient_diagnosis import explain_gradients


@dataclass(frozen=True)
class Difference:
    """A difference between an arm's work and the baseline's, with its likely cause."""

    text: str
    cause: str | None = None
    distance: float | None = None
    """How far apart the numbers are, in the measure of the check."""
    tolerance: float | None = None


def differences(pair: ArmPair, baseline: str) -> Iterator[Difference]:
    """Yield the differences of an arm and the baseline, causes first."""
    yield from _counted(pair, baseline)
    yield from _computed(pair)


# Counts


class Check(NamedTuple):
    """Something that is the same in two arms that do equal work."""

    text: str
    """With {} for the arm's value."""
    value: Callable[[Any], Any]
    """Of a RankTrace, or of a StepTrace. Where it is [] it was not seen."""
    cause: str | Callable[[Found], str]
    show: Callable[[Any, Any], tuple[object, object]] = lambda mine, its: (mine, its)
    """Return what the text says of both values."""


def _sizes(mine: Any, its: Any) -> tuple[str, str]:
    """Describe two models by their parameters, and the first that differs."""
    first = next((pair for pair in zip(mine[1:], its[1:], strict=False) if len({*pair}) > 1), ())
    names = [f" (the first that differs: {size} elements)" for size in first] or ["", ""]
    a, b = (f"{one[0]} parameters in {len(one) - 1} tensors" for one in (mine, its))
    return a + names[0], b + names[1]


def _settings(mine: list[dict[str, str]], its: list[dict[str, str]]) -> tuple[str, str]:
    """Describe the hyper-parameters that differ."""
    if len(mine) != len(its):
        return f"of {len(mine)} groups", f"{len(its)}"
    keys = {k for a, b in zip(mine, its, strict=True) for k in {*a, *b} if a.get(k) != b.get(k)}

    def text(groups: list[dict[str, str]]) -> str:
        return "; ".join(
            ", ".join(f"{k}={g.get(k, 'unset')}" for k in sorted(keys)) for g in groups
        )

    return text(mine), text(its)


def _rates(mine: list[float], its: list[float]) -> tuple[str, str]:
    """Show the first learning rate that differs."""
    return next((tell_apart(a, b, 6) for a, b in zip(mine, its, strict=False) if a != b))


def _samples(mine: list[str], its: list[str]) -> tuple[object, object]:
    return (len(mine), len(its)) if len(mine) != len(its) else ("other", "its own")


_OF_RANKS = (
    Check(
        "a world of {} ranks",
        lambda t: t.world_size,
        "the backend does not know this launcher: models train side by side",
    ),
    Check("parameters of {}", lambda t: ", ".join(sorted(t.parameters)), diagnosis.explain_dtype),
    Check(
        "another model: {}",
        lambda t: [sum(t.parameters.values()), *(size for _, size in t.elements.layout)],
        "its code is another, or makes another model under this launcher",
        _sizes,
    ),
    Check(
        "{} initial parameters",
        lambda t: t.initial_sha256,
        diagnosis.explain_weights,
        lambda mine, its: ("other", "its own"),
    ),
    Check("precision {}", lambda t: t.precision, "this one sets another: give all the same"),
    Check("optimizer {}", lambda t: t.optimizer, "this one makes another: give all the same"),
    Check(
        "settings {}",
        lambda t: t.settings,
        "an optimizer that was made anew may have its class's own defaults: see what this arm "
        "makes of the parameter groups",
        _settings,
    ),
    Check(
        "an optimizer that counts {} steps before the first",
        lambda t: t.state_step,
        diagnosis.explain_state,
    ),
)
_OF_STEPS = (
    Check("learning rate {}", lambda s: s.lr, diagnosis.explain_rate, _rates),
    Check(
        "{} micro-batches",
        lambda s: s.micro_batches,
        "accumulation windows begin or end at other micro-batches",
    ),
    Check("{} samples", lambda s: s.samples, diagnosis.explain_samples, _samples),
    Check("gradients of {}", lambda s: ", ".join(s.gradient_dtypes), diagnosis.explain_dtype),
    Check(
        "{} bytes of gradients",
        lambda s: s.gradient_bytes,
        "parameters without a gradient are skipped in one, and zeros in the other",
    ),
)


def _counted(pair: ArmPair, baseline: str) -> Iterator[Difference]:
    """Yield the differences in what is counted."""
    ranks = [(0, a.rank, a, b) for a, b in pair.ranks]
    of_ranks = ((check, *place) for check in _OF_RANKS for place in ranks)
    of_steps = ((check, *place) for check in _OF_STEPS for place in pair.steps)
    for check, step, rank, a, b in chain(of_ranks, of_steps):
        mine, its = check.value(a), check.value(b)
        if mine == its or [] in (mine, its):
            continue
        shown = check.show(mine, its)
        where = f" in step {step} on rank {rank}" if step else ""
        cause = check.cause
        if not isinstance(cause, str):
            cause = cause(Found(pair, mine, its, step))
        yield Difference(f"{check.text.format(shown[0])}{where}, {baseline} has {shown[1]}", cause)


# Numbers


def _computed(pair: ArmPair) -> Iterator[Difference]:
    """Yield the numbers that differ by more than the limits, in the order of their computation;
    then, if nothing may differ, those that differ at all.
    """
    limits, after = pair.limits, f"after {len(pair.arm[0].steps)} steps"
    cause = explain_gradients(pair)
    if len({a.final_sha256 for a in pair.arm}) > 1:
        yield Difference(f"its ranks have different parameters {after}: not synchronised", cause)
    numbers: list[tuple[str, float, float, str | None]] = [
        (
            "the gradient of the first step differs by {} of its norm",
            pair.distance("gradient"),
            limits.gradient,
            None,
        )
    ]
    why = None
    for step, rank, a, b in pair.steps:
        text = f" in step {step} on rank {rank} differs by {{}}"
        # Of parameters that differ later gradients do, too: within `limits.final`.
        apart = distance(a.gradient_norm, b.gradient_norm)
        numbers.append((f"the norm of the gradient{text}", apart, limits.final, why))
        apart = distance(a.parameter_norm, b.parameter_norm)
        why = diagnosis.OTHER_UPDATE if apart > limits.final else why
        # It hides differences, and is not limited: that is how far training moved the parameters.
        text = f"the norm of the parameters{text}"
        numbers.append((text, apart, math.inf, diagnosis.OTHER_UPDATE))
    numbers += [
        (
            f"parameters differ by {{}} of how far training moved them {after}",
            pair.final_distance()[0],
            limits.final,
            diagnosis.OTHER_UPDATE,
        ),
        (
            f"buffers differ by {{}} {after}",
            pair.buffer_distance(),
            limits.final,
            diagnosis.OTHER_BUFFERS,
        ),
    ]
    for text, apart, limit, why in numbers:
        if apart > limit:
            allowed = 0.0 if limits.bitwise else limit
            yield Difference(text.format(share(apart)), cause or why, apart, allowed)
    # Gradients may differ in the last bits of denormal numbers, which move no parameter.
    if limits.bitwise and not pair.is_bitwise_equal:
        for text, apart, _, why in numbers:
            if apart:
                why = cause or why or diagnosis.ROUNDING
                yield Difference(text.format(share(apart)), why, apart, 0.0)
        text = f"parameters or buffers differ {after}, in elements that are not sampled"
        yield Difference(text, cause)


def share(apart: float) -> str:
    """Return a relative difference as text."""
    return f"{apart:.0%}" if 0.01 <= apart < math.inf else f"{apart:.1e}"
