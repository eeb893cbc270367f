"""Likely causes of wrong gradients: hypotheses, tested on the gradients of the first step.

`numeric_checks` calls `explain_gradients`. Each rank of the baseline also records the gradient that
it computed itself, of the same samples and weights, before any averaging. The weight of each such
local gradient in another arm's result is found by least squares, not guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hvdtrain.compare.proof.diagnosis import near
from hvdtrain.compare.proof.distances import distance
from hvdtrain.compare.proof.work_trace import Array


@dataclass
class FirstGradients:
    """Gradients of the first step: of each rank of the arm, the baseline's mean, the local ones."""

    arm: list[Array]
    mean: Array
    local: list[Array] | None
    """Of every rank before any averaging. None if the probe did not see them."""
    before_last: list[Array] | None
    """The local gradients before the last micro-batch of the step."""
    norms: list[float]
    """Norms of the whole local gradients."""
    accumulate: int
    slack: float
    """Relative distance below which two gradients count as equal."""
    only: str = ""
    """Names of the parameters covered, if the gradients of the others are right."""

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

    def weights(self, parts: list[Array]) -> list[float] | None:
        """Return the weights of `parts` whose sum is the arm's gradient; None if none fit."""
        matrix = np.stack(parts, axis=1)
        with np.errstate(all="ignore"):
            if not (np.isfinite(matrix).all() and np.isfinite(self.arm[0]).all()):
                return None
            found, _, rank, _ = np.linalg.lstsq(matrix, self.arm[0], rcond=None)
        # Linearly dependent parts have no unique weights.
        fits = rank == len(parts) and self.equal(matrix @ found, self.arm[0])
        return [float(weight) for weight in found] if fits else None


def explain_gradients(g: FirstGradients) -> str | None:
    """Return the first hypothesis that explains the arm's gradients, or None."""
    cause = next((cause for test in _HYPOTHESES if (cause := test(g)) is not None), None)
    if cause is None or not g.only:
        return cause
    return f"for {g.only} alone: {cause}"


def _scaled(g: FirstGradients) -> str | None:
    """Test for the mean times a constant: a missing or repeated division."""
    # The projection of the arm's gradient on the mean.
    square = float(g.mean @ g.mean)
    factor = float(g.arm[0] @ g.mean) / square if square else math.nan
    if not (g.agree() and math.isfinite(factor) and g.equal(g.arm[0], factor * g.mean)):
        return None
    if near(factor, 1):
        return None
    if near(factor, g.n):
        also = " (or over its micro-batches, of which there are as many)"
        return (
            f"the division is missing: gradients are the sum over the {g.n} ranks, not the mean"
            f"{also if g.accumulate == g.n else ''}; divide by {g.n}"
        )
    if near(factor, 1 / g.n):
        return f"the gradients are divided by the {g.n} ranks twice"
    if near(factor, g.accumulate) or near(factor, 1 / g.accumulate):
        wrong = "not divided" if factor > 1 else "divided twice"
        return f"the gradients are {wrong} by the {g.accumulate} micro-batches of a step"
    return (
        f"the gradients are {factor:.4g} times the mean over the ranks: clipped otherwise, or a "
        f"divisor or gradient_predivide_factor that is not undone"
    )


def _local(g: FirstGradients) -> str | None:
    """Test for no synchronisation: each rank has its local gradient."""
    if g.local is None or not all(map(g.equal, g.arm, g.local)):
        return None
    return (
        "gradients are not synchronised: every rank steps on its own; its hooks are not there, or "
        "no_sync (or backward_passes_per_step) covers the last micro-batch as well"
    )


def _partly_synchronised(g: FirstGradients) -> str | None:
    """Test for ranks that differ although their mean is right."""
    if g.agree() or not g.equal(np.mean(g.arm, axis=0), g.mean):
        return None
    if g.accumulate == 1:
        return "gradients are not synchronised: the ranks' differ, although their mean is right"
    return (
        "only some micro-batches of a step are synchronised: the ranks' gradients differ, although "
        "their mean is right; accumulate locally, and synchronise the whole sum"
    )


def _last_micro_batch(g: FirstGradients) -> str | None:
    """Test for the gradient of the last micro-batch alone."""
    if g.local is None or g.before_last is None:
        return None
    # Gradients accumulate in p.grad, so a difference is that of the last micro-batch.
    last = [whole - before for whole, before in zip(g.local, g.before_last, strict=True)]
    expected = np.mean(last, axis=0)
    square = float(expected @ expected)
    factor = float(g.arm[0] @ expected) / square if square else 0.0
    if not (factor and g.agree() and g.equal(g.arm[0], factor * expected)):
        return None
    return (
        f"only the last of the {g.accumulate} micro-batches of a step counts: the gradients of the "
        "others are lost"
    )


def _clipped_first(g: FirstGradients) -> str | None:
    """Test for local gradients that are clipped to one norm before they are averaged."""
    weights = None if g.local is None else g.weights(g.local)
    if weights is None or min(weights) <= 0:
        return None
    # An unclipped gradient has weight 1/n, so n times a weight is its clipping factor.
    clipped = [w * g.n for w in weights]
    norms = [w * norm for w, norm in zip(clipped, g.norms, strict=True)]
    limit = max(norms)
    expected = [min(1.0, limit / norm) if norm else 1.0 for norm in g.norms]
    if not all(map(near, clipped, expected)) or all(near(c, 1) for c in clipped):
        return None
    return (
        f"gradients are clipped before they are synchronised: each rank's own to a norm of "
        f"{limit:.4g}, and then averaged; synchronise first, then clip the mean (Horovod: "
        "synchronize(), clip, and step() inside skip_synchronize())"
    )


def _left_out(g: FirstGradients) -> str | None:
    """Test for ranks whose local gradient has no weight."""
    weights = None if g.local is None else g.weights(g.local)
    if weights is None:
        return None
    silent = [rank for rank, w in enumerate(weights) if abs(w) < 1e-3 / g.n]
    others = [w for rank, w in enumerate(weights) if rank not in silent]
    if not (silent and others and all(near(w, others[0]) for w in others)):
        return None
    who = ", ".join(map(str, silent))
    if g.n > 1 and near(others[0], 1) and len(others) == 1:
        how = f"rank {weights.index(others[0])}'s gradient alone is used by all"
    elif near(others[0], 1 / g.n):
        how = f"zeros count in place of rank {who}'s gradient"
    else:
        how = f"rank {who}'s gradient is left out, and the others count {others[0]:.4g} each"
    return f"{how}; as where a rank has joined, or ran out of data"


def _weighted(g: FirstGradients) -> str | None:
    """Test for any other weights than 1/n."""
    weights = None if g.local is None else g.weights(g.local)
    if weights is None or all(near(w * g.n, 1) for w in weights):
        return None
    listed = ", ".join(f"{w:.4g}" for w in weights)
    return (
        f"the ranks' gradients count {listed} instead of {1 / g.n:.4g} each: weighted by samples, "
        "or combined by another operation than the mean, such as Adasum"
    )


def _rounded(g: FirstGradients) -> str | None:
    """Test for gradients that are rounded to a 16-bit type."""
    for name, digits in (("bf16", 8), ("fp16", 11)):  # bf16 first: it mostly fits fp16 too

        def fits(a: Array, digits: int = digits) -> bool:
            # A sum of n rounded numbers, divided by n in a wider type, fits once multiplied by n.
            return any(
                distance(scaled, round_to(scaled, digits)) < 2.0**-21 for scaled in (a, a * g.n)
            )

        expected = None
        if g.local is not None:
            expected = np.mean([round_to(part, digits) for part in g.local], axis=0)
        away = distance(g.arm[0], g.mean)
        explained = expected is not None and distance(g.arm[0], expected) < 0.05 * away
        if (fits(g.arm[0]) or explained) and not fits(g.mean) and away < 2.0 ** (3 - digits):
            return (
                f"gradients are rounded to {name} before they are reduced, as compression does; "
                "leave it out, or compare with arms that compress as well"
            )
    return None


def round_to(a: Array, digits: int) -> Array:
    """Round to `digits` binary digits: bf16 has 8; fp16 11, and fewer below its normal range."""
    if digits == 11:
        with np.errstate(over="ignore"):
            return a.astype(np.float16).astype(np.float64)
    mantissa, exponent = np.frexp(a)
    return np.asarray(np.ldexp(np.round(np.ldexp(mantissa, digits)), exponent - digits))


# The most specific first: `_weighted` accepts any linear combination of the local gradients.
_HYPOTHESES: tuple[Callable[[FirstGradients], str | None], ...] = (
    _scaled,
    _local,
    _partly_synchronised,
    _last_micro_batch,
    _clipped_first,
    _left_out,
    _rounded,
    _weighted,
)
