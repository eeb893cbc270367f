"""The SyncBatchNorm layers of the backends, which communicate in training only.

`layer_of` is for backends without a layer of their own: torch's and Horovod's need CUDA, and this
one works on CPUs, too. Horovod's layers communicate in eval mode if they have no running
statistics; `local_in_evaluation` changes that.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain.optim.global_batch_norm import GlobalBatchNorm
from hvdtrain.optim.model_sync import Collectives


class _BackendBatchNorm(GlobalBatchNorm):
    """A layer on one backend. Its collectives match by their order."""

    backend: Collectives

    def num_ranks(self) -> int:
        return self.backend.world.size

    def gather_statistics(self, mine: Tensor) -> Tensor:
        rows = torch.zeros(self.num_ranks(), *mine.shape, dtype=mine.dtype, device=mine.device)
        rows[self.backend.world.rank] = mine
        return self.backend.all_reduce(rows, "sum")

    def begin_call(self) -> None:
        return None

    def sum_gradients(self, mine: Tensor, call: None) -> Tensor:
        return self.backend.all_reduce(mine, "sum")


def layer_of(backend: Collectives) -> type[BatchNormBase]:
    """Return a class of layers, with the parameters of torch.nn.SyncBatchNorm, that normalize over
    the batches of all ranks of `backend`. Not collective.
    """
    kind = type("SyncBatchNorm", (_BackendBatchNorm,), {"backend": backend})
    return local_in_evaluation(cast("type[BatchNormBase]", kind))


def local_in_evaluation(kind: type[BatchNormBase]) -> type[BatchNormBase]:
    """Return a subclass of a class of layers that normalizes each batch by itself in eval mode.

    Ranks have different numbers of batches in an evaluation, so that a collective would hang.
    """

    def forward(self: BatchNormBase, input: Tensor) -> Tensor:
        return (kind if self.training else BatchNormBase).forward(self, input)

    return type(kind.__name__, (kind,), {"forward": forward})
