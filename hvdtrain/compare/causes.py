"""Why two arms did different work: hypotheses about what can be counted, and about the weights.

Every difference between DDP and Horovod that users met is a row of a ledger, by number; a cause
names its row. Those about gradients are in `gradients`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.compare.account import Account, Array
from hvdtrain.compare.wording import tell_apart


class Cause(NamedTuple):
    """A likely cause with what to do about it, and its row in the ledger."""

    text: str
    row: int | None = None


def near(value: float, expected: float) -> bool:
    """Equal but for rounding and what a sample of the elements leaves open."""
    return math.isclose(value, expected, rel_tol=1e-3)


def distance(a: Array, b: Array, scale: Array | None = None) -> float:
    """Norm of a - b relative to that of `scale`, or of b. Zero where they are equal, NaNs included;
    infinite where nothing can be said.
    """
    if a.shape != b.shape:
        return math.inf
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    norm = np.linalg.norm(b if scale is None else scale)
    with np.errstate(invalid="ignore", over="ignore"):
        result = float(np.linalg.norm(a - b) / norm) if norm else math.inf
    return result if math.isfinite(result) else math.inf


def of_rate(ratio: float, num_ranks: int, accumulate: int) -> Cause:
    """`ratio`: this arm's learning rate over the baseline's."""
    window = num_ranks * accumulate
    names = [
        (num_ranks, f"the number of ranks ({num_ranks})"),
        (window, f"ranks x accumulation ({window})"),
        (math.sqrt(num_ranks), f"the root of the number of ranks ({num_ranks})"),
        (math.sqrt(window), f"the root of ranks x accumulation ({window})"),
    ]
    for value, name in names:
        for how, factor in (("multiplies", value), ("divides", 1 / value)):
            if value != 1 and near(ratio, factor):
                return Cause(
                    f"this arm {how} the learning rate by {name}; take that out and set "
                    "--lr, which is the same for all arms",
                    11,
                )
    times = tell_apart(ratio, 1, 4)[0]
    return Cause(
        f"something on this arm alone sets the learning rate, to {times} times the baseline's: "
        "its backend, or a schedule made before the rate was scaled",
        11,
    )


def of_weights(arm: Account, base: Account) -> Cause:
    """The initial weights, the same on all ranks of the arm, are not the baseline's."""
    decayed = _decayed(arm, base)
    if arm.state_step > base.state_step or decayed:
        moved = f", which {decayed}" if decayed else ""
        return Cause(
            "an optimizer step before the first, on gradients of zeros, such as "
            f"broadcast_optimizer_state of Horovod takes to make the optimizer's state{moved}; "
            "broadcast only the state that exists",
            2,
        )
    return Cause(
        "the initial weights are drawn otherwise: another seed, or random numbers taken before the "
        "model is made",
        21,
    )


def _decayed(arm: Account, base: Account) -> str:
    """What a step on zero gradients did to the weights, if that is what it was."""
    before, after = base.samples.initial, arm.samples.initial
    if before.shape != after.shape or not (moved := float(before @ before)):
        return ""
    factor = float(after @ before) / moved
    if factor < 1 and distance(after, factor * before) < 0.01 * (1 - factor):
        return f"decayed the weights by a factor of {tell_apart(factor, 1, 6)[0]}"
    return ""


def of_counts(arm: Sequence[int], base: Sequence[int]) -> Cause:
    """`arm`, `base`: samples of every rank in the first step in which they differ."""
    if len(set(arm)) == 1 and len(set(base)) == 1:
        return Cause(
            "the batch size is taken for the whole world on one arm and for each rank on the other",
            12,
        )
    ranks = [rank for rank, (a, b) in enumerate(zip(arm, base, strict=True)) if a != b]
    which = f"rank {ranks[0]} gets" if len(ranks) == 1 else "some ranks get"
    return Cause(
        f"{which} fewer samples on one arm than on the other: look for what drops or shards "
        "samples by the launcher's variables, or ends an epoch otherwise",
        13,
    )


def of_samples(arm: Sequence[Sequence[str]], base: Sequence[Sequence[str]]) -> Cause:
    """`arm`, `base`: samples of every rank in the first step in which they differ; as many."""
    every_arm, every_base = (sorted(s for rank in ranks for s in rank) for ranks in (arm, base))
    if all(sorted(a) == sorted(b) for a, b in zip(arm, base, strict=True)):
        return Cause("the samples are the same, but in another order within the batch", 12)
    if every_arm == every_base:
        return Cause("only the split differs: the same samples, but between the ranks", 12)
    if len(arm) > 1 and all(sorted(a) == sorted(arm[0]) for a in arm):
        return Cause(
            "every rank of this arm reads the same samples: it is not sharded, or by a launcher's "
            "variable that is not there",
            12,
        )
    return Cause(
        "other samples: sharded twice, shuffled with another seed, or augmented by random numbers "
        "that are not seeded by step",
        21,
    )


def of_buffers(policy: str, ranks_agree: bool) -> Cause:
    """The parameters are right and the buffers are not. `policy`: what should be done to them."""
    if not ranks_agree:
        return Cause(
            "buffers such as BatchNorm's statistics stay each rank's own on this arm, so that "
            f"evaluation depends on the rank; the policy is {policy!r} (--buffers)",
            3,
        )
    return Cause(
        "buffers such as BatchNorm's statistics are combined by another policy than "
        f"{policy!r} (--buffers): rank 0's, the mean over ranks, or every rank's own",
        3,
    )


def of_dtype(arm: str, base: str) -> Cause:
    """`arm`, `base`: what the parameters or gradients are kept in."""
    return Cause(
        f"something on this arm alone converts {base} to {arm}: leave the dtype to --precision"
    )


def of_use(mine: float, its: float) -> Cause:
    """The gradients are right once they are combined, and not when the optimizer uses them.

    `mine`, `its`: their norms there.
    """
    norms = tell_apart(mine, its, 4)
    return Cause(
        f"the gradients (norm {norms[0]}, not {norms[1]}) are changed between finish_backward and "
        "the optimizer: clipped otherwise, or reduced again within step()",
        7,
    )


def of_update() -> Cause:
    """The same gradients, as the optimizer used them, and other parameters after the step."""
    return Cause(
        "the optimizer makes another step of the same gradients, or something moves the weights "
        "between steps: see the optimizer's state, and what runs beside it",
        10,
    )


def of_rounding() -> Cause:
    """What differs first is the loss or a gradient, by no more than rounding."""
    return Cause(
        "no more than rounding: this arm computes or averages the gradients in another order than "
        "the baseline, such as by dividing before the sum, with other kernels, or with another "
        "number of threads"
    )
