"""A comparison from start to end: start, prove equal work, warm up, time blocks, check again.

`hvdtrain compare` runs it. An arm that fails is dropped with its reason, and the others continue.
Imports no torch: only the ranks do.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path

from hvdtrain.compare import record
from hvdtrain.compare.analysis import stats
from hvdtrain.compare.analysis.foreign_load import no_verdict_note
from hvdtrain.compare.compare_options import MIN_BLOCKS, CompareOptions, steps_in_sync
from hvdtrain.compare.proof import parity
from hvdtrain.compare.proof.work_trace import ArmTraces, with_names_of
from hvdtrain.compare.record import Config, Record
from hvdtrain.compare.run.arm_pool import ArmPool, ProgressDisplay, without_launcher
from hvdtrain.compare.run.arms import Arm
from hvdtrain.compare.run.block_schedule import (
    MAX_BUDGETS,
    SETTLED_BLOCKS,
    BlockSchedule,
)
from hvdtrain.compare.run.block_timer import BlockTimer
from hvdtrain.system import machine, provenance
from hvdtrain.system.machine import load_average
from hvdtrain.system.signals import uninterrupted


class Comparison:
    """One comparison. `run` returns its record, and updates it in `folder` as it grows."""

    def __init__(
        self, options: CompareOptions, arms: list[Arm], display: ProgressDisplay, folder: Path
    ) -> None:
        self.options, self.folder, self._display = options, folder, display
        self._schedule = BlockSchedule(options)
        self.record = Record(
            arms={},
            blocks=[],
            command=["hvdtrain", *sys.argv[1:]],
            started=provenance.now(),
            commit=provenance.commit(),
            config=_config(options),
            machine=machine.facts(),
            versions=dict(provenance.versions()),
            environment=provenance.variables(without_launcher(os.environ)),
            baseline=next(arm.name for arm in arms if arm.role == "baseline"),
        )
        base = next(arm for arm in arms if arm.role == "baseline")
        self.record.config.proof_steps = steps_in_sync(options.proof_steps, base.config(options))
        self._pool = ArmPool(arms, options, self.record, display, folder)
        self._timer = BlockTimer(self._pool, options)

    def run(self) -> Record:
        """Compare. Ctrl-C ends it early: it is noted in the record, and re-raised."""
        try:
            with self._pool:
                self._run()
            self.record.outcome = "finished"
        except KeyboardInterrupt:
            self._stopped("interrupted", "Ctrl-C")
            raise
        except SystemExit:  # a handler raises it on SIGTERM
            self._stopped("terminated", "SIGTERM")
            raise
        except BaseException as error:
            self._stopped("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            with uninterrupted():
                self.record.ended = provenance.now()
                self.record.machine.load_after = load_average()
                record.write(self.record, self.folder)
        return self.record

    def _stopped(self, outcome: str, why: str) -> None:
        self.record.outcome = outcome
        self.record.note = f"{why}, after {len(self.record.blocks)} blocks"
        for key, row in self.record.arms.items():
            if row.status in ("waiting", "running"):
                row.status = "measured" if self._timer.block_ms.get(key) else "waiting"

    def _run(self) -> None:
        self._pool.start(list(self._pool.arms))
        self._drop_without_baseline()
        self._prove_equal_work()
        self._time_blocks()
        self._check_final_parameters()
        self._drop_without_baseline()
        for key in self._pool.live:
            self.record.arms[key].status = "measured"
        self._pool.show_activity("done")

    # Equal work

    def _drop_without_baseline(self) -> None:
        """Drop the arms whose baseline has failed: there is nothing to compare them with."""
        for size in self._pool.sizes:
            base = self.record.key_of("baseline", size)
            if base not in self._pool.live:
                status = self.record.arms[base].status
                why = f"cannot be compared: its baseline {base} {status}"
                for key in [k for k in self._pool.live if self._pool.arms[k].ranks == size]:
                    self._pool.drop(key, "failed", why)

    def _prove_equal_work(self) -> None:
        """Record the work traces of every arm's first steps, and refuse arms that do other work."""
        steps = self.record.config.proof_steps or 1
        traces: dict[str, ArmTraces] = {}
        for key in list(self._pool.live):
            self._pool.show_activity(f"proving equal work: {key}, {steps} steps")
            traces[key] = self._pool.traces(key, steps)
            self.record.accounts[key] = [trace.to_dict() for trace in traces[key]]
        for size in self._pool.sizes:
            of_size = {k: found for k, found in traces.items() if self._pool.arms[k].ranks == size}
            base, again = self.record.key_of("baseline", size), self.record.key_of("again", size)
            problem = parity.baseline_problem(base, of_size.get(base, ()), of_size.get(again, ()))
            refuses = not self.options.allow_different
            if problem and base in self._pool.live and refuses:
                self._pool.drop(base, "refused", problem)
            ceiling = self.record.key_of("ceiling", size)
            if self.options.commands:
                of_size = with_names_of(of_size, base)
            rows = parity.compare(of_size, base, again, ceiling)
            self.record.parity += rows
            for row in rows:
                if row.verdict == "unequal" and row.arm in self._pool.live and refuses:
                    self._pool.drop(row.arm, "refused", f"{row.text}; {row.cause}")
        self._drop_without_baseline()
        record.write(self.record, self.folder)

    def _check_final_parameters(self) -> None:
        """Check at the end of a start that the parameters of each arm are still equal on all its
        ranks, and that those which were bitwise equal to the baseline's still are.
        """
        ends: dict[str, tuple[int, str]] = {}
        for key in list(self._pool.live):
            found = self._pool.fingerprints(key)
            if not found or self._pool.arms[key].role == "ceiling":
                continue
            if len(set(found)) > 1:
                why = "by the end its ranks had different parameters: they were not synchronised"
                self._pool.drop(key, "refused", why)
            else:
                ends[key] = found[0]
        self.record.ends.append(ends)
        proved = {row.arm for row in self.record.parity if row.verdict == "bitwise"}
        for key in [key for key in ends if key in proved]:
            ranks = self._pool.arms[key].ranks
            base, again = (self.record.key_of(role, ranks) for role in ("baseline", "again"))
            # No arm has to reproduce what the baseline itself does not.
            repeats = base in ends and ends[base] == ends.get(again)
            if repeats and ends[key][0] == ends[base][0] and ends[key] != ends[base]:
                why = f"after {ends[key][0]} steps its parameters differed from {base}'s"
                self._pool.drop(key, "refused", why)

    # Timing

    def _time_blocks(self) -> None:
        """Time blocks until there are enough, in as many starts as the time allows."""
        warm_up_s = self._timer.warm_up()
        self._schedule.plan_restarts(self._pool.start_s + warm_up_s)
        if self._timer.block_s:
            expected = self._schedule.expected_blocks(self._timer.block_s)
            self._display.print_line(f"timing   {stats.what_shows(expected)}")
        index = 0
        while (stop_reason := self._why_to_stop(index)) is None:
            if self._schedule.restart_is_due(index):
                self._restart(index)
                if len(self._pool.live) < 2:
                    continue  # `_why_to_stop` ends the loop
            self._pool.show_activity(f"block {index + 1}, {self._timer.steps} steps of each")
            self._timer.time_block(index, self._schedule.generation)
            # After every block, so that a killed comparison leaves its measurements.
            record.write(self.record, self.folder)
            self._drop_without_baseline()
            index += 1
        config, blocks = self.record.config, self.record.blocks
        config.stopped_by, config.starts = stop_reason, self._schedule.generation + 1
        self.record.note = no_verdict_note(blocks, self.options.max_foreign)

    def _why_to_stop(self, num_blocks: int) -> str | None:
        num_kept, widths = len(self.record.kept_blocks), self._timer.interval_widths()
        return self._schedule.why_to_stop(num_blocks, num_kept, len(self._pool.live), widths)

    def _restart(self, index: int) -> None:
        """End the remaining arms and start them again.

        One start of a program can be some percent faster than the next for its whole life, because
        its memory layout is random. All blocks of one start share that bias.
        """
        self._check_final_parameters()
        self._drop_without_baseline()
        keys = list(self._pool.live)
        self._pool.show_activity(f"starting anew, after {len(self.record.blocks)} blocks")
        self._pool.end_all(gently=True)
        self._pool.start(keys)
        self._drop_without_baseline()
        warm_up_s = self._timer.warm_up()
        self._schedule.restarted(index, self._pool.start_s + warm_up_s)


def _config(options: CompareOptions) -> Config:
    given = asdict(options)
    names = {item.name for item in fields(Config)}
    if options.commands:  # the scripts have options of their own
        names -= {item.name for item in fields(options) if not item.metadata}
        names -= {"batch_size", "ranks"}
    given.update(
        ranks=list(options.ranks),
        hosts=options.hosts or None,
        arms=list(options.arms),
        set=dict(item.partition("=")[::2] for item in options.set),
        scaling=options.scaling if len(options.ranks) > 1 else None,
        pinned=given.pop("pin"),
        min_blocks=options.blocks or SETTLED_BLOCKS,
        least_blocks=MIN_BLOCKS,
        longest_s=MAX_BUDGETS * options.budget_s,
        clip_norm=None if math.isinf(options.clip_norm) else options.clip_norm,
    )
    return Config(**{name: value for name, value in given.items() if name in names})
