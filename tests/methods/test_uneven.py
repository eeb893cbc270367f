"""One meaning of --uneven everywhere: drop, pad, join, error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain import shard_bounds
from tests.messages import Message
from tests.methods.arms import EVERYWHERE, TWO
from tests.methods.data_runs import Regression, assert_is_one_process, refusal, shuffled, train
from tests.ranks import Ranks
from tests.runs import Values, run_json

quick = settings(max_examples=200, deadline=None, database=None)


@quick
@given(num=st.integers(0, 10**12), size=st.integers(1, 300))
def test_shard_bounds_lose_nothing(num: int, size: int) -> None:
    bounds = [shard_bounds(num, rank, size) for rank in range(size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num
    assert all(before[1] == after[0] for before, after in zip(bounds, bounds[1:], strict=False))
    lengths = [end - start for start, end in bounds]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_shard_bounds_of_no_rank() -> None:
    for num, rank in ((3, 2), (-1, 0)):
        with pytest.raises(ValueError, match=f"no part of {num} items for rank {rank} of 2"):
            shard_bounds(num, rank, 2)


@EVERYWHERE
@pytest.mark.parametrize(("accumulate", "rest"), [(1, 1), (2, 2), (2, 5)])
def test_join_is_one_process_on_the_whole_batch(
    ranks: Ranks, accumulate: int, rest: int, tmp_path: Path
) -> None:
    """Also if some ranks have no sample in the last batch."""
    span = 4 * ranks.n
    num = 2 * span + min(rest, span - 1)
    task, batches = Regression(num), shuffled(num, span * accumulate)
    found = ranks.run(train, task, tmp_path, accumulate=accumulate, uneven="join")
    assert_is_one_process(found, task, batches, tmp_path)
    bounds = (shard_bounds(num - 2 * span, rank, ranks.n) for rank in range(ranks.n))
    ledger = run_json(tmp_path)["ledger"]
    assert ledger["samples_by_rank"] == [2 * 4 + end - start for start, end in bounds]
    assert ledger["leftover"] == 0


@TWO
def test_a_sample_of_weight_0_changes_no_statistics(ranks: Ranks, tmp_path: Path) -> None:
    """17 samples in steps of 8: rank 1 takes part in the last step with weight 0."""
    task = Regression(17, conv=True)
    found = ranks.run(train, task, tmp_path, uneven="join", buffers="local")
    counts = [int(rank["buffers"]["2.num_batches_tracked"]) for rank in found]
    assert counts == [2 * 3, 2 * 2]
    assert torch.equal(found[0]["weights"], found[1]["weights"])


@TWO
def test_error_refuses_before_training(ranks: Ranks, tmp_path: Path, message: Message) -> None:
    message(refusal(ranks, Regression(25), tmp_path / "run", uneven="error"))
    assert not (tmp_path / "run").exists()
    assert "digest" in ranks.run(train, Regression(24), tmp_path / "even", uneven="error")[0]


@TWO
def test_join_and_sync_bn_need_a_sample_on_each_rank(
    ranks: Ranks, tmp_path: Path, message: Message
) -> None:
    changes: Values = {"uneven": "join", "sync_bn": True}
    message(refusal(ranks, Regression(17, conv=True), tmp_path / "run", **changes))
    assert "digest" in ranks.run(train, Regression(18, conv=True), tmp_path / "two", **changes)[0]
