"""Likely causes of wrong gradients: hypotheses, tested on the gradients of the first step.

`equal_work` calls `explain_gradients`. Each rank of the baseline also records the gradient that it
computed itself, of the same samples and weights, before any averaging. The weight of each such
local gradient in another arm's result is found by least squares, not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hvdtrain.compare.proof.diagnosis import near
from hvdtrain.compare.proof.distances import ArmPair, distance, rms
from hvdtrain.compare.proof.work_trace import Array


@dataclass
class FirstGradients:
    """The wrong elements of the gradients of the first step."""

    arm: list[Array]
    """Of each rank of the arm."""
    mean: Array
    """The baseline's."""
    local: list[Array]
    """Of each rank of the baseline before any averaging. NaN if the probe did not see them."""
    norms: list[float]
    """Norms of the whole local gradients."""
    slack: float
    """Relative distance below which two gradients count as equal."""

    @property
    def n(self) -> int:
        """The number of ranks."""
        return len(self.arm)

    def agree(self) -> bool:
        """Return whether all ranks of the arm have the same gradient."""
        return all(self.equal(g, self.arm[0]) for g in self.arm)

    def equal(self, a: Array, b: Array) -> bool:
        """Return whether two gradients are equal up to rounding."""
        return distance(a, b) <= self.slack

    def times(self, expected: Array) -> float | None:
        """Return the factor that makes the arm's gradient of `expected`; None if none does."""
        square = float(expected @ expected)
        factor = float(self.arm[0] @ expected) / square if square else math.nan
        fits = math.isfinite(factor) and self.equal(self.arm[0], factor * expected)
        return factor if fits and self.agree() else None

    def weights(self) -> list[float] | None:
        """Return n times the weights of the local gradients whose sum is the arm's; None if none
        fit.
        """
        matrix = np.stack(self.local, axis=1)
        with np.errstate(all="ignore"):
            if not (np.isfinite(matrix).all() and np.isfinite(self.arm[0]).all()):
                return None
            found, _, rank, _ = np.linalg.lstsq(matrix, self.arm[0], rcond=None)
        # Linearly dependent parts have no unique weights.
        fits = rank == self.n and self.equal(matrix @ found, self.arm[0])
        return [self.n * float(weight) for weight in found] if fits else None


def explain_gradients(pair: ArmPair) -> str | None:
    """Return why the first gradients differ; None if they agree or no hypothesis fits. If only some
    parameters' do, the cause is that of these alone.
    """
    base, limits = pair.base, pair.limits
    grads, mean = [a.elements.gradient for a in pair.arm], base[0].elements.gradient
    least = limits.noise * rms(mean[np.isfinite(mean)])
    apart = {
        name: (part, max(distance(g[part], mean[part]) for g in grads))
        for name, part in base[0].elements.segments().items()
        # Not those that are nothing but rounding.
        if not all((np.abs(g[part]) < least).all() for g in (*grads, mean))
    }
    wrong = {name: part for name, (part, far) in apart.items() if far > limits.gradient}
    if not wrong:
        return None
    elements = np.concatenate([np.arange(part.start, part.stop) for part in wrong.values()])
    made = FirstGradients(
        arm=[g[elements] for g in grads],
        mean=mean[elements],
        local=[b.elements.local[elements] for b in base],
        norms=[b.local_norm for b in base],
        slack=max(1e-5 if base[0].precision != "float64" else 1e-10, limits.gradient),
    )
    cause = next((cause for test in _HYPOTHESES if (cause := test(made)) is not None), None)
    if cause is None or len(wrong) == len(apart):
        return cause
    return f"for {', '.join(list(wrong)[:3])}{', ...' * (len(wrong) > 3)} alone: {cause}"


def _scaled(g: FirstGradients) -> str | None:
    """Test for the mean times a constant: a missing or repeated division."""
    factor = g.times(g.mean)
    if factor is None or near(factor, 1):
        return None
    if near(factor, g.n):
        return (
            f"the division is missing: gradients are the sum over the {g.n} ranks, not the mean"
            f"; divide by {g.n} (with Adam the steps are the same even so)"
        )
    if near(factor, 1 / g.n):
        return f"the gradients are divided twice by the {g.n} ranks; divide once"
    return (
        f"the gradients are {factor:.4g} times the mean over the ranks: clipped differently, or "
        "divided in one command only, for example by micro-batches or gradient_predivide_factor"
    )


def _not_synchronised(g: FirstGradients) -> str | None:
    """Test for ranks that differ although their mean is right."""
    if g.agree() or not g.equal(np.mean(g.arm, axis=0), g.mean):
        return None
    return (
        "gradients are not synchronised, or not those of all micro-batches, and each rank trains "
        "alone; check the hooks, no_sync and backward_passes_per_step"
    )


def _clipped_first(g: FirstGradients) -> str | None:
    """Test for local gradients that are clipped to one norm before they are averaged."""
    clipped = g.weights()
    if clipped is None:
        return None
    limit = max(w * norm for w, norm in zip(clipped, g.norms, strict=True))
    expected = [min(1.0, limit / norm) if norm else 1.0 for norm in g.norms]
    if not all(map(near, clipped, expected)) or all(near(c, 1) for c in clipped):
        return None
    return (
        f"gradients are clipped before they are synchronised: each rank's own to a norm of "
        f"{limit:.4g}, and then averaged; synchronise first, then clip the mean (Horovod: "
        "synchronize(), clip, and step() inside skip_synchronize())"
    )


def _rounded(g: FirstGradients) -> str | None:
    """Test for gradients that are rounded to a 16-bit type."""

    def fits(a: Array, digits: int) -> bool:
        return distance(a, round_to(a, digits)) < 2.0**-21

    for name, digits in (("bf16", 8), ("fp16", 11)):  # bf16 first: it mostly fits fp16 too
        # A sum that is rounded, and divided by n in a wider type, fits once multiplied by n.
        fits_now = fits(g.arm[0], digits) or fits(g.arm[0] * g.n, digits)
        is_near = distance(g.arm[0], g.mean) < 2.0 ** (3 - digits)
        if fits_now and is_near and not fits(g.mean, digits):
            return (
                f"gradients are rounded to {name} before they are reduced, as compression does; "
                "leave it out, or compare with arms that compress as well"
            )
    return None


def _weighted(g: FirstGradients) -> str | None:
    """Test for any other weights than 1/n."""
    weights = g.weights()
    if weights is None or all(near(w, 1) for w in weights):
        return None
    listed = ", ".join(f"{w / g.n:.3f}" for w in weights)
    return (
        f"the weights of the ranks' gradients are {listed} instead of {1 / g.n:.3f} each: one rank "
        "alone, weights by samples, or another operation than the mean, such as Adasum"
    )


def round_to(a: Array, digits: int) -> Array:
    """Round to `digits` binary digits: bf16 has 8, fp16 11."""
    mantissa, exponent = np.frexp(a)
    return np.asarray(np.ldexp(np.round(np.ldexp(mantissa, digits)), exponent - digits))


# The most specific first: `_weighted` accepts any linear combination of the local gradients.
_HYPOTHESES: tuple[Callable[[FirstGradients], str | None], ...] = (
    _scaled,
    _not_synchronised,
    _clipped_first,
    _rounded,
    _weighted,
)
