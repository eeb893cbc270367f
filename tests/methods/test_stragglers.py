"""`--stragglers`: a rank that is late is named, with its phase; nothing is recorded without it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor, nn

from hvdtrain import Backend
from hvdtrain.training.callbacks import stragglers
from hvdtrain.training.callbacks.stragglers import (
    PHASES,
    WINDOW,
    Step,
    Stragglers,
    _lateness,
    _phase,
)
from hvdtrain.transports.arrivals import Arrivals
from tests.methods.arms import TWO
from tests.methods.data_runs import Regression, train
from tests.ranks import Ranks
from tests.runs import records, run_json

SEEN = pytest.mark.parametrize(
    "ranks",
    [("ddp-torchrun", 2), ("compat-torchrun", 3), ("ddp-mpi", 2), ("compat-mpi", 2)],
    indirect=True,
)
STEPS = WINDOW + 5
# What a step takes, made up: how long it takes here is seen by benchmarks/stragglers.py.
FAST: Step = (1.0, 5.0, 20.0, 2.0)  # data, compute, wait, communication
LATE: dict[str, Step] = {"data": (21.0, 5.0, 0.0, 2.0), "compute": (1.0, 25.0, 0.0, 2.0)}


def run_with(backend: Backend, /, folder: Path, phase: str, **changes: Any) -> dict[str, Any]:
    """Train, where the steps of the last rank take long in `phase`."""
    changes = {"max_steps": STEPS, "epochs": 99, "checkpoint_every": 10**6, **changes}
    is_late = backend.world.rank == backend.world.size - 1
    step = LATE.get(phase, FAST) if is_late else FAST
    with patch.object(Stragglers, "_measure", lambda *_: step):
        task = Regression(16 * backend.world.size)
        found = train(backend, task, folder, stragglers=True, **changes)
    assert Arrivals.current is None, "the run has switched the recorder off"
    return found


@pytest.mark.parametrize("ranks", [("ddp-torchrun", 2), ("compat-torchrun", 3)], indirect=True)
@pytest.mark.parametrize(
    ("phase", "words"), [("data", "waiting for data"), ("compute", "computing")]
)
def test_a_late_rank_is_named_with_its_phase(
    ranks: Ranks, phase: str, words: str, tmp_path: Path
) -> None:
    lines = ranks.run(run_with, tmp_path, phase)[0]["lines"]
    late = ranks.n - 1
    (line,) = [line for line in lines if line.startswith("late ")]
    assert line.startswith(f"late     rank {late}")
    assert f"longer {words}: " in line
    by_rank = [FAST] * late + [LATE[phase]]
    (record,) = [r for r in records(tmp_path) if "wait_ms_p50" in r]
    assert record["step"] == WINDOW
    assert record["late_ms"] == [-10.0 if ranks.n == 3 else -20.0] * late + [20.0]
    for number, name in enumerate(PHASES):
        for percentile in ("p50", "p95"):
            assert record[f"{name}_ms_{percentile}"] == [step[number] for step in by_rank]
    about = run_json(tmp_path)["ranks_ms"]
    assert about == [
        {name: {"p50": ms, "p95": ms} for name, ms in zip(PHASES, step, strict=True)}
        for step in by_rank
    ]


class Stamped(Regression):
    """Says when each step's loss was known."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.at_s: list[float] = []

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(net, batch)
        self.at_s.append(time.monotonic())
        return loss


def record_arrivals(backend: Backend, /, folder: Path) -> dict[str, Any]:
    """Return when each step's loss was known, what was recorded in it, and its phases."""
    taken: list[Any] = []
    steps: list[Step] = []
    take, measure = Arrivals.take, Stragglers._measure

    def take_and_keep(self: Arrivals) -> Any:
        taken.append(take(self))
        return taken[-1]

    def measure_and_keep(self: Stragglers, trainer: Any) -> Step:
        steps.append(measure(self, trainer))
        taken_in_step.append(taken[-1])
        return steps[-1]

    taken_in_step: list[Any] = []
    task = Stamped(16 * backend.world.size)
    changes = {"max_steps": 6, "epochs": 99, "checkpoint_every": 10**6, "log_every": 10**6}
    with (
        patch.object(Arrivals, "take", take_and_keep),
        patch.object(Stragglers, "_measure", measure_and_keep),
    ):
        train(backend, task, folder, stragglers=True, **changes)
    return {"at_s": task.at_s, "taken": taken_in_step, "steps": steps}


@SEEN
def test_a_rank_waits_until_the_last_one_has_arrived(ranks: Ranks, tmp_path: Path) -> None:
    """By one clock for all ranks of a host: by the order of what happens, not by how long."""
    found = ranks.run(record_arrivals, tmp_path)
    for k in range(6):
        last = max(rank["at_s"][k] for rank in found)
        for rank in found:
            blocked, waits = rank["taken"][k]
            assert waits
            begin, end = max(waits)
            assert begin > rank["at_s"][k], "it has computed until then"
            assert end > last, "nobody can have arrived before"
            assert max(end for _, end in blocked) > last
            assert all(phase >= 0 for phase in rank["steps"][k]), rank["steps"][k]


@pytest.mark.parametrize(
    "ranks",
    [("ddp-gloo", 2), pytest.param(("horovod-mpi", 2), marks=pytest.mark.exhaustive)],
    indirect=True,
)
def test_where_arrival_is_not_seen(ranks: Ranks, tmp_path: Path) -> None:
    lines = ranks.run(run_with, tmp_path, "data")[0]["lines"]
    assert not any(line.startswith("late ") for line in lines)
    (record,) = [r for r in records(tmp_path) if "data_ms_p50" in r]
    assert record["data_ms_p50"] == [1.0, 21.0]
    assert "wait_ms_p50" not in record


def test_the_phases_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream's ranks exchange sizes while they load (101 to 102); then a batch comes (103), the
    last bucket is queued (107), the last rank arrives (110), and the bytes are there (112).
    """
    now = 100.0
    monkeypatch.setattr(stragglers, "time", SimpleNamespace(monotonic=lambda: now))
    trainer: Any = SimpleNamespace(meter=SimpleNamespace(data_s=7.0))
    measured = Stragglers()
    measured._arrivals = Arrivals()
    measured._start_step(trainer)
    measured._first_batch = 103.0
    measured._arrivals._operations.extend(
        [(101.0, 102.0, True), (105.0, 109.0, False), (107.0, 112.0, False)]
    )
    measured._arrivals._waits.extend([(101.0, 101.5), (105.0, 108.5), (109.0, 110.0)])
    now, trainer.meter.data_s = 114.0, 10.0
    step = measured._measure(trainer)
    # 3 s of data, 1 s of them meeting; blocked for 1 and 5 s; waiting for 0.5, 1.5 and 1 s
    assert step == (2000.0, 6000.0, 3000.0, 3000.0)
    assert sum(step) == 1000 * (now - 100.0)


@TWO
def test_it_changes_no_bits(ranks: Ranks, tmp_path: Path) -> None:
    task = Regression(16 * ranks.n)
    changes = {"max_steps": 9, "epochs": 99}
    measured = ranks.run(train, task, tmp_path / "on", stragglers=True, **changes)
    plain = ranks.run(train, task, tmp_path / "off", **changes)
    assert measured[0]["digest"] == plain[0]["digest"]
    assert not any(line.startswith("ranks ") for line in plain[0]["lines"])


# Who is late


def steps_of(*ranks: Step) -> list[list[Step]]:
    return [[step] * WINDOW for step in ranks]


@pytest.mark.parametrize(
    ("everyone", "wanted"),
    [
        # data, compute, wait, communication
        (steps_of((0, 10, 3, 1), (3, 10, 0, 1)), (1, 0)),
        (steps_of((0, 10, 3, 1), (0, 13, 0, 1)), (1, 1)),
        (steps_of((0, 10, 2, 1), (0, 12, 0, 1)), None),  # 18 %
        (steps_of((0, 15, 0, 1), (0, 10, 5, 1), (0, 10, 5, 1)), (0, 1)),
        (
            steps_of((0, 15, 0, 1), (5, 10, 0, 1), (0, 10, 5, 1), (0, 10, 5, 1), (0, 10, 5, 1)),
            (0, 1),
        ),
        (steps_of((0, 10, 0, 1), (0, 10, 0, 1)), None),
    ],
)
def test_who_is_late(everyone: list[list[Step]], wanted: tuple[int, int] | None) -> None:
    late = [_lateness(everyone, rank) for rank in range(len(everyone))]
    worst = max(range(len(late)), key=lambda rank: late[rank][0])
    found = (worst, _phase(everyone, worst)) if late[worst][2] else None
    assert found == wanted


def test_four_long_steps_of_fifty_are_no_straggler() -> None:
    """Although the mean is over 20 %; and five are."""
    for hiccups, wanted in ((4, False), (5, True)):
        normal: list[Step] = [(0.0, 10.0, 0.0, 0.0)] * (WINDOW - hiccups)
        slow = [*normal, *[(0.0, 110.0, 0.0, 0.0)] * hiccups]
        fast = [*normal, *[(0.0, 10.0, 100.0, 0.0)] * hiccups]
        assert _lateness([fast, slow], 1)[2] is wanted
