"""`--buffers local`: each rank keeps its own BatchNorm statistics, also across a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.methods.data_runs import Regression, train
from tests.ranks import Ranks

SEVERAL = pytest.mark.parametrize(
    "ranks",
    [("ddp-torchrun", 2), ("compat-torchrun", 3), ("ps-torchrun", 2), ("horovod-gloo", 2)],
    indirect=True,
)


@SEVERAL
def test_each_rank_resumes_with_its_own(ranks: Ranks, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"buffers": "local"}
    task = Regression(8 * ranks.n, conv=True)
    whole = ranks.run(train, task, tmp_path / "whole", **changes)
    ranks.run(train, task, tmp_path / "parts", 3, **changes)
    rest = ranks.run(train, task, tmp_path / "parts", resume="must", **changes)
    for one, other in zip(whole, rest, strict=True):
        assert one["digest"] == other["digest"]
        for name, value in one["buffers"].items():
            assert torch.equal(value, other["buffers"][name]), name
    means = {tuple(one["buffers"]["2.running_mean"].tolist()) for one in whole}
    assert len(means) == ranks.n, "the ranks' statistics are equal, so that this tests nothing"


@pytest.mark.parametrize("ranks", [("ddp-torchrun", 2)], indirect=True)
def test_a_checkpoint_of_another_policy(ranks: Ranks, tmp_path: Path) -> None:
    """Both ways, in a line: each rank continues with those of rank 0."""
    task = Regression(16, conv=True)
    ranks.run(train, task, tmp_path, 3)
    (line,) = own_state(ranks.run(train, task, tmp_path, 4, resume="must", buffers="local"))
    assert line.endswith("each rank's own state starts afresh, as the checkpoint has none")
    (line,) = own_state(ranks.run(train, task, tmp_path, resume="must"))
    assert line == "resume   RankBuffers: the checkpoint's state is not used"


def own_state(found: list[dict[str, Any]]) -> list[str]:
    return [line for line in found[0]["lines"] if "RankBuffers" in line]
