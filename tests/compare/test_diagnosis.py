"""Verdicts and causes on traces made by hand: what real arms do rarely, at more world sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.compare.probe.hvdtrain_probe import MAX_SAMPLED, hash_samples, sample, stride
from hvdtrain.compare.proof.gradient_diagnosis import round_to
from hvdtrain.compare.proof.parity import compare
from hvdtrain.compare.proof.work_trace import (
    Array,
    ElementSample,
    RankTrace,
    StepTrace,
)
from hvdtrain.compare.record import ParityRow

Arm = list[RankTrace]
LAYOUT = [("first.weight", 300), ("first.bias", 20), ("last.weight", 80)]
SIZE = 400


def local_gradients(n: int) -> list[Array]:
    """Of every rank: parts in common, and of different norms."""
    draw = np.random.default_rng(7)
    common = draw.normal(size=SIZE)
    grads = [common + (rank + 1) * draw.normal(size=SIZE) for rank in range(n)]
    return [g.astype(np.float32).astype(np.float64) for g in grads]


def arm(n: int, gradients: list[Array] | None = None, noise: float = 0.0, **changes: Any) -> Arm:
    """An arm of plain gradient descent that took three steps; by default a correct one."""
    local = local_gradients(n)
    mean = np.sum(local, axis=0) / n
    initial = np.random.default_rng(1).normal(size=SIZE)
    traces = []
    for rank in range(n):
        gradient = (mean if gradients is None else gradients[rank]).copy()
        gradient += noise * np.random.default_rng(2).normal(size=SIZE)
        final = initial - 0.3 * gradient
        samples = ElementSample(
            LAYOUT, initial, gradient, abs(gradient), final, np.empty(0), np.empty(0)
        )
        norm = float(np.linalg.norm(gradient))
        steps = [
            StepTrace(1, [f"{step}-{rank}-{i}" for i in range(4)], 1.0, norm, 4 * SIZE)
            for step in range(3)
        ]
        for step in steps:
            step.lr, step.gradient_dtypes = [0.1], ["float32"]
        trace = RankTrace(
            rank, n, "fp32", {"float32": SIZE}, "SGD",
            [{"momentum": "0"}], 0, "start", samples, steps,
            str(hash(final.tobytes())), "none",
        )  # fmt: skip
        traces.append(trace)
        for name, value in changes.items():
            setattr(trace, name, value)
    return traces


def verdict(subject: Arm, **more: Any) -> ParityRow:
    n = subject[0].world_size
    base = more.pop("base", arm(n))
    for trace, own in zip(base, local_gradients(n), strict=True):
        trace.elements.local = own
        trace.local_norm = float(np.linalg.norm(own))
    traces = {"base": base, "again": copy.deepcopy(base)}
    rows = compare({**traces, **more, "arm": subject}, "base", "again")
    return next(row for row in rows if row.arm == "arm")


def refused(subject: Arm, *words: str, **more: Any) -> None:
    found = verdict(subject, **more)
    assert found.verdict == "unequal", found
    for word in words:
        assert word in f"{found.text} | {found.cause}", found


# Gradients


def everywhere(n: int, gradient: Array) -> list[Array]:
    return [gradient] * n


def mean_of(parts: list[Array]) -> Array:
    return np.asarray(np.mean(parts, axis=0))


MADE: dict[str, tuple[Callable[[int, list[Array]], list[Array]], str]] = {
    "sum": (lambda n, g: everywhere(n, n * mean_of(g)), "the division is missing"),
    "twice": (lambda n, g: everywhere(n, mean_of(g) / n), "twice"),
    "predivided": (
        lambda n, g: everywhere(n, 0.7 * mean_of(g)),
        "0.7 times the mean over the ranks: clipped",
    ),
    "local": (lambda n, g: g, "every rank steps on its own"),
    "one rank": (lambda n, g: everywhere(n, g[0]), "rank 0's gradient alone"),
    "zeros": (lambda n, g: everywhere(n, sum(g[1:], 0 * g[0]) / n), "in place of rank 0's"),
    "weighted": (
        lambda n, g: everywhere(n, sum((i + 1) * x for i, x in enumerate(g)) / 9),  # type: ignore[arg-type]
        "instead of",
    ),
    "clipped": (
        lambda n, g: everywhere(n, mean_of([x / max(1, np.linalg.norm(x) / 30) for x in g])),
        "to a norm of 30",
    ),
    "fp16": (lambda n, g: everywhere(n, mean_of([round_to(x, 11) for x in g])), "to fp16"),
    "bf16 sum": (
        lambda n, g: everywhere(n, round_to(n * mean_of([round_to(x, 8) for x in g]), 8) / n),
        "to bf16",
    ),
    "bf16": (lambda n, g: everywhere(n, mean_of([round_to(x, 8) for x in g])), "to bf16"),
}


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("made", MADE)
def test_what_was_made_of_the_local_gradients_is_found(made: str, n: int) -> None:
    make, words = MADE[made]
    refused(arm(n, make(n, local_gradients(n))), words)


def test_a_rank_left_out_of_the_count_as_well() -> None:
    local = local_gradients(3)
    gradient = (local[0] + local[2]) / 2
    refused(arm(3, everywhere(3, gradient)), "rank 1's gradient is left out", "0.5 each")


@pytest.mark.parametrize("n", [2, 3])
def test_parameters_that_are_wrong_alone_are_named(n: int) -> None:
    gradient = mean_of(local_gradients(n))
    gradient[300:320] *= n
    refused(arm(n, everywhere(n, gradient)), "for first.bias alone: the division is missing")


@pytest.mark.parametrize(
    ("micro_batches", "words"),
    [
        (2, "micro-batches, of which there are as many"),  # as ranks: it can be either
        (3, "not divided by the 3 micro-batches"),
    ],
)
def test_micro_batches_that_are_not_averaged(micro_batches: int, words: str) -> None:
    base = arm(2)
    subject = arm(2, everywhere(2, micro_batches * mean_of(local_gradients(2))))
    for trace in (*base, *subject):
        for step in trace.steps:
            step.micro_batches = micro_batches
    refused(subject, words, base=base)


def test_no_hypothesis_explains_noise() -> None:
    gradient = mean_of(local_gradients(2)) + np.random.default_rng(9).normal(size=SIZE)
    refused(arm(2, everywhere(2, gradient)), "no known cause fits", "step 1 on rank 0")


def test_the_same_gradients_and_another_update() -> None:
    subject = arm(2, final_sha256="elsewhere")
    for trace in subject:
        for step in trace.steps[1:]:
            step.parameter_norm, step.gradient_norm = 0.9, 5.0
    refused(subject, "step 2", "another step of the same gradients")


def test_values_that_are_not_finite_are_equal_to_themselves_alone() -> None:
    gradient = mean_of(local_gradients(2))
    gradient[0] = np.nan
    both = arm(2, everywhere(2, gradient))
    assert verdict(arm(2, everywhere(2, gradient)), base=both).verdict == "bitwise"
    refused(arm(2, everywhere(2, gradient)), "a non-finite amount")


# What is counted


def test_another_number_of_ranks() -> None:
    apart = arm(2, world_size=1)
    for subject, words in ((arm(3), "3 ranks"), (apart, "models train side by side")):
        (row,) = compare({"base": arm(2), "arm": subject}, "base")
        assert row.verdict == "unequal"
        assert words in f"{row.text} | {row.cause}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "AdamW"}, "optimizer AdamW"),
        ({"settings": [{"momentum": "0.9"}]}, "momentum=0.9, base has momentum=0"),
        ({"state_step": 1}, "counts 1 steps before the first"),
        ({"parameters": {"bfloat16": SIZE}}, "converts float32 to bfloat16"),
        ({"parameters": {"float32": 7}}, "another model: 7 parameters"),
        ({"initial_sha256": "other"}, "another seed"),
        ({"final_buffers_sha256": "other"}, "averaged over the ranks, or with another momentum"),
    ],
    ids=str,
)
def test_what_must_be_the_same(changes: dict[str, Any], words: str) -> None:
    refused(arm(2, **changes), words)


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (4, "multiplies the learning rate by the number of ranks (4)"),
        (0.25, "divides the learning rate by the number of ranks (4)"),
        (2, "multiplies the learning rate by the root of the number of ranks (4)"),
        (8, "multiplies the learning rate by ranks x accumulation (8)"),
        (1.3, "to 1.3 times the baseline's"),
        (
            1 + 1e-9,
            "learning rate 0.1000000001 in step 3 on rank 0, base has 0.1 | "
            "something in this one alone sets the learning rate, to 1.000000001 times",
        ),
    ],
)
def test_learning_rates(ratio: float, words: str) -> None:
    base, subject = arm(4), arm(4)
    for trace in (*base, *subject):
        trace.steps[0].micro_batches = 2
    for trace in subject:
        trace.steps[2].lr = [0.1 * ratio]
    refused(subject, "in step 3", words, base=base)


def test_samples_that_one_script_hides_are_not_other_samples() -> None:
    """Such as of a model that is called without tensors: the gradients tell."""
    hidden = arm(2)
    for trace in hidden:
        for step in trace.steps:
            step.samples = []
    row = verdict(hidden)
    assert (row.verdict, row.text.endswith("of samples that were not seen")) == ("bitwise", True)


def test_another_model_of_as_many_parameters() -> None:
    subject = arm(2)
    for trace in subject:
        trace.elements.layout = [(f"net.{name}", size) for name, size in LAYOUT]
    refused(subject, "base has 400 in 3; first net.first.weight (300), not first.weight (300)")


def cut(ranks: Arm, only: int | None) -> None:
    for trace in ranks:
        if only in (None, trace.rank):
            trace.steps[1].samples.pop()


def order(ranks: Arm, only: int | None) -> None:
    ranks[0].steps[1].samples.reverse()


def swap(ranks: Arm, only: int | None) -> None:
    one, two = (trace.steps[1] for trace in ranks[:2])
    one.samples, two.samples = two.samples, one.samples


def same(ranks: Arm, only: int | None) -> None:
    ranks[1].steps[1].samples = list(ranks[0].steps[1].samples)


def other(ranks: Arm, only: int | None) -> None:
    ranks[1].steps[1].samples[0] = "other"


@pytest.mark.parametrize(
    ("change", "only", "words"),
    [
        (cut, 1, "rank 1 gets fewer samples"),
        (cut, None, "for the whole world in one"),
        (order, None, "another order within the batch"),
        (swap, None, "only the split differs"),
        (same, None, "each of its ranks reads the same"),
        (other, None, "other samples"),
    ],
)
def test_samples(change: Callable[[Arm, int | None], None], only: int | None, words: str) -> None:
    subject = arm(2)
    change(subject, only)
    refused(subject, "in step 2", words)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("micro_batches", 2, "2 micro-batches in step 3 on rank 1"),
        ("gradient_bytes", 8, "8 bytes of gradients in step 3 on rank 1"),
        ("gradient_dtypes", ["bfloat16"], "gradients are bfloat16 in step 3"),
    ],
)
def test_one_step_that_is_another(name: str, value: object, words: str) -> None:
    subject = arm(2)
    setattr(subject[1].steps[2], name, value)
    refused(subject, words)


# Limits, and the baseline itself


def test_rounding_is_refused_at_two_ranks_and_allowed_at_three() -> None:
    assert verdict(arm(3, noise=1e-7)).verdict == "within tolerance"
    found = verdict(arm(2, noise=1e-7))
    assert found.verdict == "unequal"
    assert found.tolerance == 0
    assert (found.cause or "").startswith("no more than rounding: this one computes or averages")
    assert verdict(arm(3, noise=1e-3)).verdict == "unequal"


@pytest.mark.parametrize(
    ("quantities", "words"),
    [
        ("parameter_norm gradient_norm", "another step of the same gradients"),
        ("gradient_norm", "no more than rounding"),
    ],
)
def test_what_differs_first_by_rounding_tells_the_cause(quantities: str, words: str) -> None:
    """On some CPUs weights that have been moved leave rounding in the gradients, on others none."""
    base, subject = arm(2), arm(2, noise=1e-9)
    for trace in (*base, *subject):
        trace.elements.gradient = base[0].elements.gradient
        for step in trace.steps:
            step.parameter_norm = step.gradient_norm = 2.2756801736
    for trace in subject:
        for name in quantities.split():
            setattr(trace.steps[2], name, 2.2756801887)
    refused(subject, words, base=base)


@pytest.mark.parametrize(("precision", "noise"), [("fp64", 1e-14), ("fp32", 1e-7), ("bf16", 1e-7)])
def test_tolerance_follows_the_precision(precision: str, noise: float) -> None:
    kind: dict[str, Any] = {"precision": precision}
    if precision == "fp64":
        kind = {"parameters": {"float64": SIZE}}
    arms = [arm(3, noise=by * noise, **kind) for by in (0, 1, 1e4)]
    for trace in (trace for made in arms for trace in made if precision == "fp64"):
        trace.steps[0].gradient_dtypes = ["float64"]
    base, near, far = arms
    assert verdict(near, base=base).verdict != "unequal"
    assert verdict(far, base=base).verdict == "unequal"


def test_a_model_that_does_not_repeat_itself_sets_the_tolerance() -> None:
    again = arm(2, noise=1e-4)
    found = verdict(arm(2, noise=2e-4), again=again)
    assert found.verdict == "within tolerance"
    assert "not deterministic" in found.text
    refused(arm(2, everywhere(2, 2 * mean_of(local_gradients(2)))), again=again)


# Elements whose gradient is nothing but rounding


NOISE = slice(300, 320)  # first.bias, 5 % of all elements


def in_some_order(terms: Array, order: int) -> Array:
    """The fp32 sum over the first dimension, of which no order gives another in exact numbers."""
    shuffled = np.random.default_rng(order).permutation(terms).astype(np.float32)
    return np.asarray(np.add.accumulate(shuffled, axis=0)[-1], dtype=np.float64)


def gradient_of(step: int, n: int, order: int) -> Array:
    """The mean of `n` ranks: the terms of NOISE are there with both signs."""
    terms = np.random.default_rng(step).normal(size=(16 * n, SIZE)) + 1
    terms[8 * n :, NOISE] = -terms[: 8 * n, NOISE]
    return in_some_order(terms, order) / n


def adam_arm(n: int, order: int, zeros: slice = slice(0)) -> Arm:
    """Ten steps of Adam; BatchNorm's mean follows the bias. `zeros`: no first gradient there."""
    traces = arm(n)
    initial = traces[0].elements.initial
    m, v, weights, means = np.zeros(SIZE), np.zeros(SIZE), initial.copy(), np.zeros(20)
    gradients = []
    for step in range(1, 11):
        gradient = gradient_of(step, n, order)
        if step == 1:
            gradient[zeros] = 0
        gradients.append(gradient)
        means += 0.1 * (weights[NOISE] - means)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        weights -= 0.01 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-12)
    for trace in traces:
        trace.steps = [copy.deepcopy(trace.steps[0]) for _ in gradients]
        for step_trace, gradient in zip(trace.steps, gradients, strict=True):
            step_trace.gradient_norm = float(np.linalg.norm(gradient))
        trace.elements.gradient = gradients[0].copy()
        trace.elements.largest = np.max(np.abs(gradients), axis=0)
        trace.elements.buffers = np.concatenate([means, np.ones(20)])
        trace.elements.means = np.repeat([1.0, 0.0], 20)
        end(trace, weights)
    return traces


def end(trace: RankTrace, weights: Array) -> None:
    """With these, a copy of its own."""
    trace.elements.final, trace.final_sha256 = weights.copy(), str(hash(weights.tobytes()))


def moved(n: int, where: Any, by: float) -> Arm:
    """An arm that sums in another order, and whose weights have been moved in the end."""
    subject = adam_arm(n, order=5)
    for trace in subject:
        assert trace.elements.final is not None
        trace.elements.final[where] += by
        end(trace, trace.elements.final)
    return subject


@pytest.mark.parametrize(
    ("n", "zeros"),
    [(3, slice(0)), (4, slice(300, 310)), (8, NOISE)],
    ids=["none", "some", "all"],
)
def test_steps_of_nothing_but_rounding_are_left_out(n: int, zeros: slice) -> None:
    """Where its first gradient came out as zero, too."""
    base, subject = adam_arm(n, 1, zeros), adam_arm(n, 2, zeros)
    mine, its = subject[0].elements.buffers, base[0].elements.buffers
    assert mine is not None
    assert its is not None
    assert np.abs(mine - its).max() > 1e-3
    found = verdict(subject, base=base)
    assert found.verdict == "within tolerance", found
    assert found.difference is not None
    assert found.tolerance is not None
    assert found.difference < 1e-6 < found.tolerance
    share = float(found.text.split("; ")[1].split(" %")[0])
    assert 4 <= share <= 5
    assert found.text.endswith("whose gradients were nothing but rounding, are left out")


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("where", "by"), [(0, 0.01), (slice(0, 300), 1e-4), (300, 0.5), (300, np.nan)], ids=str
)
def test_what_rounding_does_not_explain_is_not_left_out(n: int, where: Any, by: float) -> None:
    """Elements with a gradient; or noise, further than training takes anything, and undefined.

    At two ranks rounding is refused as well, and hides no cause.
    """
    refused(moved(n, where, by), "another step of the same", base=adam_arm(n, order=1))


def test_elements_that_get_their_gradient_later_are_compared() -> None:
    """Rows of an embedding that the first step did not need."""
    base, subject = (adam_arm(3, order, zeros=slice(0, 100)) for order in (1, 2))
    for trace in subject:
        assert trace.elements.final is not None
        trace.elements.final[:50] += 0.01
        end(trace, trace.elements.final)
    refused(subject, "another step of the same", base=base)


def test_buffers_that_noise_does_not_explain() -> None:
    subject = adam_arm(3, order=2)
    for trace in subject:
        assert trace.elements.buffers is not None
        trace.elements.buffers[20:] *= 1.5
    refused(subject, "are computed otherwise", base=adam_arm(3, order=1))


def test_noise_does_not_widen_the_tolerance() -> None:
    """Of a model that does not repeat itself: at two ranks as well."""
    base, again = adam_arm(2, order=1), adam_arm(2, order=2)
    found = verdict(adam_arm(2, order=3), base=base, again=again)
    assert found.verdict == "within tolerance", found
    assert found.tolerance == pytest.approx(1e-4)
    assert "not deterministic" in found.text
    refused(moved(2, slice(0, 300), 1e-4), "parameters differ", base=base, again=again)


def first_gradient_times(factor: float) -> list[RankTrace]:
    ranks = arm(2)
    for trace in ranks:
        assert trace.elements.gradient is not None
        trace.elements.gradient = factor * trace.elements.gradient
    return ranks


def test_nothing_is_compared_with_a_baseline_that_proves_nothing() -> None:
    apart = arm(2)
    apart[1].final_sha256 = "elsewhere"
    other_data = arm(2)
    other_data[0].steps[0].samples[0] = "other"
    for base, again, words in (
        ([], arm(2), "recorded no work trace"),
        (apart, arm(2), "end with different parameters"),
        (arm(2), other_data, "sees other samples when it is run again; seed"),
        (arm(2), arm(2, initial_sha256="other"), "starts from other weights"),
        (arm(2), arm(2, noise=5.0), "when it is run again"),
        (arm(2), first_gradient_times(1.5), "when it is run again"),
    ):
        rows = compare({"base": base, "again": again, "arm": arm(2)}, "base", "again")
        assert {row.verdict for row in rows} == {"not compared"}
        assert all(words in row.text for row in rows), rows


# Traces


def test_a_sample_has_a_part_of_every_parameter() -> None:
    tensors = [torch.arange(700_000.0), torch.ones(3), torch.ones(500, 500)]
    every = stride(tensors)
    counts = [-(-t.numel() // every) for t in tensors]
    found = sample(tensors, every)
    assert min(counts) >= 1
    assert MAX_SAMPLED // 2 < len(found) == sum(counts) <= MAX_SAMPLED
    assert found[1] == every
    assert np.array_equal(sample(tensors[1:2], stride(tensors[1:2])), np.ones(3))


def test_samples_are_told_apart_by_their_content() -> None:
    images, labels = torch.rand(4, 2, 2), torch.tensor([0, 1, 0, 1])
    plain = hash_samples((images, labels))
    assert len(set(plain)) == 4
    assert hash_samples((images.flip(0), labels.flip(0))) == plain[::-1]
    # What the script gives to its model beside the inputs: net(batch) sees what net(x) does.
    assert hash_samples({"images": images, "labels": labels}) == hash_samples(images) == plain
    changed = images.clone()
    changed[2, 0, 0] += 1
    assert [a == b for a, b in zip(hash_samples(changed), plain, strict=True)] == [
        True, True, False, True,
    ]  # fmt: skip
    assert hash_samples((torch.empty(0, 3),)) == []
    assert hash_samples("no tensors") == []
