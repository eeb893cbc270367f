"""The base class of torch's BatchNorm layers. Used by `backends` and `hvd.SyncBatchNorm`.

Relies on `torch.nn.modules.batchnorm._BatchNorm`: its parameters, buffers and state dict, its
`forward` in evaluation, and that `_check_input_dim` is what a subclass must define. It is taken as
the base class of BatchNorm1d, under whatever name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
else:
    BatchNormBase = nn.BatchNorm1d.__bases__[0]

__all__ = ["BatchNormBase"]
