"""Tuning (`--tune`): for each arm its defaults, and the best settings found with an equal budget.

`runner` calls `tune`. Every arm has the same number of candidates and blocks, with its defaults as
one candidate. The best is then timed again with all other arms, so that luck in the search does not
count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.run.arms import Arm

if TYPE_CHECKING:
    from hvdtrain.compare.run.comparison import Runner

Settings = Mapping[str, str | float]
BLOCKS = 5
_FUSION = "HOROVOD_FUSION_THRESHOLD"  # bytes; hvdtrain.hvd takes it for the size of its buckets
_DDP: tuple[Settings, ...] = ({"bucket_mib": 1}, {"bucket_mib": 5}, {"bucket_mib": 100})
_COMPAT: tuple[Settings, ...] = tuple({_FUSION: mib << 20} for mib in (1, 4, 25))
# A fusion buffer that fits the cache, and a background thread with shorter or longer cycles.
_HOROVOD: tuple[Settings, ...] = (
    {_FUSION: 4 << 20},
    {_FUSION: 32 << 20, "HOROVOD_CYCLE_TIME": 0.1},
    {_FUSION: 4 << 20, "HOROVOD_CYCLE_TIME": 5},
)
CANDIDATES = {"ddp": _DDP, "compat": _COMPAT, "horovod": _HOROVOD}


def tune(runner: Runner) -> list[Arm]:
    """Tune every arm that has candidates; return the tuned arms that beat their defaults."""
    found, stage = [], runner.stage
    for arm in [stage.arms[key] for key in stage.live]:
        wanted = CANDIDATES.get(arm.backend, ())
        if arm.role in ("arm", "baseline") and arm.ranks > 1 and wanted:
            best = _tune_one(runner, arm, wanted)
            if best:
                found.append(replace(arm, role="arm", settings=best, tuned=True))
    return found


def _tune_one(runner: Runner, arm: Arm, wanted: tuple[Settings, ...]) -> Settings:
    """Return the best of an arm's defaults (empty) and candidates, timed in interleaved blocks."""
    trials = {
        f"{arm.key} {describe(settings)}": replace(arm, settings=settings) for settings in wanted
    }
    times: dict[str, list[float]] = {arm.key: [], **{name: [] for name in trials}}
    failed: dict[str, str] = {}
    with runner.stage.trials(trials, failed) as window:
        for _ in range(BLOCKS):
            for name in runner.shuffled(list(times)):
                windows = window(name)
                if windows is not None:
                    times[name].append(stats.block_ms([w.step_ms for w in windows]))
    # The defaults compete under the arm's own key, with empty settings.
    settings: dict[str, Settings] = {arm.key: {}, **{n: t.settings for n, t in trials.items()}}
    ended = {name: found for name, found in times.items() if found and name not in failed}
    medians = {name: float(np.median(found)) for name, found in ended.items()}
    best = settings[min(medians, key=lambda name: medians[name])] if medians else {}
    candidates: list[dict[str, Any]] = [
        {
            "settings": dict(settings[name]),
            "step_ms": found,
            "status": "measured" if name not in failed and found else "failed",
            "reason": failed.get(name) or (None if found else "it failed meanwhile"),
        }
        for name, found in times.items()
    ]
    runner.record["tuning"][arm.key] = {
        "budget": f"{len(times)} candidates x {BLOCKS} blocks",
        "candidates": candidates,
        "chosen": dict(best),
    }
    return best


def describe(settings: Settings) -> str:
    """Return one word per setting: "bucket_mib=5"."""
    return " ".join(f"{name}={value}" for name, value in settings.items())
