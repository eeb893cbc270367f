"""Facts about the machine, for the record of a comparison. Imports no torch."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from hvdtrain.commands import run
from hvdtrain.compare.record import Machine
from hvdtrain.compare.run.cpu_load import load_average


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
    # Without a call into CUDA: the driver of the comparison imports no torch.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return len(gpus())


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
