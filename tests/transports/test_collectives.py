"""Every collective of torch.distributed, on hvdtrain's transports and on Gloo: collectives/."""

from __future__ import annotations

import pytest

from tests.transports.collectives import TABLE, Case
from tests.transports.pool import (
    GLOO_2,
    GLOO_3,
    MPI_2,
    MPI_3,
    MPICH_2,
    OPENMPI5_2,
    SHM_2,
    SHM_3,
    Peers,
)

ARMS = [SHM_2, SHM_3, MPI_2, MPI_3, MPICH_2, OPENMPI5_2, GLOO_2, GLOO_3]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("peers", ARMS, indirect=True)
def test_behaves(peers: Peers, row: Case) -> None:
    peers.run(row.function)
