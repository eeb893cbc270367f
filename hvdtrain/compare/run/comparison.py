"""A comparison from start to end: start, prove equal work, warm up, time blocks, check again.

`hvdtrain compare` runs it. An arm that fails is dropped with its reason, and the others continue.
Imports no torch: only the ranks do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from hvdtrain.compare import record
from hvdtrain.compare.analysis.table import make_table
from hvdtrain.compare.compare_options import CompareOptions
from hvdtrain.compare.proof import parity
from hvdtrain.compare.proof.work_trace import ArmTraces, trace_of
from hvdtrain.compare.record import Record
from hvdtrain.compare.run.arm_pool import ArmPool, Show
from hvdtrain.compare.run.arms import Arm
from hvdtrain.compare.run.block_schedule import BlockSchedule
from hvdtrain.compare.run.block_timer import BlockTimer
from hvdtrain.launch.real_launchers import without_launcher
from hvdtrain.system import machine, provenance
from hvdtrain.system.machine import load_average
from hvdtrain.system.signals import uninterrupted

_STOPS: dict[type[BaseException], tuple[str, str]] = {
    KeyboardInterrupt: ("interrupted", "Ctrl-C"),
    SystemExit: ("terminated", "SIGTERM"),  # whose handler raises it
}


class Comparison:
    """One comparison. `run` returns its record, and updates it in `folder` as it grows."""

    def __init__(
        self, options: CompareOptions, arms: Iterable[Arm], show: Show, folder: Path
    ) -> None:
        self.options, self.folder = options, folder
        self._schedule = BlockSchedule(options)
        self.record = Record(
            arms={},
            blocks=[],
            command=["hvdtrain", *sys.argv[1:]],
            started=provenance.now(),
            commit=provenance.commit(),
            config={name: value for name, value in asdict(options).items() if value != ()},
            machine=machine.facts(),
            versions=dict(provenance.versions()),
            environment=provenance.variables(without_launcher(os.environ)),
        )
        self._pool = ArmPool(arms, options, self.record, show, folder)
        self._base, self._again = map(self.record.arm_of, ("baseline", "again"))
        self._timer = BlockTimer(self._pool, options)

    def run(self) -> Record:
        """Compare. Ctrl-C ends it early: it is noted in the record, and re-raised."""
        try:
            with self._pool:
                self._run()
            self.record.outcome = "finished"
        except BaseException as error:
            self._stopped(error)
            raise
        finally:
            with uninterrupted():
                self.record.ended = provenance.now()
                self.record.machine.load_after = load_average()
                record.write(self.record, self.folder)
        return self.record

    def _stopped(self, error: BaseException) -> None:
        why = f"{type(error).__name__}: {error}"
        self.record.outcome, why = _STOPS.get(type(error), ("failed", why))
        self.record.note = f"{why}, after {len(self.record.blocks)} blocks"
        timed = {name for block in self.record.blocks for name in block.arms}
        for name, row in self.record.arms.items():
            if row.status in ("waiting", "running"):
                row.status = "measured" if name in timed else "waiting"

    def _run(self) -> None:
        self._pool.start(list(self._pool.arms))
        self._prove_equal_work()
        if not self.options.prove_only and self._pool.has_rivals:
            self._time_blocks()
            self._check_final_parameters()
        for name in self._pool.live:
            self.record.arms[name].status = "measured" if self.record.blocks else "proved"
        self._pool.show_activity("done")

    # Equal work

    def _prove_equal_work(self) -> None:
        """Record the work traces of every arm's first steps, and refuse arms that do other work."""
        steps = self.options.proof_steps
        traces: dict[str, ArmTraces] = {}
        for name in list(self._pool.live):
            self._pool.show_activity(f"comparing the first {steps} steps: {name}")
            if found := self._pool.call(name, "trace", steps):
                traces[name] = list(map(trace_of, found))
        base, again, refuses = self._base, self._again, not self.options.allow_different
        problem = parity.baseline_problem(base, traces.get(base, ()), traces.get(again))
        if problem and base in self._pool.live and refuses:
            self._pool.drop(base, "refused", problem)
        self.record.parity = parity.compare(traces, base, again)
        for row in self.record.parity:
            if row.verdict == "unequal" and row.arm in self._pool.live and refuses:
                why = "; ".join(filter(None, (row.text, row.cause)))
                self._pool.drop(row.arm, "refused", why)
        record.write(self.record, self.folder)

    def _check_final_parameters(self) -> None:
        """Check at the end of a start that the parameters of each arm are still equal on all its
        ranks, and that those which were bitwise equal to the baseline's still are.
        """
        if self.options.allow_different:
            return
        ends: dict[str, tuple[int, str]] = {}
        for name in list(self._pool.live):
            found = self._pool.call(name, "fingerprint") or []
            if len(set(found)) > 1:
                why = "its ranks had different parameters at the end: they were not synchronised"
                self._pool.drop(name, "refused", why)
            elif found:
                ends[name] = found[0]
        self.record.ends.append(ends)
        base = ends.get(self._base)
        if base is None or base != ends.get(self._again):
            return  # no arm has to reproduce what the baseline itself does not
        proved = {row.arm for row in self.record.parity if row.verdict == "bitwise"}
        for name in proved & ends.keys():
            if ends[name][0] == base[0] and ends[name] != base:
                why = f"its parameters differed from {self._base}'s after {base[0]} steps"
                self._pool.drop(name, "refused", why)

    # Timing

    def _time_blocks(self) -> None:
        """Time blocks until there are enough, in as many starts as the time allows."""
        warm_up_s = self._timer.warm_up()
        self._schedule.plan_restarts(self._pool.start_s + warm_up_s)
        while (stop_reason := self._why_to_stop()) is None:
            index = len(self.record.blocks)
            if self._schedule.restart_is_due(index):
                self._restart()
                continue  # not all may have come back
            dropped = index - len(self.record.kept_blocks)
            self._pool.show_activity(
                f"timing: block {index + 1}, {self._schedule.time_left()}"
                + f"; {dropped} dropped: other processes used the cores" * bool(dropped)
            )
            self._timer.time_block(index, self._schedule.generation)
            # After every block, so that a killed comparison leaves its measurements.
            record.write(self.record, self.folder)
        about = {"stopped_by": stop_reason, "starts": self._schedule.generation + 1}
        self.record.config.update(about)

    def _why_to_stop(self) -> str | None:
        if not self._pool.has_rivals:
            return "the failure of all other arms"
        live, rows = self._pool.live, make_table(self.record).rows
        reaches = [r.ratio.reach for r in rows if r.arm in live and r.role != "baseline"]
        num_blocks, num_kept = len(self.record.blocks), len(self.record.kept_blocks)
        return self._schedule.why_to_stop(num_blocks, num_kept, reaches)

    def _restart(self) -> None:
        """End the remaining arms and start them again: see `stats`."""
        self._check_final_parameters()
        names = list(self._pool.live)
        self._pool.show_activity(f"starting again: after {len(self.record.blocks)} blocks")
        self._pool.end_all(gently=True)
        self._pool.start(names)
        warm_up_s = self._timer.warm_up()
        self._schedule.restarted(len(self.record.blocks), self._pool.start_s + warm_up_s)
