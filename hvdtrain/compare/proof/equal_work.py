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

from hvdtrain.compare.formatting import relative, tell_apart
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
    a, b = (
        "; ".join(", ".join(f"{k}={g.get(k, 'unset')}" for k in sorted(keys)) for g in groups)
        for groups in (mine, its)
    )
    return a, b


def _rates(mine: list[float], its: list[float]) -> tuple[str, str]:
    """Show the first learning rate that differs."""
    return next((tell_apart(a, b, 6) for a, b in zip(mine, its, strict=False) if a != b))


def _samples(mine: list[str], its: list[str]) -> tuple[object, object]:
    return (len(mine), len(its)) if len(mine) != len(its) else ("different", "its own")


_OF_RANKS = (
    Check(
        "world size {}",
        lambda t: t.world_size,
        "the script does not recognise this launcher, and each rank trains alone",
    ),
    Check("parameters of {}", lambda t: ", ".join(sorted(t.parameters)), diagnosis.explain_dtype),
    Check(
        "a different model: {}",
        lambda t: [sum(t.parameters.values()), *(size for _, size in t.elements.layout)],
        "the code differs, or builds another model under this launcher",
        _sizes,
    ),
    Check(
        "{} initial parameters",
        lambda t: t.initial_sha256,
        diagnosis.explain_weights,
        lambda mine, its: ("different", "its own"),
    ),
    Check(
        "precision {}",
        lambda t: t.precision,
        "this command sets another; give all commands the same",
    ),
    Check(
        "optimizer {}",
        lambda t: t.optimizer,
        "this command builds another; give all commands the same",
    ),
    Check(
        "settings {}",
        lambda t: t.settings,
        "an optimizer that is built again has the defaults of its class; check how this command "
        "builds the parameter groups",
        _settings,
    ),
    Check(
        "an optimizer state of step {} at the start",
        lambda t: t.state_step,
        diagnosis.explain_state,
    ),
)
_OF_STEPS = (
    Check("learning rate {}", lambda s: s.lr, diagnosis.explain_rate, _rates),
    Check(
        "micro-batches: {}",
        lambda s: s.micro_batches,
        "the steps accumulate different micro-batches",
    ),
    Check("{} samples", lambda s: s.samples, diagnosis.explain_samples, _samples),
    Check("gradients of {}", lambda s: ", ".join(s.gradient_dtypes), diagnosis.explain_dtype),
    Check(
        "{} bytes of gradients",
        lambda s: s.gradient_bytes,
        "one skips parameters without a gradient, the other fills them with zeros",
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
        yield Difference(f"{check.text.format(shown[0])}{where}; {baseline} has {shown[1]}", cause)


# Numbers


def _computed(pair: ArmPair) -> Iterator[Difference]:
    """Yield the numbers that differ by more than the limits, in the order of their computation;
    then, if nothing may differ, those that differ at all.
    """
    limits, after = pair.limits, f"after {len(pair.arm[0].steps)} steps"
    cause = explain_gradients(pair)
    if len({a.final_sha256 for a in pair.arm}) > 1:
        yield Difference(f"its ranks have different parameters {after}", cause)
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
            f"parameters differ {after} by {{}} of the distance that training moved them",
            pair.final_distance()[0],
            limits.final,
            diagnosis.OTHER_UPDATE,
        ),
        (
            f"buffers differ {after} by {{}}",
            pair.buffer_distance(),
            limits.final,
            diagnosis.OTHER_BUFFERS,
        ),
    ]
    # Gradients may differ in the last bits of denormal numbers, which move no parameter.
    exact = limits.bitwise and not pair.is_bitwise_equal
    for default in (None, diagnosis.ROUNDING)[: 1 + exact]:
        for text, apart, limit, why in numbers:
            if apart > (0.0 if default else limit):
                allowed, why = 0.0 if limits.bitwise else limit, cause or why or default
                yield Difference(text.format(relative(apart)), why, apart, allowed)
    if exact:
        text = f"parameters or buffers differ {after}, in elements outside the sample"
        yield Difference(text, cause)
