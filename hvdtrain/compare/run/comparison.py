"""A comparison, phase by phase: start, check parity, tune, warm up, time blocks, time all-reduces.

`hvdtrain compare` runs it. The order of the arms in a block is random, and the stop rule is fixed
beforehand. An arm that fails is dropped with its reason, and the others continue. Imports no torch:
only the ranks do.
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain import provenance
from hvdtrain.compare import record
from hvdtrain.compare.analysis import stats
from hvdtrain.compare.compare_options import MIN_BLOCKS, CompareOptions
from hvdtrain.compare.proof import parity
from hvdtrain.compare.run import machine, tuning
from hvdtrain.compare.run.arm_manager import (
    SKIPPED_STEPS,
    TRIAL_STEPS,
    Screen,
    Stage,
    without_launcher,
)
from hvdtrain.compare.run.arms import Arm
from hvdtrain.compare.run.cpu_load import Load, Watch, load_average, too_busy, why_dropped
from hvdtrain.compare.run.messages import Window
from hvdtrain.signals import uninterrupted

# The most starts of all processes, and the fewest blocks of each.
MOST_STARTS, START_BLOCKS = 4, 8
SETTLED_BLOCKS = 10  # before narrow intervals may end a comparison
BLOCK_S = 0.25  # time of the slowest arm in a block
STEPS_A_BLOCK = (5, 200)  # least, most
# Least and most steps of a warm-up round; rounds at most; relative difference that counts as none.
WARM_STEPS, WARM_ROUNDS, WARM_ALIKE = (3, 10), 6, 0.05
PASS_EVERY, PASS_STEPS = 8, 5  # kept blocks per phase pass, and its steps
ALL_REDUCE_BYTES = [1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22]
ALL_REDUCE_REPEATS = 9


class Runner:
    """One comparison. `run` returns its record, and updates it in `folder` as it grows."""

    def __init__(
        self, options: CompareOptions, arms: list[Arm], screen: Screen, folder: Path
    ) -> None:
        self.options, self.folder = options, folder
        self._accounts: dict[str, Any] = {}
        self._order = random.Random(options.seed)
        self._deadline = time.monotonic() + options.budget_s
        self._steps = options.steps or 0
        self._generation = self._restarts = 0
        self._start_s = 0.0
        """Longest time from a start of the processes to their first block."""
        self._since = (0, 0.0)
        """The block index and the time at which the current start began."""
        self._block_ms: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self.record = record.new(
            command=["hvdtrain", *sys.argv[1:]],
            started=provenance.now(),
            ended=None,
            commit=provenance.commit(),
            config=_config(options),
            machine=machine.facts(),
            versions=provenance.versions(),
            environment=provenance.variables(without_launcher(os.environ)),
            baseline=next(arm.name for arm in arms if arm.role == "baseline"),
        )
        self.stage = Stage(options, self.record, screen, folder)
        for arm in arms:
            self.stage.add(arm)

    def run(self) -> record.Record:
        """Compare. Ctrl-C ends it early: it is noted in the record, and re-raised."""
        try:
            with self.stage:
                self._phases()
            self.record["outcome"] = "finished"
        except KeyboardInterrupt:
            self._stopped("interrupted", "Ctrl-C")
            raise
        except SystemExit:  # a handler raises it on SIGTERM
            self._stopped("interrupted", "SIGTERM")
            raise
        except BaseException as error:
            self._stopped("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            with uninterrupted():
                self.record["ended"] = provenance.now()
                self.record["machine"]["load_after"] = load_average()
                record.write(self.record, self.folder)
        return self.record

    def _stopped(self, outcome: str, why: str) -> None:
        blocks = len(self.record["blocks"])
        self.record.update(outcome=outcome, note=f"{why}, after {blocks} blocks")
        for row in self.record["arms"].values():
            if row["status"] in ("waiting", "running"):
                row["status"] = "measured" if self._block_ms.get(row["key"]) else "waiting"

    def _phases(self) -> None:
        self.stage.start(list(self.stage.arms.values()))
        self._need_baselines()
        self._prove(list(self.stage.live))
        if self.options.tune:
            began = time.monotonic()
            found = tuning.tune(self)
            for arm in found:
                self.stage.add(arm)
            self._need_baselines()
            if found:
                self.stage.start(found)
                self._prove([arm.key for arm in found])
            self._catch_up()
            self._deadline += time.monotonic() - began  # tuning is not part of the budget
        self._measure()
        self._still_equal()
        self._need_baselines()
        for key in list(self.stage.live):
            self.stage.row(key)["status"] = "measured"  # even if it fails below
        if any(block["kept"] for block in self.record["blocks"]):
            self._look_closer()
        self.stage.say("done")

    def _catch_up(self) -> None:
        """Let untuned arms take as many steps as the others took in tuning: final parameters are
        compared, which needs equal numbers of steps.
        """
        for key in [key for key in self.stage.live if key not in self.record["tuning"]]:
            for _ in range(tuning.BLOCKS):
                self.stage.call(key, "window", TRIAL_STEPS + SKIPPED_STEPS, 0)

    # Equal work

    def _need_baselines(self) -> None:
        """Drop the arms whose baseline has failed: there is nothing to compare them with."""
        for size in self.options.ranks:
            base = self.stage.key_of("baseline", size)
            if base not in self.stage.live:
                status = self.stage.row(base)["status"]
                why = f"nothing to hold it against: its baseline {base} {status}"
                for key in [k for k in self.stage.live if self.stage.arms[k].ranks == size]:
                    self.stage.lose(key, "failed", why)

    def _prove(self, keys: list[str]) -> None:
        """Record the work traces of every arm's first steps, and refuse arms that do other work."""
        steps = self.options.proof_steps
        for key in keys:
            self.stage.say(f"proving equal work: {key}, {steps} steps")
            ranks = self._accounts[key] = self.stage.call(key, "prove", steps) or ()
            self.record["accounts"][key] = [account.to_dict() for account in ranks]
        for size in self.options.ranks:
            of_size = {k: a for k, a in self._accounts.items() if self.stage.arms[k].ranks == size}
            base, again = self.stage.key_of("baseline", size), self.stage.key_of("again", size)
            problem = parity.baseline_problem(base, of_size.get(base, ()), of_size.get(again, ()))
            if problem and base in self.stage.live:
                self.stage.lose(base, "refused", problem)
            rows = parity.compare(of_size, base, again, self.stage.key_of("ceiling", size))
            rows = [row for row in rows if row["arm"] in keys]
            self.record["parity"] += rows
            for row in rows:
                if row["verdict"] == "unequal" and row["arm"] in self.stage.live:
                    self.stage.lose(row["arm"], "refused", f"{row['text']}; {row['cause']}")
        self._need_baselines()
        record.write(self.record, self.folder)

    def _still_equal(self) -> None:
        """Check at the end of a start that the parameters of each arm are still equal on all its
        ranks, and that those which were bitwise equal to the baseline's still are.
        """
        ends: dict[str, tuple[int, str]] = {}
        for key in list(self.stage.live):
            found = self.stage.call(key, "fingerprint")
            if not found or self.stage.arms[key].role == "ceiling":
                continue
            if len(set(found)) > 1:
                why = "by the end its ranks had different parameters: they were not synchronised"
                self.stage.lose(key, "refused", why)
            else:
                ends[key] = found[0]
        self.record["ends"].append({key: list(end) for key, end in ends.items()})
        proved = {row["arm"] for row in self.record["parity"] if row["verdict"] == "bitwise"}
        for key in [key for key in ends if key in proved]:
            ranks = self.stage.arms[key].ranks
            base, again = (self.stage.key_of(role, ranks) for role in ("baseline", "again"))
            # No arm has to reproduce what the baseline itself does not.
            repeats = base in ends and ends[base] == ends.get(again)
            if repeats and ends[key][0] == ends[base][0] and ends[key] != ends[base]:
                why = f"after {ends[key][0]} steps its parameters were no longer those of {base}"
                self.stage.lose(key, "refused", why)

    # Timing

    def shuffled(self, names: list[str]) -> list[str]:
        """Return the names in random order."""
        return self._order.sample(names, len(names))

    def _plan_starts(self) -> None:
        """Plan the number of restarts: they may take at most half of the remaining time."""
        if self.options.blocks is not None:
            possible = self.options.blocks // START_BLOCKS - 1
        else:
            left = self._deadline - time.monotonic()
            possible = int(left / 2 / self._start_s)  # the warm-up has set `_start_s`
        self._restarts = max(0, min(MOST_STARTS - 1, possible))
        self._since = (0, time.monotonic())

    def _is_due(self, index: int) -> bool:
        """Return whether this start has used its share of the remaining blocks or time."""
        block, began = self._since
        if self.options.blocks is not None:
            return index - block >= (self.options.blocks - block) / (self._restarts + 1)
        left = self._deadline - began - self._restarts * self._start_s
        enough = index - block >= START_BLOCKS
        return enough and time.monotonic() - began >= left / (self._restarts + 1)

    def _restart(self, index: int) -> None:
        """End the remaining arms and start them again.

        One start of a program can be some percent faster than the next for its whole life, because
        its memory layout is random. All blocks of one start share that bias.
        """
        self._still_equal()
        self._need_baselines()
        arms = [self.stage.arms[key] for key in self.stage.live]
        self.stage.say(f"starting anew, after {len(self.record['blocks'])} blocks")
        self.stage.end_all(gently=True)
        self.stage.start(arms)
        self._need_baselines()
        self._warm_up()
        self._generation += 1
        self._restarts -= 1
        self._since = (index, time.monotonic())

    def _warm_up(self) -> None:
        """Run all arms in turn until each takes the same time twice in a row; plan the blocks.

        All arms take the same number of steps, so that their final parameters are comparable.
        """
        began = time.monotonic()
        medians: dict[str, float] = {}
        settled: set[str] = set()
        steps, taken = WARM_STEPS[0], 0
        for _ in range(WARM_ROUNDS):
            self.stage.say(f"warming up, {taken + steps} steps")
            for key in list(self.stage.live):
                windows = self.stage.call(key, "window", steps, 0)
                if windows is None:
                    continue
                median = stats.block_ms([w.step_ms for w in windows])
                if abs(median / medians.get(key, math.inf) - 1) < WARM_ALIKE:
                    settled.add(key)
                medians[key] = median
            taken += steps
            if settled.issuperset(self.stage.live):
                break
            steps = _steps_in(BLOCK_S, medians, WARM_STEPS)
        for key in list(self.stage.live):
            # Read now: later all-reduces and copies of other sizes would raise the peak.
            peak = _rounded(self.stage.call(key, "peak_mib") or [])
            self.stage.row(key).update(warm_up_steps=taken, even=key in settled, peak_mib=peak)
        if not self._steps and medians:
            self._steps = _steps_in(BLOCK_S, medians, STEPS_A_BLOCK)
        self.record["config"]["steps_per_block"] = self._steps
        self._start_s = max(self._start_s, self.stage.start_s + time.monotonic() - began)

    def _measure(self) -> None:
        """Time blocks until there are enough, in as many starts as the time allows."""
        self._warm_up()
        self._plan_starts()
        index = 0
        while (why := self._enough(index)) is None:
            if self._restarts and self._is_due(index):
                self._restart(index)
                if len(self.stage.live) < 2:
                    continue  # `_enough` ends the loop
            doing = f"block {index + 1}, {self._steps} steps of each arm"
            self.stage.say(doing)
            self._block(index)
            if self._pass_is_due():
                self._pass(index)
            # After every block, so that a killed comparison leaves its measurements.
            record.write(self.record, self.folder)
            self._need_baselines()
            index += 1
        self.record["config"].update(stopped_by=why, starts=self._generation + 1)
        blocks = self.record["blocks"]
        if blocks and not any(block["kept"] for block in blocks):
            why = why_dropped(blocks, self.options.max_foreign)
            self.record["note"] = f"no block counts: {len(blocks)} were dropped, {why}"

    def _enough(self, blocks: int) -> str | None:
        """Return why there are enough blocks, by the predefined stop rule, or None."""
        if len(self.stage.live) < 2:
            return "the loss of the other arms"
        if self.options.blocks is not None:
            return "the number of blocks asked for" if blocks >= self.options.blocks else None
        if blocks >= MIN_BLOCKS and time.monotonic() > self._deadline:
            return "the time"
        widths = [width for key in self.stage.live if (width := self._reach(key)) is not None]
        if (
            blocks >= SETTLED_BLOCKS
            and not self._restarts
            and all(width <= self.options.target_ci for width in widths)
        ):
            return "the width of the intervals"
        return None

    def _reach(self, key: str) -> float | None:
        """Return how far the interval of an arm's ratio extends; None for baseline and ceiling."""
        arm = self.stage.arms[key]
        if arm.role in ("baseline", "ceiling"):
            return None
        base = record.base_of(self.record["arms"], key)
        assert base is not None
        return stats.reach(stats.paired(self._block_ms[base], self._block_ms[key]))

    def _block(self, index: int) -> None:
        """Time some steps of every arm, in random order, while all other arms are stopped."""
        found: dict[str, Any] = {}
        whole, own_s = Watch(), 0.0
        whole.start()
        keys = self.shuffled(list(self.stage.live))
        for key in keys:
            watch = Watch()
            watch.start()
            mine = time.process_time()
            windows: list[Window] | None = self.stage.call(
                key, "window", self._steps, SKIPPED_STEPS
            )
            if windows is None:
                continue
            # Our own CPU time is not foreign load: this process and the ranks.
            own = time.process_time() - mine + sum(w.whole_cpu_s for w in windows)
            own_s += own
            turn = watch.stop(own)
            found[key] = {
                "step_ms": [_rounded(w.step_ms) for w in windows],
                "input_ms": [_rounded(w.input_ms) for w in windows],
                "cpu_s": _rounded([w.cpu_s for w in windows]),
                "foreign": turn.foreign,
                "steal": turn.steal,
            }
        # Load of the whole block: the time of one arm is too short for the system's clock ticks.
        load = whole.stop(own_s)
        if len(found) < len(keys):
            load = Load(None, None)  # the CPU time of a failed arm is unknown
        dropped = too_busy(load, self.options.max_foreign)
        kept = dropped is None
        self.record["blocks"].append(
            {
                "index": index,
                "generation": self._generation,
                "kept": kept,
                "dropped": dropped,
                "foreign": load.foreign,
                "steal": load.steal,
                "arms": found,
            }
        )
        for key, window in found.items():
            if kept:
                self._block_ms[key][index] = stats.block_ms(window["step_ms"])

    def _pass_is_due(self) -> bool:
        """Return whether to run a phase pass: after a kept block, once per PASS_EVERY of them."""
        passes, blocks = (sum(x["kept"] for x in self.record[y]) for y in ("phases", "blocks"))
        due = blocks >= passes * PASS_EVERY + PASS_EVERY // 2
        return due and bool(self.record["blocks"][-1]["kept"])

    def _pass(self, index: int) -> None:
        """Time the parts of steps, with a barrier before each; and a memcpy of all gradients."""
        self.stage.say("where the time goes")
        arms: dict[str, Any] = {}
        watch, mine, own_s = Watch(), time.process_time(), 0.0
        watch.start()
        keys = self.shuffled(list(self.stage.live))
        for key in keys:
            windows = self.stage.call(key, "phases", PASS_STEPS)
            if windows is None:
                continue
            own_s += sum(w.whole_cpu_s for w in windows)
            arms[key] = {
                "input_ms": [_rounded(w.input_ms) for w in windows],
                "compute_ms": [_rounded(w.rest_ms) for w in windows],
                "optimizer_ms": [_rounded(w.optimizer_ms) for w in windows],
            }
        load = watch.stop(own_s + time.process_time() - mine)
        if len(arms) < len(keys):
            load = Load(None, None)  # as in `_block`
        kept = too_busy(load, self.options.max_foreign) is None
        self.record["phases"].append({"block": index, "kept": kept, "arms": arms})
        for size in self.options.ranks if kept else ():
            key = self.stage.key_of("ceiling", size)
            times = self.stage.call(key, "memcpy", 5)
            if times is not None:
                anchor = self.record["anchors"].setdefault(
                    str(size), {"bytes": self.stage.row(key)["gradient_bytes"], "memcpy_ms": []}
                )
                anchor["memcpy_ms"] += _rounded([max(ranks) for ranks in zip(*times, strict=True)])

    def _look_closer(self) -> None:
        """Time all-reduces of several sizes, for the cost model."""
        for key, arm in self.stage.arms.items():
            if key not in self.stage.live:
                continue
            if arm.role in ("arm", "baseline") and arm.ranks > 1 and not arm.tuned:
                self.stage.say(f"all-reduces of {key}")
                times = self.stage.call(key, "all_reduces", ALL_REDUCE_BYTES, ALL_REDUCE_REPEATS)
                if times is not None:
                    # A collective takes as long as on its slowest rank.
                    self.record["collectives"][key] = [
                        {"bytes": size, "ms": _rounded([max(r) for r in zip(*ranks, strict=True)])}
                        for size, *ranks in zip(ALL_REDUCE_BYTES, *times, strict=True)
                    ]


def _steps_in(seconds: float, step_ms: Mapping[str, float], limits: tuple[int, int]) -> int:
    """Return how many steps take the slowest arm about `seconds`, within limits."""
    low, high = limits
    slowest = max(step_ms.values(), default=math.inf)
    return max(low, min(high, math.ceil(1000 * seconds / slowest)))


def _config(options: CompareOptions) -> dict[str, Any]:
    config = asdict(options)
    config.update(
        ranks=list(options.ranks),
        set=dict(item.partition("=")[::2] for item in options.set),
        scaling=options.scaling if len(options.ranks) > 1 else None,
        pinned=config.pop("pin"),
        min_blocks=options.blocks or SETTLED_BLOCKS,
        least_blocks=MIN_BLOCKS,
        clip_norm=None if math.isinf(options.clip_norm) else options.clip_norm,
    )
    return config


def _rounded(values: Any) -> list[float]:
    """Round to 4 decimals, in ms 0.1 microseconds: more are noise, and would double the file."""
    return [round(float(value), 4) for value in values]
