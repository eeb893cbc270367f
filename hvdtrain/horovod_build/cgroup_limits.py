"""Limits of the control groups of this process: memory, and time on the CPU.

Used by `facts` and `hvdtrain doctor`. A job of Slurm, systemd or a container may have its limit in
any folder from the process's own group up to the root, and the smallest holds (cgroups(7)). Imports
no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED_BYTES = 1 << 62  # version 1 reports no limit as the largest number of pages


def memory_limit_bytes() -> int | None:
    """Return how much memory the process's groups may use together; None without a limit."""
    found = (
        _numbers(folder, name)
        for folder in _folders("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    )
    limits = [numbers[0] for numbers in found if numbers and numbers[0] < _UNLIMITED_BYTES]
    return min(limits, default=None)


def cpu_quota() -> float | None:
    """Return how many cores' time the process's groups may use; None without a limit."""
    found = [
        _numbers(folder, *names)
        for folder in _folders("cpu")
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    ]
    quotas = [numbers[0] / numbers[1] for numbers in found if len(numbers) == 2]
    return min((quota for quota in quotas if quota > 0), default=None)  # -1: no limit


def _folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's groups, from its own up to the root, of version 2 and of
    a controller of version 1. A container may see the root alone.
    """
    groups = {ROOT: "/", ROOT / controller: "/"}
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            groups[ROOT] = path
        elif controller in controllers.split(","):
            groups[ROOT / controller] = path
    for root, path in groups.items():
        folder = root / path.lstrip("/")
        yield from (part for part in (folder, *folder.parents) if part.is_relative_to(root))


def _numbers(folder: Path, *names: str) -> list[int]:
    """Return the numbers in files of a group; none if one is missing, or "max", for no limit."""
    try:
        return [int(word) for name in names for word in (folder / name).read_text().split()]
    except (OSError, ValueError):
        return []
