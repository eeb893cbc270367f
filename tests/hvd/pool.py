"""Pools of live ranks with a Horovod API initialised: the real `horovod.torch`, or ours.

Tests say `@pytest.mark.parametrize("hvd_ranks", OUR_ARMS, indirect=True)`, and
`hvd_ranks.run(function, *args)` calls `function(hvd, *args)` on every rank, `hvd` being the
module. This file is also what a rank runs: `python -m tests.hvd.pool SOCKET MODULE TRANSPORT`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

from tests.ranks import Arm, Pool

REAL = "horovod.torch"
OURS = "hvdtrain.hvd"

HVD = {
    arm.name: arm
    for arm in (
        Arm("horovod-gloo", REAL, "horovodrun -np {n} --gloo {python} -m"),
        Arm("horovod-mpi", REAL, "mpirun -np {n} {python} -m"),
        Arm("hvd-torchrun", OURS, "torchrun --nproc-per-node {n} -m"),
        Arm("hvd-mpirun", OURS, "mpirun -np {n} {python} -m", "gloo"),
        Arm("hvd-horovodrun", OURS, "horovodrun -np {n} --gloo {python} -m", "gloo"),
    )
}
REAL_ARMS = [(arm.name, n) for arm in HVD.values() for n in (2, 3) if arm.backend == REAL]
OUR_ARMS = [(arm.name, n) for arm in HVD.values() for n in (2, 3) if arm.backend == OURS]
# Ours with a setting: a few parameters fill a bucket; all is as under the real Horovod.
SETTINGS = {
    "small-buckets": {"HOROVOD_FUSION_THRESHOLD": "200"},
    "exact": {"HVDTRAIN_EXACT_HOROVOD": "1"},
}
HVD |= {name: Arm(name, OURS, "torchrun --nproc-per-node {n} -m") for name in SETTINGS}


class HvdRanks(Pool[Any]):
    """`n` live ranks, each with one Horovod API initialised. `run` is collective on them."""

    entry = "tests.hvd.pool"
    env = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    stops_on_failure = True

    def __init__(self, arm: str, n: int) -> None:
        super().__init__(HVD[arm], n)
        if self.arm.backend == OURS:
            # How soon a name is free again. What the kernel does in a thread's name, such as the
            # copy of a forked rank's pages, counts as its own time: milliseconds on a busy one.
            self.env = {**self.env, "HOROVOD_CYCLE_TIME": "20", **SETTINGS.get(arm, {})}


def main() -> None:
    from tests.rank import serve

    address, name, _ = sys.argv[1:]

    def opened() -> tuple[Any, int]:
        torch.set_num_threads(1)
        hvd = importlib.import_module(name)
        hvd.init()
        return hvd, hvd.rank()

    serve(address, opened, lambda hvd: hvd.shutdown())


if __name__ == "__main__":
    main()
