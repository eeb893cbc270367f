"""Every collective of torch.distributed, on hvdtrain's transports and on Gloo: collectives/."""

from __future__ import annotations

import pytest

from tests.transports.collectives import TABLE, Case
from tests.transports.pool import Peers

# Gloo is the check of the table itself, and only in `make test-all`.
ARMS = [
    ("shm", 2),
    ("shm", 3),
    ("mpi4py", 2),
    pytest.param(("mpi4py", 3), marks=pytest.mark.exhaustive),
    *(pytest.param(("gloo", n), marks=pytest.mark.exhaustive) for n in (2, 3)),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("peers", ARMS, indirect=True)
def test_behaves(peers: Peers, row: Case) -> None:
    peers.run(row.function)
