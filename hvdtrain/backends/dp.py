"""nn.DataParallel: one process that splits each batch over its GPUs."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from hvdtrain.backends.single import Single


class DataParallel(Single):
    """`single`, with the forward pass split over all GPUs of the host.

    Without several GPUs it is `single`.
    """

    name: ClassVar[str] = "dp"

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        if self._num_gpus() > 1:
            return nn.DataParallel(model), optimizer
        return model, optimizer

    def describe(self) -> dict[str, Any]:
        """Add the number of GPUs that share each batch, and a note if there are less than two."""
        gpus = self._num_gpus()
        note = {} if gpus > 1 else {"note": "fewer than two GPUs: the same as `single`"}
        return {**super().describe(), "gpus": gpus, **note}

    def _num_gpus(self) -> int:
        return torch.cuda.device_count() if self.device.type == "cuda" else 0
