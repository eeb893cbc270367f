"""SyncBatchNorm for scripts: over the batches of all ranks of `hvd.init`, by named operations.

`hvdtrain.optim.global_batch_norm` has the arithmetic.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.mpi_ops import Sum, allgather, allreduce, size
from hvdtrain.optim.global_batch_norm import GlobalBatchNorm


class SyncBatchNorm(GlobalBatchNorm):
    """See `hvdtrain.optim.global_batch_norm`: the same, over the ranks of `hvd.init`.

    Modules are numbered in the order of their first communication, which is the same on all ranks;
    the order of construction need not be. Each `init` restarts the numbers, since ranks that are
    new then start at 0.
    """

    _generation = 0  # of the engine that the number is for
    _number = _num_calls = _num_pending = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_generation": 0}  # a copy is another module, with other names

    def num_ranks(self) -> int:
        """Return the size of the world."""
        return size()

    def gather_statistics(self, mine: Tensor) -> Tensor:
        """Return every rank's tensor, stacked by rank. Collective."""
        return allgather(mine.unsqueeze(0), name=f"{self._name()}.statistics")

    def begin_call(self) -> str:
        """Return a name for this call's gradients that no call with a pending backward has."""
        name = self._name()
        # A graph that is dropped leaves too many pending; the modulo bounds the number of names.
        self._num_calls = (self._num_calls + 1) % 256 if self._num_pending else 0
        self._num_pending += 1
        return f"{name}.gradients.{self._num_calls}"

    def sum_gradients(self, mine: Tensor, call: str) -> Tensor:
        """Return the sum over all ranks. Collective."""
        return allreduce(mine, name=call, op=Sum)

    def end_call(self) -> None:
        """Note that the backward pass of a call has run."""
        self._num_pending -= 1

    def _name(self) -> str:
        """Return the beginning of the names of this module's operations; a new one after `init`."""
        if self._generation != basics.generation:
            self._generation, self._number = basics.generation, next(basics.engine.batch_norms)
            self._num_calls = self._num_pending = 0
        return f"sync_batch_norm.{self._number}"
