"""The contract, on live ranks of every backend at 1, 2 and 3 ranks."""

from __future__ import annotations

import pytest

from tests.backends import contract
from tests.conftest import EVERY_ARM
from tests.ranks import Raised, Ranks

pytestmark = pytest.mark.parametrize("ranks", EVERY_ARM, indirect=True)


def test_ranks_are_in_order_and_described(ranks: Ranks) -> None:
    found = ranks.run(contract.world_is_consistent)
    assert [item["rank"] for item in found] == list(range(ranks.n))
    about = found[0]["about"]
    assert isinstance(about, dict)
    assert about["name"] == ranks.arm.backend


def test_all_reduce(ranks: Ranks) -> None:
    ranks.run(contract.all_reduce)


def test_all_reduce_shapes(ranks: Ranks) -> None:
    ranks.run(contract.all_reduce_shapes)


def test_bad_ops(ranks: Ranks) -> None:
    for integers, unknown in ranks.run(contract.bad_ops):
        assert "mean of integers" in integers
        assert "unknown op 'product'" in unknown


def test_broadcast_from_every_root(ranks: Ranks) -> None:
    for root in range(ranks.n):
        ranks.run(contract.broadcast, root)


def test_objects(ranks: Ranks) -> None:
    for root in range(ranks.n):
        ranks.run(contract.objects, root)


def test_errors_are_shared(ranks: Ranks) -> None:
    """That of the lowest rank, if several fail."""
    for first in {0, ranks.n - 1}:
        outcomes = set(ranks.run(contract.share_errors, first))
        prefix = f"rank {first}: " if first > 0 else ""
        assert outcomes == {(f"{prefix}the file of rank {first} is not here", True)}


def test_prepare_makes_equal(ranks: Ranks) -> None:
    ranks.run(contract.prepare_makes_equal)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_means(ranks: Ranks, micro_batches: int) -> None:
    ranks.run(contract.gradients_are_means, micro_batches)


def test_tensor_hooks_run_once(ranks: Ranks) -> None:
    ranks.run(contract.tensor_hooks_run_once)


def test_sparse_gradients(ranks: Ranks) -> None:
    ranks.run(contract.sparse_gradients)


def test_state_loads_after_prepare(ranks: Ranks) -> None:
    ranks.run(contract.state_loads_after_prepare)


def test_unused_parameters_are_named(ranks: Ranks) -> None:
    for text in ranks.run(contract.unused_parameter):
        assert "parts.idle.weight, parts.idle.bias" in text


def test_unused_parameters_may_count_as_zero(ranks: Ranks) -> None:
    ranks.run(contract.unused_as_zero)


@pytest.mark.parametrize("policy", ["broadcast", "average", "local"])
def test_buffers_follow_their_policy(ranks: Ranks, policy: str) -> None:
    ranks.run(contract.buffers_follow, policy)


def test_different_models_are_an_error(ranks: Ranks) -> None:
    texts = ranks.run(contract.different_models)
    if ranks.n > 1:
        assert "rank 1 has ('weight', (4, 2)" in texts[0]
        assert "rank 0 has ('weight', (3, 2)" in texts[1]


def test_channels_last_survives_the_broadcast(ranks: Ranks) -> None:
    ranks.run(contract.channels_last)


def test_unused_in_the_last_micro_batch(ranks: Ranks) -> None:
    """DDP cannot average that; it must say so, not step with the ranks apart."""
    for said in ranks.run(contract.unused_in_the_last_micro_batch):
        if ranks.arm.backend == "ddp":
            assert "in the last micro-batch of a step: parts.idle.weight" in said
        else:
            assert said == "averaged"


def test_parameters_of_one_but_not_the_other(ranks: Ranks) -> None:
    for foreign, left_out in ranks.run(contract.parameters_of_one_but_not_the_other):
        assert "1 parameters that are not the model's" in foreign
        assert "2 parameters of the model: 1.weight, 1.bias" in left_out


def test_two_models(ranks: Ranks) -> None:
    ranks.run(contract.two_models)


def test_sync_batch_norm(ranks: Ranks) -> None:
    """torch's layer would silently be plain BatchNorm, or crash, on CPUs."""
    ranks.run(contract.sync_batch_norm)


def test_sync_batch_norm_without_running_statistics(ranks: Ranks) -> None:
    ranks.run(contract.sync_batch_norm_without_running_statistics)


def test_sync_batch_norm_of_uneven_batches(ranks: Ranks) -> None:
    ranks.run(contract.sync_batch_norm_of_uneven_batches)


def test_state_of_any_kind(ranks: Ranks) -> None:
    ranks.run(contract.state_of_any_kind)


def test_the_pool_reports_an_exception(ranks: Ranks) -> None:
    """The pool itself: a failure on the ranks must reach the test."""
    outcomes = ranks.outcomes(fails)
    assert [out.text for out in outcomes if isinstance(out, Raised)] == ["on purpose"] * ranks.n


def fails(backend: object) -> None:
    raise KeyError("on purpose") if backend is None else ValueError("on purpose")
