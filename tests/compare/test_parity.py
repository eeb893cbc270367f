"""Equal work is accepted and every seeded fault refused for the right cause, on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hvdtrain.compare.proof.parity import compare
from hvdtrain.compare.proof.work_trace import RankTrace
from hvdtrain.compare.record import ParityRow
from tests.compare.prove import STEPS, prove
from tests.ranks import Ranks

# Its fixtures of the module are made once.
pytestmark = pytest.mark.xdist_group("compare-parity")

EXHAUSTIVE = pytest.mark.exhaustive
FAULTY = "tests.compare.faulty:"
ALWAYS = ("ddp/gloo", "again")


class Proofs:
    """Accounts of arms on live ranks of `n`, each taken once."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.pool = Ranks("ddp-gloo", n)
        self._known: dict[str, list[RankTrace]] = {}

    def take(self, arm: str, backend: str, task: str, **changes: Any) -> list[RankTrace]:
        key = f"{arm} {task} {sorted(changes.items())}"
        if key not in self._known:
            self._known[key] = self.pool.run(prove, backend, task, **changes)
        return self._known[key]

    def traces(self, task: str, **changes: Any) -> dict[str, list[RankTrace]]:
        return {arm: self.take(arm, "ddp", task, **changes) for arm in ALWAYS}

    def verdict(self, fault: str, task: str, **changes: Any) -> ParityRow:
        """On an arm of faulty.py."""
        arm = self.take(fault, FAULTY + fault, task, **changes)
        return judge(self.traces(task, **changes), arm)


def judge(traces: dict[str, list[RankTrace]], arm: list[RankTrace]) -> ParityRow:
    """The verdict on one more arm; the duplicate must always be found equal."""
    rows = compare({**traces, "arm": arm}, "ddp/gloo", "again")
    by_arm = {row.arm: row for row in rows}
    assert by_arm["again"].verdict == "bitwise"
    return by_arm["arm"]


@pytest.fixture(
    scope="module", params=[2, pytest.param(3, marks=pytest.mark.exhaustive)], ids=["x2", "x3"]
)
def proofs(request: pytest.FixtureRequest) -> Iterator[Proofs]:
    found = Proofs(request.param)
    yield found
    found.pool.close()


def accept(row: ParityRow, n: int) -> None:
    assert row.cause is None
    if n <= 2:
        assert row.verdict == "bitwise", row
    else:
        assert row.verdict == "within tolerance", row
        # Rounding, not a fault that slipped through.
        assert row.difference is not None
        assert row.tolerance is not None
        assert 0 < row.difference < 2e-6 < row.tolerance


@pytest.mark.parametrize(
    "task",
    ["digits", "images", pytest.param("biased", marks=EXHAUSTIVE)],
)
def test_equal_work_is_accepted(proofs: Proofs, task: str) -> None:
    row = proofs.verdict("Correct", task)
    accept(row, proofs.n)
    noisy = proofs.n > 2 and task == "biased"
    assert ("whose gradients were nothing but rounding" in row.text) == noisy, row


@pytest.mark.parametrize(
    ("proofs", "arm"),
    [
        (2, "ddp-torchrun"),
        (2, "compat-torchrun"),
        pytest.param(2, "compat-mpi", marks=EXHAUSTIVE),
        pytest.param(3, "compat-torchrun", marks=EXHAUSTIVE),
        pytest.param(3, "horovod-mpi", marks=EXHAUSTIVE),
    ],
    indirect=["proofs"],
)
def test_backends_do_equal_work(proofs: Proofs, arm: str) -> None:
    """ddp and compat over shm, compat over MPI, real Horovod; and accumulation."""
    pool = Ranks(arm, proofs.n)
    changes: dict[str, Any] = {"accumulate": 2, "clip_norm": 0.3}
    try:
        plain = {task: pool.run(prove, "", task) for task in ("images", "biased")}
        clipped = pool.run(prove, "", "digits", **changes)
        sharded = []  # it changes no bits, so that it is no other method
        if arm in ("ddp-torchrun", "compat-mpi"):
            sharded = pool.run(prove, "", "digits", shard_optimizer=True, **changes)
    finally:
        pool.close()
    for task, taken in plain.items():
        accept(judge(proofs.traces(task), taken), proofs.n)
    accept(judge(proofs.traces("digits", **changes), clipped), proofs.n)
    if sharded:
        accept(judge(proofs.traces("digits", **changes), sharded), proofs.n)
    for trace in (*plain["images"], *clipped):
        assert len(trace.steps) == STEPS  # not twice, by Horovod's two classes


# What is computed of traces: test_diagnosis.py; mistakes in scripts: test_commands.py.
FAULTS = [
    ("ScalesLr", "digits", {"accumulate": 3}, "by the number of ranks"),
    ("HalfPrecision", "biased", {}, "rounded to fp16"),
    ("OneLeftOut", "digits", {}, "0.weight alone: gradients are not synchronised"),
]
FAULTS_AT = [
    *((2, *row) for row in FAULTS),
    *(pytest.param(3, *row, marks=EXHAUSTIVE) for row in FAULTS[:2]),
]


@pytest.mark.parametrize(
    ("proofs", "fault", "task", "changes", "cause"), FAULTS_AT, indirect=["proofs"]
)
def test_a_fault_is_refused(
    proofs: Proofs, fault: str, task: str, changes: dict[str, Any], cause: str
) -> None:
    found = proofs.verdict(fault, task, **changes)
    assert found.verdict == "unequal", found
    assert cause in (found.cause or ""), found


def test_without_the_duplicate_nothing_shows_that_the_model_repeats(proofs: Proofs) -> None:
    traces = proofs.traces("digits")
    arm = proofs.take("HalfPrecision", FAULTY + "HalfPrecision", "digits")
    found = compare({"ddp/gloo": traces["ddp/gloo"], "arm": arm}, "ddp/gloo")[0]
    assert found.tolerance == 1e-5
    assert "rounded to fp16" in (found.cause or "")  # told without the local gradients as well
