"""What the operating system says of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.doctor import limits
from hvdtrain.horovod_build.facts import _memory_gib
from hvdtrain.system import machine
from tests.environments import rows

GIB = 1 << 30
# The groups of this process, the files of its groups, and the memory, in GiB, and the cores that
# follow: "none" without a limit.
LIMITS = f"""
       |                                                       | none | none
# A container with a namespace of its own: the root alone.
0::/   | memory.max={8 * GIB}; cpu.max=200000 100000           | 8    | 2
# Slurm and systemd: the job's folder, or one above it; and another job's.
0::/system.slice/job_7/step_0/user | \
         system.slice/cpu.max=max 100000; system.slice/memory.max={64 * GIB}; \
         system.slice/job_7/memory.max={4 * GIB}; system.slice/job_7/cpu.max=350000 100000; \
         system.slice/job_7/step_0/user/memory.max={16 * GIB}; \
         system.slice/job_7/step_0/user/cpu.max=800000 100000; \
         system.slice/job_8/memory.max=1                       | 4    | 3.5
12:memory:/slurm/job_7; 3:cpu,cpuacct:/slurm/job_7/step; 1:name=systemd:/x; 0::/x | \
         memory/memory.limit_in_bytes=9223372036854771712; \
         memory/slurm/job_7/memory.limit_in_bytes={2 * GIB}; \
         cpu/cpu.cfs_quota_us=-1; cpu/cpu.cfs_period_us=100000; \
         cpu/slurm/job_7/cpu.cfs_quota_us=50000; \
         cpu/slurm/job_7/cpu.cfs_period_us=100000              | 2    | 0.5
# A container without one: its own folder is mounted as the root.
5:memory:/docker/abc | memory/memory.limit_in_bytes={GIB}      | 1    | none
"""


@pytest.mark.parametrize(("groups", "files", "memory_gib", "cpus"), rows(LIMITS))
def test_the_smallest_limit_up_to_the_root_holds(
    groups: str,
    files: str,
    memory_gib: str,
    cpus: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path / "cgroup"
    for file in filter(None, map(str.strip, files.split(";"))):
        name, _, content = file.partition("=")
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    (tmp_path / "membership").write_text(groups.replace("; ", "\n"))
    monkeypatch.setattr(machine, "ROOT", root)
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    bound = None if memory_gib == "none" else int(memory_gib) * GIB
    assert machine.memory_limit_bytes() == bound
    assert machine.cpu_quota() == (None if cpus == "none" else float(cpus))
    # Both commands use them.
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=128 * GIB))
    assert _memory_gib() == (bound or 128 * GIB) // GIB
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    throttled = f"the cgroup's quota is {cpus}: threads are throttled"
    assert ("64 of" if cpus == "none" else throttled) in limits.cores(2).text


def test_load_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the system; None where it has none, which is not an idle one."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 1.0, 2.0))
    assert machine.load_average() == [0.5, 1.0, 2.0]
    monkeypatch.setattr("os.getloadavg", lambda: os.stat("/nowhere"))
    assert machine.load_average() is None
    monkeypatch.delattr("os.getloadavg")
    assert machine.load_average() is None
