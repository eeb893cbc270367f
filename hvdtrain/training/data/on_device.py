"""The copy of batches to the device of the rank: `on_device` overlaps it with the computation.

Used by `loader`, and for a batch that another rank has sent by `stream`.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hvdtrain.errors import InputError
from hvdtrain.system.trees import map_tree

Convert = Callable[[Tensor], Tensor]


class Movable(ABC):  # noqa: B024 (it only names a kind of value)
    """A tensor, or a batch of any library that moves itself: whatever has a method `to`."""

    # Not a Protocol, whose check of each number and string in a batch is slow.
    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        return hasattr(other, "to")


def moved(batch: Any, device: torch.device) -> Any:
    """Return `batch` with all that can be moved on `device`, however it is nested."""
    return _map_parts(lambda part: part.to(device), batch)


def _map_parts(function: Callable[[Any], Any], batch: Any) -> Any:
    """Return a copy of `batch` with `function` applied to what can be moved."""
    return map_tree(function, Movable, batch, keep_dict_types=True)


def on_device(loader: Iterable[Any], device: torch.device, convert: Convert) -> Iterator[Any]:
    """Yield the batches on `device`, with `convert` applied to every tensor in dicts, lists, tuples
    and dataclasses.

    On CUDA, the copy of the next batch overlaps with the computation on the current one.
    """
    loader = _without_worker_traceback(loader)

    def finish(batch: Any) -> Any:
        return map_tree(convert, Tensor, moved(batch, device), keep_dict_types=True)

    if device.type != "cuda":
        for batch in loader:
            yield finish(batch)
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    # Of the tensors alone: what moves itself does so when it is handed over.
    def copy_ahead(part: Any) -> Any:
        return part.to(device, non_blocking=True) if isinstance(part, Tensor) else part

    def start_copy(batch: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(copies):
            return _map_parts(copy_ahead, batch), copies.record_event()

    def hand_over(batch: Any, done: torch.cuda.Event) -> Any:
        current = torch.cuda.current_stream(device)
        current.wait_event(done)

        # The allocator must not reuse this memory before the consuming stream has finished with it.
        def record(part: Any) -> Any:
            if isinstance(part, Tensor):
                part.record_stream(current)
            return part

        _map_parts(record, batch)
        return finish(batch)

    ready = None
    for batch in loader:
        pending = start_copy(batch)
        if ready is not None:
            yield hand_over(*ready)
        ready = pending
    if ready is not None:
        yield hand_over(*ready)


def _without_worker_traceback(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; remove the traceback that DataLoader prepends to a worker's InputError."""
    try:
        yield from batches
    except InputError as error:
        last = str(error).rstrip().rpartition("\n")[2]
        raise InputError(last.removeprefix("hvdtrain.errors.InputError: ")) from None
