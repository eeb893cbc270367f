"""DDP and its options, FSDP2, distributed checkpoints and ZeRO on hvdtrain's transports."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.ranks import Ranks
from tests.transports.features import FEATURES, Training, Weights


@pytest.fixture(scope="module")
def by_gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Training], Weights]]:
    """What two ranks train on Gloo, feature by feature."""
    with contextlib.closing(Ranks("gloo", 2, "peers")) as pool:
        yield functools.cache(lambda row: pool.run(row, tmp_path_factory.mktemp(row.__name__))[0])


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.__name__)
@pytest.mark.parametrize("peers", [("shm", 2), ("mpi4py", 2)], indirect=True)
def test_trains_as_on_gloo(
    peers: Ranks, row: Training, by_gloo: Callable[[Training], Weights], tmp_path: Path
) -> None:
    results = peers.run(row, tmp_path)
    expected = by_gloo(row)
    assert all(t.isfinite().all() for t in expected.values())
    torch.testing.assert_close(results, [expected] * len(results), rtol=0, atol=0)
    shutil.rmtree(tmp_path)
