"""hvdtrain.transports.malloc: what freed memory costs a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvdtrain.transports.malloc import kept_bytes
from tests.launching import variables

# The gradients are 128 MiB, and the last ones are at the end of the heap.
FAULTS = """
import resource, torch
from hvdtrain.transports.malloc import keep_freed_memory
torch.set_num_threads(1)
keep_freed_memory()
def make():
    return [torch.ones(4 << 20) for _ in range(8)]
for _ in range(10):  # the heap grows a little in the first ones
    make()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    make()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_the_memory_of_gradients_is_kept_for_the_next_ones() -> None:
    """Without it, whether a process gives them back depends on what lies behind them."""
    command, pages = [sys.executable, "-c", FAULTS], 10 * 128 * 256
    printed = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    assert int(printed) < pages // 10


def test_many_ranks_keep_a_quarter_of_the_memory_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1000 LOCAL_WORLD_SIZE=1000 MASTER_ADDR=a MASTER_PORT=1"
    for name, value in variables(ranks).items():
        monkeypatch.setenv(name, value)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < kept_bytes() <= memory // 4000
