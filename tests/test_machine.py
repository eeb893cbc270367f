"""What the operating system says of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.doctor import limits
from hvdtrain.horovod_build.facts import _memory_gib
from hvdtrain.system import machine

GIB = 1 << 30


@pytest.mark.parametrize(
    ("membership", "files", "memory_gib", "cpus"),
    [
        ("", {}, None, None),
        # A container with a namespace of its own: the root alone.
        ("0::/", {"memory.max": 8 * GIB, "cpu.max": "200000 100000"}, 8, 2.0),
        # Slurm and systemd: the job's folder, or one above it.
        (
            "0::/system.slice/job_7/step_0/user",
            {
                "system.slice/cpu.max": "max 100000",
                "system.slice/memory.max": 64 * GIB,
                "system.slice/job_7/memory.max": 4 * GIB,
                "system.slice/job_7/cpu.max": "350000 100000",
                "system.slice/job_7/step_0/user/memory.max": 16 * GIB,
                "system.slice/job_7/step_0/user/cpu.max": "800000 100000",
                "system.slice/job_8/memory.max": 1,  # another job's
            },
            4,
            3.5,
        ),
        (
            "12:memory:/slurm/job_7\n3:cpu,cpuacct:/slurm/job_7/step\n1:name=systemd:/x\n0::/x",
            {
                "memory/memory.limit_in_bytes": 9223372036854771712,
                "memory/slurm/job_7/memory.limit_in_bytes": 2 * GIB,
                "cpu/cpu.cfs_quota_us": -1,
                "cpu/cpu.cfs_period_us": 100000,
                "cpu/slurm/job_7/cpu.cfs_quota_us": 50000,
                "cpu/slurm/job_7/cpu.cfs_period_us": 100000,
            },
            2,
            0.5,
        ),
        # A container without one: its own folder is mounted as the root.
        ("5:memory:/docker/abc", {"memory/memory.limit_in_bytes": GIB}, 1, None),
    ],
)
def test_the_smallest_limit_up_to_the_root_holds(
    membership: str,
    files: dict[str, object],
    memory_gib: int | None,
    cpus: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = tmp_path / "cgroup"
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    (tmp_path / "membership").write_text(f"{membership}\n" if membership else "")
    monkeypatch.setattr(machine, "ROOT", root)
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "membership")
    memory = None if memory_gib is None else memory_gib * GIB
    assert machine.memory_limit_bytes() == memory
    assert machine.cpu_quota() == cpus
    # Both commands use them.
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=128 * GIB))
    assert _memory_gib() == (128 if memory_gib is None else memory_gib)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    throttled = f"the cgroup's quota is {cpus:g}: threads are throttled" if cpus else "64 of"
    assert throttled in limits.cores(2).text


def test_load_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the system; None where it has none, which is not an idle one."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 1.0, 2.0))
    assert machine.load_average() == [0.5, 1.0, 2.0]
    monkeypatch.setattr("os.getloadavg", lambda: os.stat("/nowhere"))
    assert machine.load_average() is None
    monkeypatch.delattr("os.getloadavg")
    assert machine.load_average() is None
