"""DDP and its options, FSDP2, distributed checkpoints and ZeRO on hvdtrain's transports."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.transports.features import FEATURES, Feature, Weights
from tests.transports.pool import MPI_2, SHM_2, Peers

ByGloo = Callable[[Feature], Weights]


@pytest.fixture(scope="module")
def by_gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByGloo]:
    """What two ranks train on Gloo, feature by feature."""
    with contextlib.closing(Peers("gloo", 2)) as pool:
        yield functools.cache(
            lambda row: pool.run(row.function, tmp_path_factory.mktemp(row.name))[0]
        )


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
@pytest.mark.parametrize("peers", [SHM_2, MPI_2], indirect=True)
def test_trains_as_on_gloo(peers: Peers, row: Feature, by_gloo: ByGloo, tmp_path: Path) -> None:
    results = peers.run(row.function, tmp_path)
    expected = by_gloo(row)
    for rank, weights in enumerate(results):
        assert list(weights) == list(expected)
        for part, t in weights.items():
            assert t.isfinite().all()
            assert torch.equal(t, expected[part]), f"{part} of rank {rank} is not what Gloo trains"
    shutil.rmtree(tmp_path)
