"""Likely causes of what is counted: a sentence each, with its fix where there is one.

The table of `equal_work` names the cause of each difference; `gradient_diagnosis` has those of
wrong gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hvdtrain.compare.formatting import tell_apart
from hvdtrain.compare.proof.distances import ArmPair, distance
from hvdtrain.compare.proof.work_trace import RankTrace

# Why parameters differ although the optimizer used the same gradients.
OTHER_UPDATE = (
    "the optimizer takes another step from the same gradients, or something changes the weights "
    "between steps; check the optimizer's state and the code around the step"
)
OTHER_BUFFERS = (
    "rank 0 computes its buffers, such as BatchNorm's statistics, in another way: averaged over "
    "the ranks, or with another momentum"
)
# The cause if a gradient differs first, by no more than rounding.
ROUNDING = (
    "only rounding: this command computes or averages the gradients in another order than the "
    "baseline, for example by dividing before the sum, with other kernels, or with another number "
    "of threads"
)


@dataclass(frozen=True)
class Found:
    """A value of an arm, which is not the baseline's, in one step."""

    pair: ArmPair
    mine: Any
    its: Any
    step: int
    """From 1; 0 for what is not of a step."""


def near(value: float, expected: float) -> bool:
    """Return whether two factors are equal up to rounding and the error of sampling elements."""
    return math.isclose(value, expected, rel_tol=1e-3)


def explain_rate(found: Found) -> str:
    """Return why learning rates differ."""
    a, b = next((a, b) for a, b in zip(found.mine, found.its, strict=False) if a != b)
    ratio, n = a / b if b else math.inf, len(found.pair.arm)
    window = n * (found.pair.arm[0].steps[0].micro_batches or 1)
    names = {"the number of ranks": n, "ranks x accumulation": window}
    for name, count in names.items():
        if count != 1 and (near(ratio, count) or near(ratio, 1 / count)):
            how = "multiplies" if ratio > 1 else "divides"
            return (
                f"this command {how} the learning rate by {name} ({count}); remove that, or do it "
                "in all commands"
            )
    return (
        f"this command sets the learning rate to {tell_apart(ratio, 1, 4)[0]} times the "
        "baseline's: check its code, its backend, and a schedule made before the rate was scaled"
    )


def explain_weights(found: Found) -> str:
    """Return why initial parameters are not the baseline's."""
    arm, base = found.pair.arm, found.pair.base
    if len({a.initial_sha256 for a in arm}) > 1:
        return (
            "rank 0's weights are not broadcast to the other ranks before training; broadcast them"
        )
    return _zero_step(arm[0], base[0]) or (
        "the initial weights come from another seed, or from a generator that was used before the "
        "model is built; seed it just before"
    )


def explain_state(found: Found) -> str:
    """Return why an optimizer has another state before the first step."""
    why = _zero_step(found.pair.arm[0], found.pair.base[0])
    return why or "this command loses the optimizer's state when it wraps the optimizer"


def _zero_step(arm: RankTrace, base: RankTrace) -> str:
    """Return that one of two arms has taken a step on zero gradients before the first, if so."""
    for who, one, other in (("this command", arm, base), ("the baseline", base, arm)):
        decayed = _decayed(one, other)
        if decayed or one.state_step == other.state_step + 1:
            fix = "broadcast only state that exists"
            if one is base:
                fix = "HVDTRAIN_EXACT_HOROVOD=1 makes hvdtrain.hvd take it too"
            return (
                f"{who} takes an optimizer step on gradients of zeros before the first step, as "
                "Horovod's broadcast_optimizer_state does to create the optimizer's state"
                f"{decayed}; {fix}"
            )
    return ""


def _decayed(arm: RankTrace, base: RankTrace) -> str:
    """Describe what a step on zero gradients did to the weights; empty if it is not the cause."""
    before, after = base.elements.initial, arm.elements.initial
    # Zero gradients leave weight decay alone, which multiplies all weights of a group by one
    # factor, and those of groups without it by none.
    moved = before != after
    factor = float(after[moved] @ before[moved]) / float(before[moved] @ before[moved] or 1)
    if 0 < factor < 1 and distance(after[moved], factor * before[moved]) < 0.1 * (1 - factor):
        return f", which decayed the weights by a factor of {tell_apart(factor, 1, 6)[0]}"
    return ""


def explain_samples(found: Found) -> str:
    """Return why samples differ: tested from the mildest, another order in a rank, to others."""
    arm, base = (
        [t.steps[found.step - 1].samples for t in x] for x in (found.pair.arm, found.pair.base)
    )
    fewer = [r for r, (a, b) in enumerate(zip(arm, base, strict=True)) if len(a) != len(b)]
    if fewer and len(fewer) == len(arm):
        return "one takes the batch size for all ranks together, the other for each rank"
    if fewer:
        return (
            f"rank {fewer[0]} gets fewer samples in one command: check what drops samples, shards "
            "them by the launcher's variables, or ends an epoch"
        )
    if sorted(sum(arm, [])) == sorted(sum(base, [])):
        return "the same samples in another order, or split differently between the ranks"
    if len(arm) > 1 and all(sorted(a) == sorted(arm[0]) for a in arm):
        return (
            "all its ranks read the same samples: the data is not sharded, or is sharded by a "
            "launcher variable that is not set"
        )
    return (
        "other samples: sharded twice, shuffled with another seed, or augmented with random "
        "numbers that are not seeded at each step"
    )


def explain_dtype(found: Found) -> str:
    """Return why the dtypes of parameters or gradients differ."""
    return f"this command converts {found.its} to {found.mine}; give all commands one dtype"
