"""barrier and join: operations that only wait for the other ranks."""

from __future__ import annotations

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.engine.request import Key, Meta
from hvdtrain.hvd.engine.work import Work
from hvdtrain.hvd.ops import common
from hvdtrain.hvd.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set call barrier. Collective.

    Does not wait for pending operations.
    """
    engine = basics.engine
    set_id = common.set_id("barrier", process_set)
    engine.submit(Work(Key(set_id, "barrier.noname"), Meta("barrier"))).wait()


def join(device: int = -1) -> int:
    """Wait until all ranks have called join; return the last rank to do so. Collective.

    Meanwhile this rank contributes zeros to the other ranks' allreduces, gradients included; a mean
    is still divided by the number of all ranks. `device`: the GPU that allocates the zeros.
    """
    engine = basics.engine
    if device >= 0:
        engine.zeros_on = device
    last: int = engine.join().wait()
    common.restart_unnamed()
    return last
