"""The pieces and shares of `mpi4py`: every message has the size that its receiver expects."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hvdtrain.transports import mpi
from hvdtrain.transports.transport import SUM, share_bounds

Sizes = dict[int, int]


class SizesOnly(mpi.Mpi):
    """One rank, without MPI and arithmetic, that records the sizes of its messages by peer."""

    def __init__(self, rank: int, size: int, piece_bytes: int) -> None:
        self.rank, self.size = rank, size
        self._peers = [r for r in range(size) if r != rank]
        self._piece_bytes = piece_bytes
        self._payload_bytes = 0
        self._scratch = {}
        self._in_huge_pages = set()
        self._combine = lambda *arguments: None
        self.received: list[Sizes] = []
        self.sent: list[Sizes] = []

    def _start(self, recv_tensors: dict[int, Tensor], send_tensors: dict[int, Tensor]) -> Any:
        self.received.append({r: t.numel() for r, t in recv_tensors.items()})
        self.sent.append({r: t.numel() for r, t in send_tensors.items()})
        return mpi._Requests()

    def _compare_calls(self, *arguments: Any) -> None: ...
    def _wait(self, *arguments: Any) -> None: ...
    def _use_huge_pages(self, *tensors: Tensor) -> None: ...


def check(ranks: list[SizesOnly]) -> None:
    for me in ranks:
        for k, sizes in enumerate(me.received):
            for peer, size in sizes.items():
                assert ranks[peer].sent[k][me.rank] == size, (me.rank, peer, k)


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(
    size=st.integers(2, 70),
    piece=st.integers(64, 9000),
    whole_pieces=st.integers(0, 3),
    less=st.integers(0, 2000),
)
def test_all_reduce(size: int, piece: int, whole_pieces: int, less: int) -> None:
    count = whole_pieces * piece + max(0, piece - less)
    if count * (size - 1) * 4 <= mpi._GATHERED_BYTES:
        return  # sent whole to all
    t = torch.empty(count)
    ranks = [SizesOnly(r, size, 4 * piece) for r in range(size)]
    for rank in ranks:
        rank.all_reduce("x", t, SUM)
        assert rank.received
    check(ranks)


@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(size=st.integers(2, 20), columns=st.integers(64, 500), count=st.integers(1, 2000))
def test_reduce_scatter(size: int, columns: int, count: int) -> None:
    t = torch.empty(size * count)
    ranks = [SizesOnly(r, size, 4 * columns * size) for r in range(size)]
    for rank in ranks:
        rank.reduce_scatter("x", t[:count], t, SUM)
        assert rank.received
    check(ranks)


@given(st.integers(0, 10**8), st.integers(0, 10**8), st.integers(1, 2000), st.integers(0, 1999))
@settings(max_examples=500, derandomize=True, deadline=None, database=None)
def test_no_share_is_larger_than_rank_0s_of_a_larger_piece(
    one: int, other: int, parts: int, part: int
) -> None:
    begin, end = share_bounds(min(one, other), parts, part % parts)
    assert 0 <= begin <= end <= min(one, other)
    assert end - begin <= share_bounds(max(one, other), parts, 0)[1]


def test_a_last_piece_of_which_the_last_rank_has_more_than_of_the_first() -> None:
    first, last, size = mpi.MAX_PIECE_BYTES // 4, 8_388_288, 9
    mine = [end - begin for begin, end in (share_bounds(n, size, size - 1) for n in (first, last))]
    assert mine == [931_840, 932_032]
    t = torch.empty(first + last)
    ranks = [SizesOnly(r, size, mpi.MAX_PIECE_BYTES) for r in range(size)]
    for rank in ranks:
        rank.all_reduce("x", t, SUM)
    check(ranks)
