"""Every collective of torch.distributed, on hvdtrain's transports and on Gloo: collectives/."""

from __future__ import annotations

import pytest

from tests.ranks import SIZES, Ranks
from tests.transports.collectives import TABLE, Case


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("peers", SIZES["peers"], indirect=True)
def test_behaves(peers: Ranks, row: Case) -> None:
    peers.run(row.function)
