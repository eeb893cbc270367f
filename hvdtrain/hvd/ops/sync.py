"""barrier and join: operations that only wait for the other ranks."""

from __future__ import annotations

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.ops import handles
from hvdtrain.hvd.process_sets import ProcessSet, global_process_set


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set call barrier. Collective.

    Does not wait for pending operations.
    """
    set_id = handles.set_id("barrier", process_set)
    basics.engine.request("barrier.noname", "barrier", set_id=set_id).wait()


def join(device: int = -1) -> int:
    """Wait until all ranks have called join; return the last rank to do so. Collective.

    Meanwhile this rank contributes zeros to the other ranks' allreduces, gradients included; a mean
    is still divided by the number of all ranks. `device`: the GPU that allocates the zeros.
    """
    engine = basics.engine
    if device >= 0:
        engine.executor_gpu = device
    last: int = engine.request("join", "join").wait()
    return last
