"""The exact part of the parity check: everything that is counted, not computed.

`parity` runs it first: model, options, learning rates, samples, dtypes and sizes must be equal
before `numeric_checks` compares numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hvdtrain.compare.formatting import tell_apart
from hvdtrain.compare.proof import diagnosis
from hvdtrain.compare.proof.distances import distance
from hvdtrain.compare.proof.work_trace import ArmTraces, paired_steps


@dataclass(frozen=True)
class Difference:
    """A difference between an arm's work and the baseline's, with its likely cause."""

    text: str
    cause: str | None = None
    distance: float | None = None
    """How far apart the numbers are, in the measure of the check."""
    tolerance: float | None = None


def exact_differences(arm: ArmTraces, base: ArmTraces, baseline: str) -> Iterator[Difference]:
    """Yield the differences, ordered so that an earlier one explains the later ones.

    Both arms have the same number of ranks.
    """
    yield from _worlds(arm, base, baseline)
    # Cause before effect: another model or option can also change rates, samples and gradients.
    yield from _models(arm, base, baseline)
    yield from _options(arm, base, baseline)
    yield from _rates(arm, base, baseline)
    yield from _data(arm, base, baseline)
    yield from _gradient_types(arm, base, baseline)


def _worlds(arm: ArmTraces, base: ArmTraces, baseline: str) -> Iterator[Difference]:
    """Yield differences in the number of ranks that the arm's backend has found."""
    for a, b in zip(arm, base, strict=True):
        if a.world_size != b.world_size:
            text = "the backend does not know this launcher: models train side by side"
            yield Difference(f"a world of {a.world_size}, {baseline}'s of {b.world_size}", text)


def _models(arm: ArmTraces, base: ArmTraces, baseline: str) -> Iterator[Difference]:
    """Yield differences in the parameters' types, shapes and initial values."""
    for a, b in zip(arm, base, strict=True):
        if set(a.parameters) != set(b.parameters):
            kinds = ", ".join(a.parameters), ", ".join(b.parameters)
            yield Difference(
                f"parameters are {kinds[0]}, {baseline}'s are {kinds[1]}",
                diagnosis.explain_dtype(*kinds),
            )
    yield from _layouts(arm, base, baseline)
    yield from _weights(arm, base, baseline)


def _layouts(arm: ArmTraces, base: ArmTraces, baseline: str) -> Iterator[Difference]:
    """Yield differences in the names and sizes of the parameters."""
    for a, b in zip(arm, base, strict=True):
        if (a.elements.layout, sum(a.parameters.values())) != (
            b.elements.layout,
            sum(b.parameters.values()),
        ):
            sizes = sum(a.parameters.values()), sum(b.parameters.values())
            layouts = a.elements.layout, b.elements.layout
            text = "another model" if sizes[0] != sizes[1] else "a model with other tensors"
            text += f": {sizes[0]} parameters in {len(layouts[0])} tensors, "
            text += f"{baseline} has {sizes[1]} in {len(layouts[1])}"
            for mine, its in zip(*layouts, strict=False):
                if mine != its:
                    text += f"; first {mine[0]} ({mine[1]}), not {its[0]} ({its[1]})"
                    break
            cause = "its code is another, or makes another model under this launcher"
            yield Difference(text, cause)


def _weights(arm: ArmTraces, base: ArmTraces, baseline: str) -> Iterator[Difference]:
    """Yield differences in the initial values of the parameters."""
    if len({a.initial_sha256 for a in arm}) > 1:
        text = "rank 0's weights are not broadcast to the other ranks before training"
        yield Difference("the ranks start from different parameters", text)
    apart = distance(arm[0].elements.initial, base[0].elements.initial)
    if arm[0].initial_sha256 != base[0].initial_sha256:
        text = f"starts from other parameters than {baseline}"
        yield Difference(text, diagnosis.explain_weights(arm[0], base[0]), apart, 0.0)


def _options(arm: ArmTraces, base: ArmTraces, baseline: str) -> Iterator[Difference]:
    """Yield differences in training options, hyper-parameters and the optimizer's state."""
    for a, b in zip(arm, base, strict=True):
        for name in ("precision", "optimizer"):
            mine, its = getattr(a, name), getattr(b, name)
            if mine != its:
                words = name.replace("_", " ")
                cause = f"this one sets another {words}: give all the same"
                yield Difference(f"{words} {mine}, {baseline} has {its}", cause)
        if a.settings != b.settings:
            mine, its = _differing_settings(a.settings, b.settings)
            yield Difference(
                f"settings {mine}, {baseline} has {its}",
                "an optimizer that was made anew may have its class's own defaults: see what this "
                "arm makes of the parameter groups",
            )
        if a.state_step != b.state_step:
            yield Difference(
                f"its optimizer counts {a.state_step} steps before the first, {baseline}'s "
                f"{b.state_step}",
                diagnosis.explain_weights(a, b)
                if a.state_step > b.state_step or b.state_step == 1
                else "this one loses the optimizer's state when it wraps it",
            )


def _differing_settings(mine: list[dict[str, str]], its: list[dict[str, str]]) -> tuple[str, str]:
    """Return the hyper-parameters that differ, of both arms, as text."""
    if len(mine) != len(its):
        return f"of {len(mine)} groups", f"{len(its)}"
    keys = {k for a, b in zip(mine, its, strict=True) for k in {*a, *b} if a.get(k) != b.get(k)}

    def text(groups: list[dict[str, str]]) -> str:
        return "; ".join(
            ", ".join(f"{k}={group.get(k, 'unset')}" for k in sorted(keys)) for group in groups
        )

    return text(mine), text(its)


def _rates(arm: ArmTraces, base: ArmTraces, baseline: str) -> Iterator[Difference]:
    """Yield differences in learning rates."""
    for number, rank, a, b in paired_steps(arm, base):
        if a.lr and b.lr and a.lr != b.lr:
            group = next(
                i for i, pair in enumerate(zip(a.lr, b.lr, strict=False)) if len({*pair}) > 1
            )
            ratio = a.lr[group] / b.lr[group] if b.lr[group] else math.inf
            rates = tell_apart(a.lr[group], b.lr[group], 6)
            yield Difference(
                f"learning rate {rates[0]} in step {number} on rank {rank}, {baseline} has "
                f"{rates[1]}",
                diagnosis.explain_rate(ratio, len(arm), arm[0].steps[0].micro_batches or 1),
                abs(ratio - 1) if math.isfinite(ratio) else None,
                0.0,
            )


def _data(arm: ArmTraces, base: ArmTraces, baseline: str) -> Iterator[Difference]:
    """Yield differences in micro-batches and samples."""
    for number, rank, a, b in paired_steps(arm, base):
        if a.micro_batches != b.micro_batches:
            yield Difference(
                f"{a.micro_batches} micro-batches in step {number} on rank {rank}, {baseline} has "
                f"{b.micro_batches}",
                "accumulation windows begin or end at other micro-batches",
            )
        if a.samples == b.samples or not (a.samples and b.samples):  # in one they were not seen
            continue
        # The samples of all ranks show whether only the split differs.
        mine, its = ([r.steps[number - 1].samples for r in ranks] for ranks in (arm, base))
        if len(a.samples) != len(b.samples):
            yield Difference(
                f"{len(a.samples)} samples in step {number} on rank {rank}, {baseline} has "
                f"{len(b.samples)}",
                diagnosis.explain_counts([len(x) for x in mine], [len(x) for x in its]),
            )
        yield Difference(
            f"other samples in step {number} on rank {rank} than {baseline}",
            diagnosis.explain_samples(mine, its),
        )


def _gradient_types(arm: ArmTraces, base: ArmTraces, baseline: str) -> Iterator[Difference]:
    """Yield differences in the types and sizes of the gradients at `optimizer.step`."""
    for number, rank, a, b in paired_steps(arm, base):
        if a.gradient_dtypes != b.gradient_dtypes:
            kinds = ", ".join(a.gradient_dtypes), ", ".join(b.gradient_dtypes)
            yield Difference(
                f"gradients are {kinds[0]} in step {number}, {baseline}'s are {kinds[1]}",
                diagnosis.explain_dtype(*kinds),
            )
        if a.gradient_bytes != b.gradient_bytes:
            yield Difference(
                f"{a.gradient_bytes} bytes of gradients in step {number} on rank {rank}, "
                f"{baseline} has {b.gradient_bytes}",
                "parameters without a gradient are skipped in one, and zeros in the other",
            )
