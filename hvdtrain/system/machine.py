"""This machine: its processor, memory and GPUs, and what the control groups of this process allow.

A job of Slurm, systemd or a container may have its limit in any folder from the process's own group
up to the root, and the smallest holds (cgroups(7)). Imports no torch.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hvdtrain.system.commands import run

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED_BYTES = 1 << 62  # version 1 reports no limit as the largest number of pages


@dataclass
class Machine:
    """Facts about the machine, without its host name."""

    cpu: str | None = None
    cores: int | None = None
    memory_mib: int | None = None
    kernel: str | None = None
    gpus: list[str] | None = None
    load_before: list[float] | None = None
    load_after: list[float] | None = None


def facts() -> Machine:
    """Return the facts about this machine, without its host name."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        kernel=platform.release(),
        gpus=gpus(),
        load_before=load_average(),
    )


def gpus() -> list[str]:
    """Return the names of this host's GPUs from NVIDIA's driver; empty without one."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = run(query, env=os.environ, timeout_s=20)
    return found.stdout.strip().splitlines() if found.code == 0 else []


def usable_gpus() -> int:
    """Return how many GPUs the ranks will see: 0 if torch was built without CUDA."""
    if metadata.version("torch").endswith("+cpu"):
        return 0
    # Without a call into CUDA, which needs torch.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return len(gpus())


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def load_average() -> list[float] | None:
    """Return the load average over 1, 5 and 15 minutes; None if the system has none."""
    try:
        return list(os.getloadavg())
    except (OSError, AttributeError):
        return None


def memory_limit_bytes() -> int | None:
    """Return how much memory the process's groups may use together; None without a limit."""
    found = _numbers("memory", "memory.max", "memory.limit_in_bytes")
    limits = [numbers[0] for numbers in found if numbers and numbers[0] < _UNLIMITED_BYTES]
    return min(limits, default=None)


def cpu_quota() -> float | None:
    """Return how many cores' time the process's groups may use; None without a limit."""
    found = _numbers("cpu", "cpu.max", "cpu.cfs_quota_us cpu.cfs_period_us")
    quotas = [numbers[0] / numbers[1] for numbers in found if len(numbers) == 2]
    return min((quota for quota in quotas if quota > 0), default=None)  # -1: no limit


def _numbers(controller: str, *files: str) -> Iterator[list[int]]:
    """Yield the numbers in these files of each of this process's groups, from its own up to the
    root, of version 2 and of a controller of version 1; those of names with a space between are
    one list. What is missing, or "max", for no limit, is left out. A container may see the root
    alone.
    """
    groups = {ROOT: "/", ROOT / controller: "/"}
    with suppress(OSError):
        for line in MEMBERSHIP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                groups[ROOT] = path
            elif controller in controllers.split(","):
                groups[ROOT / controller] = path
    for root, path in groups.items():
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            for names in files if folder.is_relative_to(root) else ():
                with suppress(OSError, ValueError):
                    texts = [(folder / name).read_text() for name in names.split()]
                    yield [int(word) for text in texts for word in text.split()]
