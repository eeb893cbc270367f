"""Verdicts and causes on traces made by hand: what real arms do rarely, at more world sizes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.compare.probe.hvdtrain_probe import MAX_SAMPLED, hash_samples, sample, stride
from hvdtrain.compare.proof.diagnosis import OTHER_BUFFERS, OTHER_UPDATE, ROUNDING
from hvdtrain.compare.proof.gradient_diagnosis import round_to
from hvdtrain.compare.proof.parity import compare
from hvdtrain.compare.proof.work_trace import Array, ElementSample, RankTrace, StepTrace
from hvdtrain.compare.record import ParityRow
from tests.messages import Message

Arm = list[RankTrace]
LAYOUT = [("first.weight", 300), ("first.bias", 20), ("last.weight", 80)]
SIZE = 400


def local_gradients(n: int) -> list[Array]:
    """Of every rank: parts in common, and of different norms."""
    draw = np.random.default_rng(7)
    common = draw.normal(size=SIZE)
    grads = [common + (rank + 1) * draw.normal(size=SIZE) for rank in range(n)]
    return [g.astype(np.float32).astype(np.float64) for g in grads]


def mean_of(n: int) -> Array:
    return np.asarray(np.sum(local_gradients(n), axis=0) / n)


def arm(n: int, gradients: list[Array] | None = None, noise: float = 0.0, **changes: Any) -> Arm:
    """An arm of plain gradient descent that took three steps; by default a correct one."""
    initial = np.random.default_rng(1).normal(size=SIZE)
    traces = []
    for rank in range(n):
        gradient = (mean_of(n) if gradients is None else gradients[rank]).copy()
        gradient += noise * np.random.default_rng(2).normal(size=SIZE)
        final = initial - 0.3 * gradient
        empty, unseen = np.empty(0), np.full(SIZE, np.nan)
        samples = ElementSample(
            LAYOUT, initial, gradient, abs(gradient), final, empty, empty, unseen
        )
        norm = float(np.linalg.norm(gradient))
        steps = [
            StepTrace(1, [f"{step}-{rank}-{i}" for i in range(4)], 1, norm, 9, ["float32"], [0.1])
            for step in range(3)
        ]
        trace = RankTrace(
            rank, n, "float32", {"float32": SIZE}, "SGD",
            [{"momentum": "0"}], 0, "start", samples, steps,
            str(hash(final.tobytes())), "none",
        )  # fmt: skip
        traces.append(trace)
        for name, value in changes.items():
            setattr(trace, name, value)
    return traces


def verdict(subject: Arm, base: Arm | None = None, again: Arm | None = None) -> ParityRow:
    """The verdict on an arm; the baseline's duplicate repeats it, unless it is given."""
    n = len(subject)
    base = base or arm(n)
    for trace, own in zip(base, local_gradients(n), strict=True):
        trace.elements.local, trace.local_norm = own, float(np.linalg.norm(own))
    traces = {"base": base, "again": again or copy.deepcopy(base), "arm": subject}
    return {row.arm: row for row in compare(traces, "base", "again")}["arm"]


def refused(subject: Arm, case: object = "", **more: Any) -> str:
    """Return what is said of an arm that must be unequal."""
    found = verdict(subject, **more)
    assert found.verdict == "unequal", (case, found)
    return f"{found.text} | {found.cause}"


# What was made of the local gradients.
MADE: list[Callable[[int, list[Array]], Any]] = [
    lambda n, g: sum(g),
    lambda n, g: sum(g) / n**2,
    lambda n, g: 0.7 * sum(g) / n,
    lambda n, g: g,
    lambda n, g: g[0],
    lambda n, g: sum((i + 1) * x for i, x in enumerate(g)) / 9,
    lambda n, g: sum(x / max(1, np.linalg.norm(x) / 30) for x in g) / n,
    lambda n, g: round_to(np.sum([round_to(x, 11) for x in g], axis=0), 11) / n,
    lambda n, g: round_to(np.sum([round_to(x, 8) for x in g], axis=0), 8) / n,
    lambda n, g: [sum(g) / n + (i == 0) * g[0] - (i == 1) * g[0] for i in range(n)],
    lambda n, g: sum(g) / n + np.random.default_rng(9).normal(size=SIZE),
    lambda n, g: np.where(np.arange(SIZE) // 20 == 15, n, 1) * sum(g) / n,
]


@pytest.mark.parametrize("n", [2, 3])
def test_what_was_made_of_the_local_gradients_is_found(n: int, message: Message) -> None:
    """messages.txt has the cause of each."""
    made = [make(n, local_gradients(n)) for make in MADE]
    arms = [arm(n, found if isinstance(found, list) else [found] * n) for found in made]
    message("\n".join(map(refused, arms, itertools.count())))


def test_values_that_are_not_finite_are_equal_to_themselves_alone() -> None:
    gradient = mean_of(2)
    gradient[0] = np.nan
    assert verdict(arm(2, [gradient] * 2), base=arm(2, [gradient] * 2)).verdict == "bitwise"
    assert "differs by inf of its norm" in refused(arm(2, [gradient] * 2))


# What is counted


def of_ranks(name: str, *values: Any) -> Arm:
    """An arm of two ranks with these values in their second step."""
    subject = arm(2)
    for trace, value in zip(subject, values, strict=True):
        setattr(trace.steps[1], name, value)
    return subject


def larger() -> Arm:
    subject = arm(2)
    subject[0].elements.layout = [*LAYOUT[:1], ("first.bias", 21), *LAYOUT[2:]]
    return subject


def moved(step: int, name: str, by: float) -> Arm:
    """An arm with a norm that differs in a step, and other gradients after it. On some CPUs weights
    that have been moved leave rounding in the gradients, on others none.
    """
    subject = arm(2, final_sha256="elsewhere")
    for trace in subject:
        setattr(trace.steps[step], name, getattr(trace.steps[step], name) * (1 + by))
        trace.steps[2].gradient_norm *= 1 + by
    return subject


# What the ranks see in their second step.
ONE, TWO = ([f"1-{rank}-{i}" for i in range(4)] for rank in range(2))
DIFFERENT = [
    arm(2, world_size=1),
    arm(2, optimizer="AdamW"),
    arm(2, settings=[{"momentum": "0.9"}]),
    arm(2, settings=[{}, {}]),
    arm(2, state_step=1),
    arm(2, precision="bfloat16"),
    arm(2, parameters={"bfloat16": SIZE}),
    arm(2, parameters={"float32": 7}),
    larger(),
    arm(2, initial_sha256="other"),
    arm(2)[:1] + arm(2, initial_sha256="other")[1:],
    arm(2, final_buffers_sha256="other"),
    of_ranks("samples", ONE, TWO[1:]),
    of_ranks("samples", ONE[1:], TWO[1:]),
    of_ranks("samples", ONE[::-1], TWO),
    of_ranks("samples", TWO, ONE),
    of_ranks("samples", ONE, ONE),
    of_ranks("samples", ONE, ["other", *TWO[1:]]),
    of_ranks("micro_batches", 1, 2),
    of_ranks("gradient_bytes", 9, 8),
    of_ranks("gradient_dtypes", ["float32"], ["bfloat16"]),
    moved(1, "parameter_norm", 1e-9),
    moved(2, "gradient_norm", 1e-9),
    moved(1, "parameter_norm", 0.1),
    moved(2, "gradient_norm", 0.1),
]


def test_what_must_be_the_same(message: Message) -> None:
    """messages.txt has each difference with its cause, and the rates of four ranks at last."""
    (row,) = compare({"base": arm(2), "arm": arm(1)}, "base")
    said = [row.text, *map(refused, DIFFERENT, itertools.count())]
    for ratio in (4, 0.25, 8, 1 + 1e-9):
        base, subject = arm(4), arm(4)
        for trace in (*base, *subject):
            trace.steps[0].micro_batches = 2
        for trace in subject:
            trace.steps[2].lr = [0.1 * ratio]
        said.append(refused(subject, base=base))
    message("\n".join(said))


def test_samples_that_one_script_hides_are_not_other_samples() -> None:
    """Such as of a model that is called without tensors: the gradients tell. Nor are names."""
    hidden = arm(2)
    for trace in hidden:
        trace.elements.layout = [(f"net.{name}", size) for name, size in LAYOUT]
        for step in trace.steps:
            step.samples = []
    row = verdict(hidden)
    assert (row.verdict, "the samples could not be recorded" in row.text) == ("bitwise", True)


# Limits, and the baseline itself


def test_rounding_is_refused_at_two_ranks_and_allowed_at_three() -> None:
    assert verdict(arm(3, noise=1e-7)).verdict == "within tolerance"
    found = verdict(arm(2, noise=1e-7))
    assert (found.verdict, found.tolerance, found.cause) == ("unequal", 0, ROUNDING)
    assert verdict(arm(3, noise=1e-3)).verdict == "unequal"


@pytest.mark.parametrize(
    ("precision", "sent", "noise"),
    [
        ("float64", "float64", 1e-14),
        ("float32", "float32", 1e-7),
        ("bfloat16", "float32", 1e-7),
    ],
)
def test_tolerance_follows_the_precision(precision: str, sent: str, noise: float) -> None:
    base, near, far = (
        arm(3, noise=by * noise, precision=precision, parameters={sent: SIZE}) for by in (0, 1, 1e4)
    )
    for trace in (*base, *near, *far):
        trace.steps[0].gradient_dtypes = [sent]
    assert verdict(near, base=base).verdict != "unequal"
    refused(far, base=base)


def test_what_shows_that_the_baseline_repeats_sets_the_tolerance() -> None:
    (row,) = compare({"base": arm(2), "arm": arm(2, noise=1e-7)}, "base")
    assert row.verdict == "within tolerance"
    assert row.tolerance == pytest.approx(3e-5)  # of three steps
    again = arm(2, noise=1e-4)
    found = verdict(arm(2, noise=2e-4), again=again)
    assert (found.verdict, "not deterministic" in found.text) == ("within tolerance", True)
    refused(arm(2, [2 * mean_of(2)] * 2), again=again)


def test_nothing_is_compared_with_a_baseline_that_proves_nothing(message: Message) -> None:
    apart, other_data, louder = arm(2), arm(2), arm(2)
    apart[1].final_sha256 = "elsewhere"
    other_data[0].steps[0].samples[0] = "other"
    for trace in louder:
        trace.elements.gradient = 1.5 * trace.elements.gradient
    said: list[str] = []
    for base, again in (
        ([], arm(2)),
        (apart, arm(2)),
        (arm(2), other_data),
        (arm(2), arm(2, initial_sha256="other")),
        (arm(2), arm(2, noise=5.0)),
        (arm(2), louder),
    ):
        rows = compare({"base": base, "again": again, "arm": arm(2)}, "base", "again")
        assert {row.verdict for row in rows} == {"not compared"}, (len(said), rows)
        said += {row.text for row in rows}
    message("\n".join(said))


# Elements whose gradient is nothing but rounding


NOISE = slice(300, 320)  # first.bias, 5 % of all elements


def gradient_of(step: int, n: int, order: int) -> Array:
    """The mean of `n` ranks, of fp32 sums in some order: the terms of NOISE are there with both
    signs.
    """
    terms = np.random.default_rng(step).normal(size=(16 * n, SIZE)) + 1
    terms[8 * n :, NOISE] = -terms[: 8 * n, NOISE]
    shuffled = np.random.default_rng(order).permutation(terms).astype(np.float32)
    return np.asarray(np.add.accumulate(shuffled, axis=0)[-1], dtype=np.float64) / n


def adam_arm(
    n: int, order: int, zeros: slice = slice(0), where: Any = slice(0), by: float = 0.0
) -> Arm:
    """Ten steps of Adam; BatchNorm's mean follows the bias. `zeros`: no first gradient there.
    `where`: weights that are moved in the end.
    """
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
    weights[where] += by
    for trace in traces:
        trace.steps = [copy.deepcopy(trace.steps[0]) for _ in gradients]
        for step_trace, gradient in zip(trace.steps, gradients, strict=True):
            step_trace.gradient_norm = float(np.linalg.norm(gradient))
        trace.elements.gradient = gradients[0].copy()
        trace.elements.largest = np.max(np.abs(gradients), axis=0)
        trace.elements.buffers = np.concatenate([means, np.ones(20)])
        trace.elements.means = np.repeat([1.0, 0.0], 20)
        trace.elements.final, trace.final_sha256 = weights.copy(), str(hash(weights.tobytes()))
    return traces


@pytest.mark.parametrize(("n", "zeros"), [(3, slice(0)), (8, slice(300, 310))])
def test_steps_of_nothing_but_rounding_are_left_out(n: int, zeros: slice) -> None:
    """Where its first gradient came out as zero, too."""
    base, subject = adam_arm(n, 1, zeros), adam_arm(n, 2, zeros)
    assert np.abs(subject[0].elements.buffers - base[0].elements.buffers).max() > 1e-3
    found = verdict(subject, base=base)
    assert found.verdict == "within tolerance", found
    assert (found.difference or 1) < 1e-6 < (found.tolerance or 0)
    left_out = found.text.split("; ")[1]
    assert 4 <= float(left_out.split(" %")[0]) <= 5, left_out


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    ("where", "by"), [(0, 0.01), (slice(0, 300), 1e-4), (300, 0.5), (300, np.nan)], ids=str
)
def test_what_rounding_does_not_explain_is_not_left_out(n: int, where: Any, by: float) -> None:
    """Elements with a gradient; or noise, further than training takes anything, and undefined.

    At two ranks rounding is refused as well, and hides no cause.
    """
    subject = adam_arm(n, 5, where=where, by=by)
    assert OTHER_UPDATE in refused(subject, base=adam_arm(n, 1))


def test_elements_that_get_their_gradient_later_are_compared_and_buffers() -> None:
    """Rows of an embedding that the first step did not need."""
    rows = slice(0, 100)
    subject = adam_arm(3, 2, rows, slice(0, 50), 0.01)
    assert OTHER_UPDATE in refused(subject, base=adam_arm(3, 1, rows))
    subject = adam_arm(3, 2)
    for trace in subject:
        trace.elements.buffers[20:] *= 1.5
    assert OTHER_BUFFERS in refused(subject, base=adam_arm(3, 1))


def test_noise_does_not_widen_the_tolerance() -> None:
    """Of a model that does not repeat itself: at two ranks as well."""
    base, again = adam_arm(2, 1), adam_arm(2, 2)
    found = verdict(adam_arm(2, 3), base=base, again=again)
    assert found.verdict == "within tolerance", found
    assert found.tolerance == pytest.approx(1e-4)
    subject = adam_arm(2, 5, where=slice(0, 300), by=1e-4)
    assert "parameters differ" in refused(subject, base=base, again=again)


# Traces


def test_a_sample_has_a_part_of_every_parameter() -> None:
    tensors = [torch.arange(700_000.0), torch.ones(3), torch.ones(500, 500)]
    every = stride(tensors)
    counts = [-(-t.numel() // every) for t in tensors]
    found = sample(tensors, every)
    assert min(counts) >= 1
    assert MAX_SAMPLED // 2 < len(found) == sum(counts) <= MAX_SAMPLED
    assert found[1] == every


def test_samples_are_told_apart_by_their_content() -> None:
    images, labels = torch.rand(4, 2, 2), torch.tensor([0, 1, 0, 1])
    plain = hash_samples((images, labels))
    assert len(set(plain)) == 4
    assert hash_samples((images.flip(0), labels.flip(0))) == plain[::-1]
    # What the script gives to its model beside the inputs: net(batch) sees what net(x) does.
    assert hash_samples({"images": images, "labels": labels}) == hash_samples(images) == plain
    images[2, 0, 0] += 1
    changed = hash_samples(images)
    assert [a == b for a, b in zip(changed, plain, strict=True)] == [True, True, False, True]
    assert hash_samples((torch.empty(0, 3),)) == hash_samples("no tensors") == []
