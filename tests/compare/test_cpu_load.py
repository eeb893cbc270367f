"""Foreign load from /proc/stat: made by hand, and of this machine while a known process runs."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.compare.analysis.foreign_load import why_dropped
from hvdtrain.compare.record import Block
from hvdtrain.compare.run import cpu_load
from hvdtrain.compare.run.cpu_load import Load, LoadMeter

TICKS = 100  # in a second, where the made-up counters come from


class Machine:
    """A /proc/stat of two cores and a clock, both moved by hand."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.now = path, 100.0
        self.counters = [900, 10, 300, 50_000, 70, 5, 6, 40, 0, 0]
        monkeypatch.setattr("hvdtrain.compare.run.cpu_load.time.monotonic", lambda: self.now)
        monkeypatch.setattr("hvdtrain.compare.run.cpu_load.os.sysconf", lambda name: TICKS)
        self.tick()

    def tick(self, seconds: float = 0.0, **ticks: int) -> None:
        names = "user nice system idle iowait irq softirq steal guest guest_nice".split()
        for name, count in ticks.items():
            self.counters[names.index(name)] += count
        self.now += seconds
        text = " ".join(map(str, self.counters))
        self.path.write_text(f"cpu  {text}\ncpu0 {text}\ncpu1 {text}\nintr 1 2 3\nbtime 5\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "stat", monkeypatch)


def test_foreign_is_what_was_busy_and_not_ours(machine: Machine) -> None:
    meter = LoadMeter(machine.path)
    meter.start()
    # 1 s on two cores: 2 core seconds. Busy 1.5, of which ours 0.9; guests are in user already.
    machine.tick(1.0, user=100, nice=10, system=25, irq=5, softirq=10, guest=30, idle=40, iowait=5)
    machine.tick(steal=5)
    found = meter.stop(0.9)
    assert found.foreign == pytest.approx(0.3)
    assert found.steal == pytest.approx(0.025)


def test_windows_do_not_add_up(machine: Machine) -> None:
    meter = LoadMeter(machine.path)
    meter.start()
    machine.tick(1.0, user=200)
    meter.start()
    machine.tick(0.5, user=50)
    assert meter.stop(0.5).foreign == pytest.approx(0.0)


def test_ticks_that_were_cut_never_make_a_negative_share(machine: Machine) -> None:
    meter = LoadMeter(machine.path)
    meter.start()
    machine.tick(0.3, user=30)
    assert meter.stop(0.325).foreign == 0.0


def test_an_idle_window_is_no_missing_one(machine: Machine) -> None:
    meter = LoadMeter(machine.path)
    meter.start()
    machine.tick(0.01)
    assert meter.stop(0.0) == Load(0.0, 0.0)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0 0 0 0 0 0 0 0 0 0\n",
        "cpu  9 9 9 9\ncpu0 9 9 9 9\n",
        "intr 1 2 3\n",
        "cpu  a b c d e f g h\ncpu0 1\n",
    ],
    ids=["missing", "empty", "zeros", "old kernel", "no cpu", "garbage"],
)
def test_a_machine_that_does_not_say(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "stat"
    if text is not None:
        path.write_text(text)
    meter = LoadMeter(path)
    meter.start()
    assert meter.stop(0.1) == Load(None, None)
    assert cpu_load.too_busy(Load(None, None), 0.0) is None


def test_counters_that_stand_still_say_nothing(machine: Machine) -> None:
    meter = LoadMeter(machine.path)
    meter.start()
    machine.tick(1.0)
    assert meter.stop(0.8) == Load(None, None)


def test_without_a_start_there_is_no_window(machine: Machine) -> None:
    assert LoadMeter(machine.path).stop(0.0) == Load(None, None)


def test_the_rule_that_drops_a_block() -> None:
    assert cpu_load.too_busy(Load(0.3, 0.2), 0.5) is None
    assert cpu_load.too_busy(Load(None, None), 0.5) is None
    assert cpu_load.too_busy(Load(0.95, 0.15), 1.0) is None  # all of it is allowed
    why = cpu_load.too_busy(Load(0.61, None), 0.5)
    assert why == "others took 61 % of the cores (limit 50 %)"
    why = cpu_load.too_busy(Load(0.502, None), 0.5)
    assert why == "others took 50.2 % of the cores (limit 50.0 %)"
    why = cpu_load.too_busy(Load(0.3, 0.22), 0.5)
    assert why == "others took 52 % of the cores, 22 % of it the host (limit 50 %)"


def test_what_is_said_of_all_dropped_blocks() -> None:
    blocks = [Block(0, {}, foreign=0.502), Block(1, {}, foreign=0.6, steal=0.22)]
    why = why_dropped(blocks, 0.5)
    assert why.startswith(
        "since others took 50.2 to 82 % of the cores, and --max-foreign allows 50%; "
    )
    assert why_dropped([Block(0, {})], None).startswith("for the load of others; end what")


_BURN = """import time
print(flush=True)
input()
end = time.monotonic() + 1.0
while time.monotonic() < end:
    pass
"""


_PIPES: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.skipif(LoadMeter()._read_counters() is None, reason="this machine does not say")
def test_here_a_process_is_foreign_unless_it_is_counted_as_ours() -> None:
    cores = LoadMeter()._read_counters().cores  # type: ignore[union-attr]
    before = _children_s()
    with subprocess.Popen([sys.executable, "-c", _BURN], **_PIPES) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        ours, theirs = LoadMeter(), LoadMeter()
        ours.start()
        theirs.start()
        begin = time.monotonic()
        other.stdin.write(b"\n")
        other.stdin.flush()
        other.wait()
        took = time.monotonic() - begin
        used = _children_s() - before
        foreign = theirs.stop(0.0).foreign
        rest = ours.stop(min(used, took)).foreign
    assert foreign is not None
    assert rest is not None
    # Whatever else runs here adds to both; what the process used is the difference.
    assert 0 < foreign - rest < 1.1 / cores


def test_load_average() -> None:
    found = cpu_load.load_average()
    assert found is None or (len(found) == 3 and min(found) >= 0)
