"""DDP and its options, FSDP2, distributed checkpoints and ZeRO on hvdtrain's transports."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.transports.features import FEATURES, Feature, Weights
from tests.transports.pool import MPI_2, MPI_3, SHM_2, SHM_3, Peers


class ByGloo:
    """What two ranks train on Gloo, feature by feature."""

    def __init__(self, folder: Path) -> None:
        self._pool = Peers("gloo", 2)
        self._folder = folder
        self._trained: dict[str, Weights] = {}

    def weights(self, row: Feature) -> Weights:
        if row.name not in self._trained:
            results = self._pool.run(row.function, self._folder / row.name)
            self._trained[row.name] = results[0]
        return self._trained[row.name]

    def close(self) -> None:
        self._pool.close()


@pytest.fixture(scope="module")
def by_gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByGloo]:
    with contextlib.closing(ByGloo(tmp_path_factory.mktemp("gloo"))) as reference:
        yield reference


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row.name)
@pytest.mark.parametrize("peers", [SHM_2, MPI_2, SHM_3, MPI_3], indirect=True)
def test_trains_as_on_gloo(peers: Peers, row: Feature, by_gloo: ByGloo, tmp_path: Path) -> None:
    results = peers.run(row.function, tmp_path)
    expected = by_gloo.weights(row) if peers.n == 2 else results[0]
    for rank, weights in enumerate(results):
        assert list(weights) == list(expected)
        for part, t in weights.items():
            assert t.isfinite().all()
            assert torch.equal(t, results[0][part]), f"{part} of rank {rank} is not rank 0's"
            assert torch.equal(t, expected[part]), f"{part} is not what Gloo trains"
    shutil.rmtree(tmp_path)
