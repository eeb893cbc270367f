"""SyncBatchNorm for scripts: over the batches of all ranks of `hvd.init`, by named operations.

`hvdtrain.optim.global_batch_norm` has the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.mpi_ops import Sum, allgather, allreduce, size
from hvdtrain.optim.global_batch_norm import GlobalBatchNorm


class SyncBatchNorm(GlobalBatchNorm):
    """See `hvdtrain.optim.global_batch_norm`: the same, over the ranks of `hvd.init`."""

    _site: _Site | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_site": None}  # a copy is another module, with other names

    def num_ranks(self) -> int:
        """Return the size of the world."""
        return size()

    def gather_statistics(self, mine: Tensor) -> Tensor:
        """Return every rank's tensor, stacked by rank. Collective."""
        return allgather(mine.unsqueeze(0), name=self._own_site().statistics)

    def begin_call(self) -> str:
        """Return the name of this call's gradients."""
        return self._own_site().begin_call()

    def sum_gradients(self, mine: Tensor, call: str) -> Tensor:
        """Return the sum over all ranks. Collective."""
        return allreduce(mine, name=call, op=Sum)

    def end_call(self) -> None:
        """Note that the backward pass of a call has run."""
        self._own_site().end_call()

    def _own_site(self) -> _Site:
        """Return the names of this module's operations; new ones after each `init`."""
        if self._site is None or self._site.generation != basics.generation:
            self._site = _Site.next()
        return self._site


@dataclass
class _Site:
    """The names of one module's operations.

    Modules are numbered in the order of their first communication, which is the same on all ranks;
    the order of construction need not be. Each `init` restarts the numbers, since ranks that are
    new then start at 0.
    """

    generation: int
    number: int
    calls: int = 0
    pending: int = 0

    @classmethod
    def next(cls) -> _Site:
        return cls(basics.generation, next(basics.engine.batch_norms))

    @property
    def statistics(self) -> str:
        return f"sync_batch_norm.{self.number}.statistics"

    def begin_call(self) -> str:
        """Return a name for this call's gradients that no call with a pending backward has."""
        # A graph that is dropped leaves `pending` too high; the modulo bounds the number of names.
        self.calls = (self.calls + 1) % 256 if self.pending else 0
        self.pending += 1
        return f"sync_batch_norm.{self.number}.gradients.{self.calls}"

    def end_call(self) -> None:
        self.pending -= 1
