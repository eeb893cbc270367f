"""`--stragglers`: a rank that is late is named, with its phase; nothing is recorded without it."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from hvdtrain import Backend, TrainConfig
from hvdtrain.errors import InputError
from hvdtrain.training.stragglers import WINDOW, Step, _lateness, _phase
from hvdtrain.transports.arrivals import Arrivals, overlap
from tests.methods.data_runs import Regression, samples, train
from tests.ranks import Ranks
from tests.runs import records, run_json

SEEN = pytest.mark.parametrize(
    "ranks",
    [
        *((f"{name}-torchrun", n) for name in ("ddp", "compat") for n in (2, 3)),
        ("ddp-mpi", 2),
        ("compat-mpi", 2),
    ],
    indirect=True,
)
STEPS = WINDOW + 5
# Lets a process that has stopped itself go on after 100 ms.
CONTINUE = """while read -r _ _ state _ < /proc/$0/stat; do
    if [ "$state" = T ]; then sleep 0.1; kill -CONT $0; fi
    sleep 0.005
done"""


class SlowData(TensorDataset):
    """Each sample takes `ms`."""

    def __init__(self, num: int, ms: float) -> None:
        super().__init__(*samples(num))
        self.ms = ms

    def __getitem__(self, index: Any) -> Any:
        time.sleep(self.ms / 1000)
        return tuple(t[index] for t in self.tensors)


class Slow(Regression):
    """A step computes for 5 ms; for 20 ms more if this rank is slow in a phase; or this process is
    stopped for 100 ms in each third step.
    """

    def __init__(self, num: int, phase: str) -> None:
        super().__init__(num)
        self.phase = phase
        self.steps = 0

    def datasets(self) -> tuple[Dataset[Any], Dataset[Any] | None]:
        return SlowData(self.num, 5 if self.phase == "data" else 0), None

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        if self.phase == "stopped" and self.steps % 3 == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.025 if self.phase == "compute" else 0.005)
        return super().loss(net, batch)


def run_with(backend: Backend, /, folder: Path, phase: str, **changes: Any) -> dict[str, Any]:
    """Train with the last rank slow in `phase`, or stopped in it."""
    changes = {"max_steps": STEPS, "epochs": 99, "checkpoint_every": 10**6, **changes}
    is_late = backend.world.rank == backend.world.size - 1
    waker = None
    if is_late and phase == "stopped":
        waker = subprocess.Popen(["sh", "-c", CONTINUE, str(os.getpid())])
    try:
        task = Slow(16 * backend.world.size, phase if is_late else "")
        found = train(backend, task, folder, stragglers=True, **changes)
    finally:
        if waker is not None:
            waker.terminate()
            waker.wait()
    assert Arrivals.current is None, "the run has switched the recorder off"
    return found


@SEEN
@pytest.mark.parametrize(
    ("phase", "words"),
    [("data", "waiting for data"), ("compute", "computing"), ("stopped", "computing")],
)
def test_a_late_rank_is_named_with_its_phase(
    ranks: Ranks, phase: str, words: str, tmp_path: Path
) -> None:
    found = ranks.run(run_with, tmp_path, phase)
    late, fast = ranks.n - 1, 0
    (line,) = [line for line in found[0]["lines"] if line.startswith("late ")]
    match = re.fullmatch(
        rf"late     rank {late}(?: on \S+)?: ([\d.]+) ms a step after the others, (\d+) % of their "
        rf"own time, in steps 1 to {WINDOW}; longer {words}: ([\d.]+) ms, the others ([\d.]+) ms",
        line,
    )
    assert match, line
    ms, percent, own, others = map(float, match.groups())
    assert 8 < ms < 100
    assert percent > 50
    assert own - others > 8
    (record,) = [r for r in records(tmp_path) if "wait_ms_p50" in r]
    assert record["step"] == WINDOW
    assert record["late_ms"][late] == pytest.approx(ms, abs=0.1)
    if phase != "stopped":  # in each third step alone
        assert record["wait_ms_p50"][fast] > record["wait_ms_p50"][late] + 8
        assert record[f"{phase}_ms_p50"][late] > record[f"{phase}_ms_p50"][fast] + 15
        other = "compute" if phase == "data" else "data"
        assert abs(record[f"{other}_ms_p50"][late] - record[f"{other}_ms_p50"][fast]) < 8
    about = run_json(tmp_path)["ranks_ms"]
    assert [list(phases) for phases in about] == [
        ["data", "compute", "wait", "communication"]
    ] * ranks.n
    lines = found[0]["lines"]
    head = lines.index(f"ranks    ms a step: median (95th percentile) of {STEPS} steps")
    assert lines[head + 1].split() == ["rank", "data", "compute", "wait", "communication"]
    for rank in range(ranks.n):
        cells = re.findall(r"[\d.]+", lines[head + 2 + rank])
        assert float(cells[0]) == rank
        assert float(cells[3]) == pytest.approx(about[rank]["compute"]["p50"], abs=0.01)


@SEEN
def test_the_phases_add_up_to_the_step(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(run_with, tmp_path, "compute", log_every=STEPS)
    step_ms = statistics.median(r["step_ms"] for r in records(tmp_path) if "step_ms" in r)
    (record,) = [r for r in records(tmp_path) if "wait_ms_p50" in r]
    for rank in range(ranks.n):
        parts = [record[f"{p}_ms_p50"][rank] for p in ("data", "compute", "wait", "communication")]
        assert sum(parts) == pytest.approx(step_ms, rel=0.25)
        assert min(parts) >= 0


@pytest.mark.parametrize("ranks", [("ddp-gloo", 2), ("horovod-mpi", 2)], indirect=True)
def test_where_arrival_is_not_seen(ranks: Ranks, tmp_path: Path) -> None:
    lines = ranks.run(run_with, tmp_path, "data")[0]["lines"]
    name = {"ddp": "ddp over gloo", "horovod": "horovod"}[ranks.arm.backend]
    said = (
        f"ranks    --stragglers: {name} does not show when ranks arrive: compute includes wait and"
    )
    assert any(line.startswith(said) for line in lines)
    assert not any(line.startswith("late ") for line in lines)
    (record,) = [r for r in records(tmp_path) if "data_ms_p50" in r]
    assert record["data_ms_p50"][1] > record["data_ms_p50"][0] + 15
    assert "wait_ms_p50" not in record
    assert "rank                data             compute".split() in [
        line.split() for line in lines
    ]


@pytest.mark.parametrize("ranks", [("single", 1), ("ddp-torchrun", 2)], indirect=True)
def test_it_changes_no_bits(ranks: Ranks, tmp_path: Path) -> None:
    measured = ranks.run(run_with, tmp_path / "on", "", max_steps=9)
    plain = ranks.run(train, Slow(16 * ranks.n, ""), tmp_path / "off", max_steps=9, epochs=99)
    assert measured[0]["digest"] == plain[0]["digest"]
    assert ("--stragglers: one rank" in " ".join(measured[0]["lines"])) == (ranks.n == 1)
    assert not any(line.startswith("ranks ") for line in plain[0]["lines"])


@pytest.mark.parametrize("ranks", [("ddp-torchrun", 2)], indirect=True)
def test_a_profile_names_the_collectives(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(run_with, tmp_path, "", max_steps=4, profile="2:2", log_every=1)
    trace = json.loads((tmp_path / "profile.json").read_text())
    names = {e["name"] for e in trace["traceEvents"] if e.get("cat") == "hvdtrain"}
    assert "all_reduce" in names
    assert "timed" not in names


def test_ranks_that_do_not_wait_are_refused() -> None:
    with pytest.raises(InputError, match="--stragglers with --ps-async: no rank waits"):
        TrainConfig(stragglers=True, ps_async=True).check()


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


# What the thread waits for


def test_a_thread_waits_from_the_last_bucket_on() -> None:
    arrivals = Arrivals()
    # Two buckets of a backward pass, the first of which ends during it; then a loss for the log.
    arrivals._operations.extend([(1.0, 2.0, False), (4.0, 6.0, False), (7.0, 8.0, True)])
    arrivals._waits.extend([(1.0, 1.5), (3.5, 5.0), (7.0, 7.5)])
    blocked, waits = arrivals.take()
    assert blocked == [(4.0, 6.0), (7.0, 8.0)]
    assert sum(overlap(blocked, *wait) for wait in waits) == 1.5
    assert arrivals.take() == ([], [])


def test_intervals_that_overlap_count_once() -> None:
    arrivals = Arrivals()
    arrivals._operations.extend([(1.0, 5.0, False), (2.0, 3.0, True), (4.0, 7.0, True)])
    assert arrivals.take()[0] == [(1.0, 7.0)]


def test_an_operation_is_timed_from_its_queue_to_its_end() -> None:
    arrivals, before = Arrivals(), time.monotonic()
    run = arrivals.timed(lambda: time.sleep(0.02), True)
    run()
    ((begin, end),), _ = arrivals.take()
    assert before <= begin <= end - 0.02
