"""barrier and join: waiting for others."""

from __future__ import annotations

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.engine.request import Key, Meta
from hvdtrain.hvd.engine.work import Work
from hvdtrain.hvd.ops import common
from hvdtrain.hvd.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set are here. Collective; operations under way are not waited
    for.
    """
    engine = basics.engine
    set_id = common.set_id("barrier", process_set)
    engine.submit(Work(Key(set_id, "barrier.noname"), Meta("barrier"))).wait()


def join(device: int = -1) -> int:
    """Wait until all ranks have called join; return the last of them. Collective.

    Meanwhile this rank's share of the others' allreduces, gradients included, is zeros; a mean is
    still divided by the number of all ranks. `device`: the GPU on which the zeros are made.
    """
    engine = basics.engine
    if device >= 0:
        engine.zeros_on = device
    last: int = engine.join().wait()
    common.restart_unnamed()
    return last
