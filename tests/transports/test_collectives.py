"""Every collective of torch.distributed, on hvdtrain's transports and on Gloo: collectives/."""

from __future__ import annotations

import pytest

from tests.transports.collectives import TABLE, Case
from tests.transports.pool import ARMS, Peers


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("peers", ARMS, indirect=True)
def test_behaves(peers: Peers, row: Case) -> None:
    peers.run(row.function)
