"""Elastic training in one process: what a commit holds, and which jobs are refused. See
behaviour_elastic.py for what takes ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvdtrain import hvd
from hvdtrain.errors import LaunchError
from hvdtrain.hvd.elastic.state import OptimizerStateHandler


def test_a_commit_survives_the_steps_after_a_restore() -> None:
    """An optimizer adopts the tensors that it loads, and changes them in place."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

    def step() -> Any:
        parameter.grad = torch.ones(3)
        optimizer.step()
        return optimizer.state[parameter]["momentum_buffer"].clone()

    committed = step()
    handler = OptimizerStateHandler(optimizer)
    for _ in range(2):
        step()
        handler.restore()
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], committed)


def test_an_elastic_job_of_horovodrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(LaunchError, match="start elastic jobs with hvdrun, which takes the"):
        hvd.init()
