"""Order and completion of operations on GPUs: events, streams, and the waits of the host.

A collective runs on a stream of its own, so that it waits for its inputs and for nothing else that
its rank computes: on the stream that computes, a collective of one rank could wait for a bucket of
gradients that a peer sends only after this collective. The host waits for results, as Horovod's
does: a rank that went on would step and commit what a lost peer has left half reduced.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.exceptions import HorovodInternalError

_PAUSE_S = 50e-6


def record_event(device: torch.device) -> Any:
    """Return an event of what the current stream of this GPU has been given so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def await_event(is_complete: Callable[[], bool], abort_reason: Callable[[], str | None]) -> None:
    """Wait on the host. Raises HorovodInternalError as soon as the job is over.

    Also if that is complete: after a failure, operations are ended without a result.
    """
    while not is_complete() and abort_reason() is None:
        time.sleep(_PAUSE_S)
    if (reason := abort_reason()) is not None:
        raise HorovodInternalError(reason, lost_peer=True)


def use_on_current_stream(result: Any) -> None:
    """Keep the memory of these tensors, made on another stream, until the current one is through
    with them. `result`: a tensor, or a list or tuple with some.
    """
    if isinstance(result, Tensor):
        if result.is_cuda:
            result.record_stream(torch.cuda.current_stream(result.device))
    elif isinstance(result, (list, tuple)):
        for each in result:
            use_on_current_stream(each)
