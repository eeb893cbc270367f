"""Likely causes of a difference in work: those of counts, weights, buffers and updates.

`exact_checks` and `numeric_checks` attach one to each difference; `gradient_diagnosis` has the
causes of wrong gradients. A cause is one sentence, with its fix where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdtrain.compare.formatting import tell_apart
from hvdtrain.compare.proof.distances import distance
from hvdtrain.compare.proof.work_trace import RankTrace

# Why parameters differ although the optimizer used the same gradients.
OTHER_UPDATE = (
    "the optimizer makes another step of the same gradients, or something moves the weights "
    "between steps: see the optimizer's state, and what runs beside it"
)
OTHER_BUFFERS = (
    "rank 0's buffers, such as BatchNorm's statistics, are computed otherwise: averaged over the "
    "ranks, or with another momentum"
)
# The cause if a gradient differs first, by no more than rounding.
ROUNDING = (
    "no more than rounding: this one computes or averages the gradients in another order than "
    "the baseline, such as by dividing before the sum, with other kernels, or with another "
    "number of threads"
)


def near(value: float, expected: float) -> bool:
    """Return whether two factors are equal up to rounding and the error of sampling elements."""
    return math.isclose(value, expected, rel_tol=1e-3)


def explain_rate(ratio: float, num_ranks: int, accumulate: int) -> str:
    """Return why learning rates differ. `ratio`: the arm's over the baseline's."""
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
                return f"this one {how} the learning rate by {name}; take that out, or do it in all"
    times = tell_apart(ratio, 1, 4)[0]
    return (
        f"something in this one alone sets the learning rate, to {times} times the baseline's: "
        "its code, its backend, or a schedule made before the rate was scaled"
    )


def explain_weights(arm: RankTrace, base: RankTrace) -> str:
    """Return why the arm's initial state, the same on all its ranks, is not the baseline's."""
    for who, one, other in (("this one", arm, base), ("the baseline", base, arm)):
        decayed = _decayed(one, other)
        if one.state_step > other.state_step or decayed:
            moved = f", which {decayed}" if decayed else ""
            fix = "broadcast only the state that exists"
            if one is base:
                fix = "hvdtrain.hvd takes it too with HVDTRAIN_EXACT_HOROVOD=1"
            return (
                f"in {who} an optimizer step before the first, on gradients of zeros, such as "
                f"broadcast_optimizer_state of Horovod takes to make the optimizer's state{moved}; "
                f"{fix}"
            )
    return (
        "the initial weights are drawn differently: another seed, or random numbers drawn before "
        "the model is made"
    )


def _decayed(arm: RankTrace, base: RankTrace) -> str:
    """Describe what a step on zero gradients did to the weights; empty if it is not the cause."""
    before, after = base.elements.initial, arm.elements.initial
    if before.shape != after.shape or not before.any():
        return ""
    # Zero gradients leave weight decay alone, which multiplies all weights of a group by one
    # factor, and those of groups without it by none.
    moved = before != after
    factor = float(after[moved] @ before[moved]) / float(before[moved] @ before[moved] or 1)
    if 0 < factor < 1 and distance(after[moved], factor * before[moved]) < 0.1 * (1 - factor):
        return f"decayed the weights by a factor of {tell_apart(factor, 1, 6)[0]}"
    return ""


def explain_counts(arm: Sequence[int], base: Sequence[int]) -> str:
    """Return why batch sizes differ. `arm`, `base`: samples per rank in the first such step."""
    if len(set(arm)) == 1 and len(set(base)) == 1:
        return "the batch size is taken for the whole world in one and for each rank in the other"
    ranks = [rank for rank, (a, b) in enumerate(zip(arm, base, strict=True)) if a != b]
    which = f"rank {ranks[0]} gets" if len(ranks) == 1 else "some ranks get"
    return (
        f"{which} fewer samples in one than in the other: look for what drops or shards "
        "samples by the launcher's variables, or ends an epoch otherwise"
    )


def explain_samples(arm: Sequence[Sequence[str]], base: Sequence[Sequence[str]]) -> str:
    """Return why samples differ, although each rank has the same number of them.

    `arm`, `base`: hashes of each rank's samples in the first step that differs.
    """
    # Tested from the mildest: another order in a rank, another split, the same in all, others.
    every_arm, every_base = (sorted(s for rank in ranks for s in rank) for ranks in (arm, base))
    if all(sorted(a) == sorted(b) for a, b in zip(arm, base, strict=True)):
        return "the samples are the same, but in another order within the batch"
    if every_arm == every_base:
        return "only the split differs: the same samples, but between the ranks"
    if len(arm) > 1 and all(sorted(a) == sorted(arm[0]) for a in arm):
        return (
            "each of its ranks reads the same samples: it is not sharded, or by a launcher's "
            "variable that is not there"
        )
    return (
        "other samples: sharded twice, shuffled with another seed, or augmented by random numbers "
        "that are not seeded by step"
    )


def explain_dtype(arm: str, base: str) -> str:
    """Return why dtypes differ. `arm`, `base`: the dtypes of parameters or gradients."""
    return f"something in this one alone converts {base} to {arm}: give all one dtype"
