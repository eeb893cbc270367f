"""The conditions of a comparison as names and values: hardware, versions, options, settings.

`summary` takes the rows for the report's environment table. Everything is read from the record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

Json = dict[str, Any]
UNKNOWN = "not recorded"


def environment_rows(record: Json) -> list[list[str]]:
    """Return [name, value] rows, the most relevant first. A missing value reads UNKNOWN."""
    config = record.get("config") or {}
    machine = record.get("machine") or {}
    arms: dict[str, Json] = record.get("arms") or {}
    rows = [
        ("task", _task(config)),
        ("data", config.get("data")),
        ("batch per rank", _by_arm(arms, _batch_per_rank)),
        ("batch of all ranks", _by_arm(arms, lambda arm: arm.get("samples_per_step"))),
        ("device", _device(config)),
        ("precision", config.get("precision")),
        ("learning rate", config.get("lr")),
        ("seed", config.get("seed")),
        ("buffers", config.get("buffers")),
        ("parameters", _by_arm(arms, lambda arm: arm.get("parameters"))),
        ("gradients", _by_arm(arms, _gradients)),
        ("steps per block", config.get("steps_per_block")),
        ("warm-up", _warm_up(arms)),
        ("stop rule", _stop_rule(config)),
        ("threads per rank", _by_arm(arms, lambda arm: _in_force(arm, "threads"))),
        ("interop threads", _by_arm(arms, lambda arm: _in_force(arm, "interop_threads"))),
        ("affinity", _by_arm(arms, _affinity)),
        ("cpu", _cpu(machine)),
        ("memory", _of(machine.get("memory_mib"), "{:,} MiB")),
        ("gpus", _gpus(machine)),
        ("kernel", machine.get("kernel")),
        ("load average before", _list(machine.get("load_before"))),
        ("load average after", _list(machine.get("load_after"))),
        *sorted((record.get("versions") or {}).items()),
        *((f"launch {key}", arm.get("command")) for key, arm in arms.items()),
        *((f"variable {name}", value) for name, value in _variables(record, arms)),
    ]
    return [[name, UNKNOWN if value in (None, "") else str(value)] for name, value in rows]


def _task(config: Json) -> str | None:
    chosen = ", ".join(f"{name}={value}" for name, value in (config.get("set") or {}).items())
    return f"{config.get('task')} ({chosen})" if chosen else config.get("task")


def _device(config: Json) -> str | None:
    why = config.get("device_reason")
    return f"{config.get('device')} ({why})" if why else config.get("device")


def _by_arm(arms: dict[str, Json], of: Callable[[Json], Any]) -> str | None:
    """Return the value that all arms share, else each value with its arms. None is left out."""
    found: dict[str, list[str]] = defaultdict(list)
    for key, arm in arms.items():
        value = of(arm)
        if value is not None:
            found[str(value)].append(key)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{value} ({', '.join(keys)})" for value, keys in found.items()) or None


def _batch_per_rank(arm: Json) -> str | None:
    samples = arm.get("samples_per_step")
    return f"{samples / arm['ranks']:g}" if samples else None


def _gradients(arm: Json) -> str | None:
    return _of(arm.get("gradient_bytes"), "{:,} bytes")


def _in_force(arm: Json, what: str) -> str | None:
    """Return the setting found in the ranks of an arm; one value per rank if they differ."""
    values = [
        str(rank.get(what)) for rank in arm.get("in_force") or [] if rank.get(what) is not None
    ]
    return values[0] if len(set(values)) == 1 else ", ".join(values) or None


def _affinity(arm: Json) -> str | None:
    cores = _in_force(arm, "affinity")
    return f"cores {cores}" if cores else None


def _warm_up(arms: dict[str, Json]) -> str | None:
    steps = _by_arm(arms, lambda arm: arm.get("warm_up_steps"))
    return f"outside of the blocks; steps: {steps}" if steps else None


def _stop_rule(config: Json) -> str | None:
    if config.get("target_ci") is None:
        return None
    ended = f"; ended by {config['stopped_by']}" if config.get("stopped_by") else ""
    return f"fixed beforehand: {stop_rule(config)}{ended}"


def stop_rule(config: Json) -> str:
    """Describe in words when a comparison ends."""
    if config.get("blocks"):
        return f"after {config['blocks']} blocks"
    return (
        f"once every interval is within {100 * config['target_ci']:g} % on either side, after at "
        f"least {config.get('min_blocks')} blocks and all planned starts; or after "
        f"{config.get('budget_s') or 0:g} s, with at least {config.get('least_blocks') or 0} blocks"
    )


def _cpu(machine: Json) -> str | None:
    return f"{machine['cpu']}, {machine.get('cores')} cores" if machine.get("cpu") else None


def _gpus(machine: Json) -> str | None:
    found = machine.get("gpus")
    return None if found is None else ", ".join(map(str, found)) or "none"


def _list(values: list[float] | None) -> str | None:
    return ", ".join(f"{value:.2f}" for value in values) if values else None


def _of(value: int | None, form: str) -> str | None:
    return None if value is None else form.format(value)


def _variables(record: Json, arms: dict[str, Json]) -> list[tuple[str, str]]:
    """Return the variables of the comparison's own process, and those that differ in the ranks."""
    given = dict(record.get("environment") or {})
    names = {
        name
        for arm in arms.values()
        for rank in arm.get("in_force") or []
        for name in rank.get("variables") or {}
    }
    for name in names:
        inside = _by_arm(arms, lambda arm, name=name: _variable(arm, name))  # type: ignore[misc]
        if inside is not None and inside != str(given.get(name)):
            outside = f"{given[name]}, in the ranks " if name in given else "in the ranks "
            given[name] = outside + inside
    return sorted((name, str(value)) for name, value in given.items())


def _variable(arm: Json, name: str) -> str | None:
    values = {
        str((rank.get("variables") or {})[name])
        for rank in arm.get("in_force") or []
        if name in (rank.get("variables") or {})
    }
    return ", ".join(sorted(values)) or None
