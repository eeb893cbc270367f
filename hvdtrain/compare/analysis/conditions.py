"""The conditions of a comparison as names and values: hardware, versions, options, settings.

`summary` takes the rows for the report's environment table. Everything is read from the record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from hvdtrain.compare.compare_options import METHOD_OPTIONS
from hvdtrain.compare.formatting import settings
from hvdtrain.compare.record import ArmRecord, Config, Record
from hvdtrain.training.config import TrainConfig

UNKNOWN = "not recorded"


def condition_rows(record: Record) -> list[tuple[str, str]]:
    """Return (name, value), the most relevant first. A missing value reads UNKNOWN."""
    config, machine = record.config, record.machine

    def per_arm(value_of: Callable[[ArmRecord], Any]) -> str | None:
        return _per_arm(record.arms, value_of)

    def in_force(name: str) -> str | None:
        return per_arm(lambda arm: _in_force(arm, name))

    why = f" ({config.device_reason})" if config.device_reason else ""
    warm_up, affinity = per_arm(lambda arm: arm.warm_up_steps), in_force("affinity")
    ended = f"; ended by {config.stopped_by}" if config.stopped_by else ""
    rows: list[tuple[str, Any]] = [
        ("task", f"{config.task} ({settings(config.set)})" if config.set else config.task),
        ("data", config.data),
        *([("hosts", f"{config.hosts}; CPU and load are this host's")] if config.hosts else []),
        ("batch per rank", per_arm(_batch_per_rank)),
        ("batch of all ranks", per_arm(lambda arm: arm.samples_per_step)),
        ("device", config.device and config.device + why),
        ("precision", config.precision),
        *_method(config),
        ("learning rate", config.lr),
        ("seed", config.seed),
        ("buffers", config.buffers),
        ("parameters", per_arm(lambda arm: arm.parameters)),
        ("gradients", per_arm(lambda arm: arm.gradient_bytes and f"{arm.gradient_bytes:,} bytes")),
        ("steps per block", config.steps_per_block),
        ("warm-up", warm_up and f"outside of the blocks; steps: {warm_up}"),
        ("stop rule", config.target_ci and f"fixed beforehand: {stop_rule(config)}{ended}"),
        ("threads per rank", in_force("threads")),
        ("interop threads", in_force("interop_threads")),
        ("affinity", affinity),
        ("cpu", machine.cpu and f"{machine.cpu}, {machine.cores} cores"),
        ("memory", machine.memory_mib and f"{machine.memory_mib:,} MiB"),
        ("gpus", None if machine.gpus is None else ", ".join(machine.gpus) or "none"),
        ("kernel", machine.kernel),
        ("load average before", _load(machine.load_before)),
        ("load average after", _load(machine.load_after)),
        *sorted(record.versions.items()),
        *((f"launch {key}", arm.command) for key, arm in record.arms.items()),
        *((f"variable {name}", value) for name, value in _variables(record)),
    ]
    return [(name, UNKNOWN if value in (None, "") else str(value)) for name, value in rows]


def _method(config: Config) -> list[tuple[str, Any]]:
    """Return the options of the training method that all arms share; none for its defaults."""
    values = {name: getattr(config, name) for name in METHOD_OPTIONS if name != "precision"}
    changed = {k: v for k, v in values.items() if v not in (None, getattr(TrainConfig(), k))}
    return [("training method", settings(changed))] if changed else []


def stop_rule(config: Config) -> str:
    """Describe in words when a comparison ends."""
    if config.blocks:
        return f"after {config.blocks} blocks"
    text = (
        f"once every interval is within {100 * (config.target_ci or 0):g} % on either side, after "
        f"at least {config.min_blocks} blocks and all planned starts; or after "
        f"{config.budget_s or 0:g} s, with at least {config.least_blocks or 0} blocks"
    )
    if config.longest_s:  # older files have not
        text += f" that count; or after {config.longest_s:g} s, with as many blocks"
    return text


def _per_arm(arms: dict[str, ArmRecord], value_of: Callable[[ArmRecord], Any]) -> str | None:
    """Return the value that all arms share, else each value with its arms. None is left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for key, arm in arms.items():
        value = value_of(arm)
        if value is not None:
            found[str(value)].append(key)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{value} ({', '.join(keys)})" for value, keys in found.items()) or None


def _batch_per_rank(arm: ArmRecord) -> str | None:
    return f"{arm.samples_per_step / arm.ranks:g}" if arm.samples_per_step else None


def _in_force(arm: ArmRecord, name: str) -> str | None:
    """Return the setting found in the ranks of an arm; one value per rank if they differ."""
    prefix = "cores " if name == "affinity" else ""
    values = [str(v) for rank in arm.in_force if (v := getattr(rank, name)) not in (None, [])]
    found = values[:1] if len(set(values)) == 1 else values
    return prefix + ", ".join(found) if found else None


def _load(values: list[float] | None) -> str | None:
    return ", ".join(f"{value:.2f}" for value in values) if values else None


def _variables(record: Record) -> list[tuple[str, str]]:
    """Return the variables of the comparison's own process, and those that differ in the ranks."""
    given = dict(record.environment)
    ranks = [rank for arm in record.arms.values() for rank in arm.in_force]
    for name in sorted({name for rank in ranks for name in rank.variables}):

        def in_ranks(arm: ArmRecord, name: str = name) -> str | None:
            values = {r.variables[name] for r in arm.in_force if name in r.variables}
            return ", ".join(sorted(values)) or None

        inside = _per_arm(record.arms, in_ranks)
        if inside is not None and inside != given.get(name):
            outside = f"{given[name]}, in the ranks " if name in given else "in the ranks "
            given[name] = outside + inside
    return sorted(given.items())
