"""`--stragglers`: a callback that says for which rank the others wait, and in which phase.

Each rank divides its steps into four phases:

    data            waits for its next batch
    compute         everything else that it does itself
    wait            has arrived at a collective, and waits for the last rank
    communication   waits while the bytes are moved, after all ranks have arrived

A rank is late by the time for which the others wait for it: step times are the same on all ranks.
The transports record arrivals (see `hvdtrain.transports.arrivals`); where they do not, compute
includes wait and communication, a line says so, and no rank is called late.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hvdtrain.training.callback import Callback
from hvdtrain.transports.arrivals import RECORDING_TRANSPORTS, Arrivals, overlap

if TYPE_CHECKING:
    from hvdtrain.training.meter import Meter
    from hvdtrain.training.trainer import Trainer

WINDOW = 50  # steps between two exchanges of the ranks' times
LATE = 0.2  # the share of the others' own time from which on a rank is late
_LATE_STEPS = 5  # late steps in a window below which a rank is not reported: chance disturbances
PHASES = ("data", "compute", "wait", "communication")
_DATA, _COMPUTE, _WAIT, _COMMUNICATION = range(4)
_WORDS = ("waiting for data", "computing", "waiting", "communicating")

Step = tuple[float, ...]
"""The milliseconds of one step in each of PHASES."""


class Stragglers(Callback):
    """Measures the phases of each step, and reports them for all ranks."""

    def __init__(self) -> None:
        self._arrivals: Arrivals | None = None
        self._first_batch = 0.0
        self._begin = 0.0
        self._meter: Meter | None = None
        self._data_before = 0.0
        self._window: list[Step] = []
        self._all = [array("f") for _ in PHASES]
        self._reported: tuple[int, int] | None = None  # the rank last called late, and its phase

    def on_start(self, trainer: Trainer) -> None:
        """Begin to record arrivals, or say that they are not seen."""
        backend = trainer.backend
        if backend.world.size == 1:
            trainer.console.print_line("ranks    --stragglers: one rank, so that none can be late")
        elif backend.transport in RECORDING_TRANSPORTS:
            self._arrivals = Arrivals.current = Arrivals()
        else:
            over = f" over {backend.transport}" if backend.transport else ""
            trainer.console.print_line(
                f"ranks    --stragglers: {backend.name}{over} does not show when ranks arrive: "
                "compute includes wait and communication, and no rank is called late"
            )
        before = trainer.on_batch

        def on_batch(batch: Any) -> None:
            self._first_batch = self._first_batch or time.monotonic()
            if before is not None:
                before(batch)

        trainer.on_batch = on_batch
        self._start_step(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        """Measure the step; after every 50th compare the ranks. Collective then."""
        step = self._measure(trainer)
        self._window.append(step)
        for phase, value in zip(self._all, step, strict=True):
            phase.append(value)
        if len(self._window) == WINDOW:
            self._compare(trainer)
        self._start_step(trainer)

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        """Leave the evaluation out of the next step."""
        self._start_step(trainer)

    def on_epoch_end(self, trainer: Trainer) -> None:
        """Leave what an epoch's end takes out of the next step."""
        self._start_step(trainer)

    def on_checkpoint(self, trainer: Trainer, path: Path | None) -> None:
        """Leave the checkpoint out of the next step."""
        self._start_step(trainer)

    def on_end(self, trainer: Trainer) -> None:
        """Print the table of all steps, and add it to run.json. Collective."""
        Arrivals.current = None
        if not self._all[0]:
            return
        mine = [_percentiles(phase) for phase in self._all]
        everyone = trainer.backend.all_gather_object(mine)
        shown = PHASES if self._arrivals is not None else PHASES[:2]
        print_line = trainer.console.print_line
        print_line(f"ranks    ms a step: median (95th percentile) of {len(self._all[0])} steps")
        print_line("".join(["         rank", *(f"{name:>20}" for name in shown)]))
        for rank, phases in enumerate(everyone):
            cells = [f"{p50:.2f} ({p95:.2f})" for p50, p95 in phases[: len(shown)]]
            print_line("".join([f"         {rank:<4}", *(f"{cell:>20}" for cell in cells)]))
        trainer.record(
            ranks_ms=[
                {
                    name: {"p50": p50, "p95": p95}
                    for name, (p50, p95) in zip(shown, phases, strict=False)
                }
                for phases in everyone
            ]
        )

    # One step

    def _start_step(self, trainer: Trainer) -> None:
        """Begin to measure a step: forget what was recorded so far."""
        if self._arrivals is not None:
            self._arrivals.take()
        self._meter = trainer.meter
        self._data_before = self._meter.data_s if self._meter is not None else 0.0
        self._first_batch = 0.0
        self._begin = time.monotonic()

    def _measure(self, trainer: Trainer) -> Step:
        """Return the phases of the step that ends now."""
        end, meter = time.monotonic(), trainer.meter
        assert meter is not None
        data = meter.data_s - (self._data_before if meter is self._meter else 0.0)
        blocked, waits = self._arrivals.take() if self._arrivals is not None else ([], [])
        # A stream's ranks exchange the sizes of their batches while they load. In the first step
        # they meet before that, too: loading takes no negative time.
        data = max(0.0, data - overlap(blocked, self._begin, self._first_batch))
        wait = sum(overlap(blocked, *interval) for interval in waits)
        all_blocked = overlap(blocked, self._begin, end)
        compute = max(0.0, end - self._begin - data - all_blocked)
        return tuple(1000 * value for value in (data, compute, wait, all_blocked - wait))

    # All ranks

    def _compare(self, trainer: Trainer) -> None:
        """Exchange the last steps, log their percentiles, and name a rank that is late."""
        everyone = trainer.backend.all_gather_object(self._window)
        self._window = []
        shown = PHASES if self._arrivals is not None else PHASES[:2]
        record: dict[str, Any] = {"step": trainer.progress.step}
        for number, name in enumerate(shown):
            by_rank = [_percentiles([step[number] for step in steps]) for steps in everyone]
            record[f"{name}_ms_p50"] = [p50 for p50, _ in by_rank]
            record[f"{name}_ms_p95"] = [p95 for _, p95 in by_rank]
        found = None
        if self._arrivals is not None:
            late = [_lateness(everyone, rank) for rank in range(len(everyone))]
            record["late_ms"] = [ms for ms, _, _ in late]
            worst = max(range(len(late)), key=lambda rank: late[rank][0])
            if late[worst][2]:
                found = worst, _phase(everyone, worst)
        trainer.log(record)
        if found is not None and found != self._reported:
            ms, base, _ = late[found[0]]
            trainer.console.print_line(_line(trainer, everyone, found, ms, base))
        self._reported = found


def _lateness(everyone: list[list[Step]], rank: int) -> tuple[float, float, bool]:
    """Return the mean time by which a rank arrives after the others, the others' own time of a
    step, and whether the rank is late, in the mean and in several steps.
    """
    late, base = [], []
    for number, own in enumerate(everyone[rank]):
        others = [steps[number] for r, steps in enumerate(everyone) if r != rank]
        late.append(statistics.median(step[_WAIT] for step in others) - own[_WAIT])
        base.append(statistics.median(sum(step) - step[_WAIT] for step in others))
    steps = sum(ms > LATE * own for ms, own in zip(late, base, strict=True))
    is_late = sum(late) > LATE * sum(base) and steps >= _LATE_STEPS
    return statistics.fmean(late), statistics.fmean(base), is_late


def _phase(everyone: list[list[Step]], rank: int) -> int:
    """Return the phase in which a rank takes the most time more than the others."""
    return max((_DATA, _COMPUTE, _COMMUNICATION), key=lambda phase: _excess(everyone, rank, phase))


def _excess(everyone: list[list[Step]], rank: int, phase: int) -> float:
    own, others = _means(everyone, rank, phase)
    return own - others


def _means(everyone: list[list[Step]], rank: int, phase: int) -> tuple[float, float]:
    """Return the mean time of a phase on a rank, and the median of the other ranks' means."""
    by_rank = [statistics.fmean(step[phase] for step in steps) for steps in everyone]
    return by_rank.pop(rank), statistics.median(by_rank)


def _line(
    trainer: Trainer, everyone: list[list[Step]], found: tuple[int, int], ms: float, base: float
) -> str:
    rank, phase = found
    own, others = _means(everyone, rank, phase)
    hosts, step = trainer.backend.hosts, trainer.progress.step
    name = f"rank {rank} on {hosts[rank]}" if hosts else f"rank {rank}"
    return (
        f"late     {name}: {ms:.1f} ms a step after the others, {100 * ms / base:.0f} % of their "
        f"own time, in steps {step - WINDOW + 1} to {step}; longer {_WORDS[phase]}: "
        f"{own:.1f} ms, the others {others:.1f} ms"
    )


def _percentiles(values: Any) -> tuple[float, float]:
    """Return the median and the 95th percentile."""
    p50, p95 = torch.tensor(values).quantile(torch.tensor([0.5, 0.95])).tolist()
    return round(p50, 3), round(p95, 3)
