"""Foreign load from a /proc/stat that is made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.compare.record import Block
from hvdtrain.compare.run.block_timer import is_quiet
from hvdtrain.system.cpu_load import Load, LoadMeter


class Machine:
    """A /proc/stat of four cores, a clock and our CPU time, all moved by hand; 0 and 1 are ours."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.now, self.own_s = path / "stat", 100.0, 7.0
        self.counters = {core: [450, 5, 150, 25_000, 35, 2, 3, 20, 0, 0] for core in range(4)}
        monkeypatch.setattr("hvdtrain.system.cpu_load.time.monotonic", lambda: self.now)
        monkeypatch.setattr("hvdtrain.system.cpu_load.time.process_time", lambda: self.own_s)
        monkeypatch.setattr("psutil.PROCFS_PATH", str(path))
        self.tick()
        self.meter = LoadMeter({0, 1})

    def tick(self, seconds: float = 0.0, core: int = 0, **ticks: int) -> None:
        """`ticks`: hundredths of a second."""
        names = "user nice system idle iowait irq softirq steal guest guest_nice".split()
        for name, count in ticks.items():
            self.counters[core][names.index(name)] += count
        self.now += seconds
        lines = [f"cpu{core} {' '.join(map(str, c))}\n" for core, c in self.counters.items()]
        self.path.write_text("".join(["cpu  the sums\n", *lines]))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_foreign_is_what_was_busy_and_not_ours(machine: Machine) -> None:
    # 1 s on two cores: 2 core seconds. Busy 1.5, of which ours 0.9; guests are in user already.
    machine.tick(user=60, nice=10, system=25, guest=30, idle=5)
    machine.tick(1.0, core=1, user=40, irq=5, softirq=10, idle=40, iowait=5, steal=5)
    machine.meter.add(0.8)
    machine.own_s += 0.1
    found = machine.meter.stop()
    assert found.foreign == pytest.approx(0.3)
    assert found.steal == pytest.approx(0.025)


def test_the_cores_of_other_jobs_do_not_count(machine: Machine) -> None:
    """Of a node that is shared: 64 cores, of which this job may use 8, for example."""
    machine.tick(core=2, user=100, steal=20)
    machine.tick(core=3, user=100)
    machine.tick(1.0, core=1, user=50)
    assert machine.meter.stop() == Load(0.25, 0.0)


@pytest.mark.parametrize(
    ("seconds", "user", "own_s", "load"),
    [
        (0.3, 30, [0.325], Load(0.0, 0.0)),  # ticks that were cut make no negative share
        (0.01, 0, [0.0], Load(0.0, 0.0)),  # an idle window is no missing one
        (1.0, 0, [0.8], Load(None, None)),  # counters that do not change give no load
        (1.0, 50, [None, 0.5], Load(None, None)),  # an arm has failed: its time is unknown
    ],
)
def test_edges_of_a_window(
    machine: Machine, seconds: float, user: int, own_s: list[float | None], load: Load
) -> None:
    machine.tick(seconds, user=user)
    for each in own_s:
        machine.meter.add(each)
    assert machine.meter.stop() == load


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\n",
        "cpu  9 9 9 9\ncpu0 9 9 9 9\ncpu1 9 9 9 9\n",
        "cpu  9 9 9 9 9 9 9 9\ncpu0 9 9 9 9 9 9 9 9\n",
        "cpu  a b c d e f g h\ncpu0 1\ncpu1 a\n",
    ],
    ids="no_file empty zeros old_kernel other_cores garbage".split(),
)
def test_a_machine_that_does_not_say(
    tmp_path: Path, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    monkeypatch.setattr("psutil.PROCFS_PATH", str(tmp_path))
    meter = LoadMeter({0, 1})
    meter.add(0.1)
    assert meter.stop() == Load(None, None)


@pytest.mark.parametrize(
    ("load", "limit", "quiet"),
    [
        (Load(0.3, 0.2), 0.5, True),
        (Load(), 0.0, True),
        (Load(0.95, 0.15), 1.0, True),  # all of it is allowed
        (Load(0.502), 0.5, False),
        (Load(0.3, 0.22), 0.5, False),
    ],
)
def test_the_rule_that_drops_a_block(load: Load, limit: float, quiet: bool) -> None:
    assert is_quiet(Block(0, {}, foreign=load.foreign, steal=load.steal), limit) == quiet
