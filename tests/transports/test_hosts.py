"""What is known of other hosts' ranks, and of ranks that come at the last moment."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hvdtrain.transports import hosts
from hvdtrain.transports.carrier import PeerLost
from hvdtrain.transports.hosts import ALIVE, ENDED, HERE, STOPPED, Board, Far, Seen
from hvdtrain.transports.shm import _exchange


def test_who_has_ended_is_known_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the thread that heard of it has ended: a survivor may look only then."""
    monkeypatch.setattr(hosts, "_SILENT_S", 0.3)
    board = Board(memoryview(bytearray(Board.size_bytes(4))))
    far = Far(board, [[0, 1], [2, 3]], here=[0, 1])
    for rank, life in enumerate((ALIVE, ALIVE, STOPPED, ENDED)):
        board.write(rank, Seen(5, HERE, life))
    assert far.look() == {2: Seen(5, HERE, STOPPED), 3: Seen(5, HERE, ENDED)}
    time.sleep(0.4)
    assert far.look() == {3: Seen(5, HERE, ENDED)}


class LastMoment(HashStore):
    """Rank 1 says its part just after rank 0's wait for it has timed out."""

    def wait(self, *args: Any) -> None:
        try:
            super().wait(*args)
        finally:
            self.set("name/1", "[1]")


def test_a_rank_that_comes_at_the_last_moment_has_come() -> None:
    assert _exchange(LastMoment(), "name", 0, 2, "[0]", 0.1) == [[0], [1]]


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(PeerLost, match=r"^rank 0 waited 0.1 s for rank 1, 2 to open shm$"):
        _exchange(HashStore(), "name", 0, 3, "[0]", 0.1)
