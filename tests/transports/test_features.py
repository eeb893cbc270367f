"""DDP and its options, FSDP2, distributed checkpoints and ZeRO on hvdtrain's transports."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.transports.features import FEATURES, Weights, compiled_ddp_by_inductor
from tests.transports.pool import Peers

ARMS = [
    ("shm", 2),
    ("mpi4py", 2),
    *(pytest.param((name, 3), marks=pytest.mark.exhaustive) for name in ("shm", "mpi4py")),
]


@pytest.fixture(scope="module")
def by_gloo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Weights]:
    """What two ranks train on Gloo."""
    pool = Peers("gloo", 2)
    folder = tmp_path_factory.mktemp("gloo")
    try:
        results = {
            name: pool.run(function, folder / name)[0] for name, function in FEATURES.items()
        }
    finally:
        pool.close()
    return results


@pytest.mark.timeout(300)  # the first begins with all of them on Gloo
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("peers", ARMS, indirect=True)
def test_trains_as_on_gloo(
    peers: Peers, name: str, by_gloo: dict[str, Weights], tmp_path: Path
) -> None:
    results = peers.run(FEATURES[name], tmp_path)
    for rank, weights in enumerate(results):
        assert list(weights) == list(by_gloo[name])
        for part, t in weights.items():
            assert t.isfinite().all()
            assert torch.equal(t, results[0][part]), f"{part} of rank {rank} is not rank 0's"
            if peers.n == 2:
                assert torch.equal(t, by_gloo[name][part]), f"{part} is not what Gloo trains"
    shutil.rmtree(tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_ddp_compiled_by_inductor(tmp_path: Path) -> None:
    pool = Peers("shm", 2)
    pool.call_s = 500.0
    try:
        results = pool.run(compiled_ddp_by_inductor, tmp_path)
    finally:
        pool.close()
    assert all(torch.equal(t, results[1][name]) for name, t in results[0].items())
