"""Elastic training in a world that stays the same: commits, failures, news of hosts, samplers.

The functions that take `hvd` run on every rank of a pool, under the real Horovod and under ours.
"""

from __future__ import annotations

import random
from importlib import import_module
from typing import Any

import pytest
import torch

from hvdtrain import hvd
from hvdtrain.errors import LaunchError
from hvdtrain.hvd.elastic.state import OptimizerStateHandler
from tests.hvd.pool import HvdRanks

# Horovod itself is not asked to start anew: it cannot under MPI, and with Gloo, in a world that
# stays the same, its ranks now and then meet the addresses of the world before, and abort.
OURS = [("hvd-torchrun", 2), pytest.param(("hvd-mpirun", 2), marks=pytest.mark.exhaustive)]
REAL = pytest.param(("horovod-gloo", 2), marks=pytest.mark.exhaustive)
ON_BOTH = pytest.mark.parametrize("hvd_ranks", [REAL, OURS[0]], indirect=True)
ON_OURS = pytest.mark.parametrize("hvd_ranks", OURS, indirect=True)


def common(hvd: Any) -> Any:
    """The names of horovod.common.elastic."""
    real = hvd.__name__ == "horovod.torch"
    return import_module("horovod.common.elastic" if real else "hvdtrain.hvd.elastic.common")


def make_state(hvd: Any, **more: Any) -> Any:
    """A model and an optimizer with momentum, different on every rank until they are synced."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    return hvd.elastic.TorchState(model, wrapped, step=0, **more)


def train_one(hvd: Any, state: Any) -> None:
    state.optimizer.zero_grad()
    state.model(torch.full((3, 4), float(state.step + hvd.rank()))).square().sum().backward()
    state.optimizer.step()
    state.step += 1


def weights(state: Any) -> list[float]:
    return [value for p in state.model.parameters() for value in p.flatten().tolist()]


def test_a_commit_survives_the_steps_after_a_restore() -> None:
    """An optimizer adopts the tensors that it loads, and changes them in place."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

    def step() -> Any:
        parameter.grad = torch.ones(3)
        optimizer.step()
        return optimizer.state[parameter]["momentum_buffer"].clone()

    committed = step()
    handler = OptimizerStateHandler(optimizer)
    for _ in range(2):
        step()
        handler.restore()
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], committed)


# Failures


def train_with_failures(hvd: Any, fail_at: tuple[int, ...], alone: bool = False) -> dict[str, Any]:
    """Six steps with a commit after every second. All ranks fail once before each step of
    `fail_at`, or rank 1 alone does, while the others are in it.
    """
    state = make_state(hvd)
    left, resets, starts = list(fail_at), [], []
    state.register_reset_callbacks([lambda: resets.append(("first", hvd.size()))])
    state.register_reset_callbacks([lambda: resets.append(("second", hvd.rank()))])

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any, until: int, *, times: int) -> str:
        """Train."""
        starts.append(state.step)
        while state.step < until * times:
            if left and state.step == left[0]:
                left.pop(0)
                if not alone:
                    hvd.allreduce(torch.ones(2 + hvd.rank()), name="of different shapes")
                elif hvd.rank() == 1:
                    raise common(hvd).HorovodInternalError("as if its network were gone")
            train_one(hvd, state)
            if state.step % 2 == 0:
                state.commit()
        return "done"

    assert train.__doc__ == "Train."
    result = train(state, 3, times=2)
    return {"result": result, "weights": weights(state), "resets": resets, "starts": starts}


@ON_OURS
def test_a_failure_goes_back_to_the_last_commit(hvd_ranks: HvdRanks) -> None:
    whole = hvd_ranks.run(train_with_failures, ())
    assert whole[0]["starts"] == [0]
    assert whole[0]["resets"] == []
    assert whole[0]["weights"] == whole[1]["weights"]
    # Twice at one commit: Horovod's optimizer goes on with the tensors that were saved.
    failing = hvd_ranks.run(train_with_failures, (1, 5, 5))
    for rank, outcome in enumerate(failing):
        assert outcome["result"] == "done"
        assert outcome["starts"] == [0, 0, 4, 4]
        assert outcome["resets"] == [("first", 2), ("second", rank)] * 3
        assert outcome["weights"] == whole[0]["weights"]
    for outcome in hvd_ranks.run(train_with_failures, (5,), True):
        assert outcome["starts"] == [0, 4]
        assert outcome["weights"] == whole[0]["weights"]


def raise_another(hvd: Any) -> list[Any]:
    state = make_state(hvd)

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        raise KeyError("mine")

    outcomes: list[Any] = []
    try:
        train(state)
    except KeyError as error:
        outcomes.append(str(error))
    return [*outcomes, len(common(hvd).notification_manager._listeners)]


@ON_BOTH
def test_another_error_is_the_callers(hvd_ranks: HvdRanks) -> None:
    assert hvd_ranks.run(raise_another) == [["'mine'", 0]] * 2


# News of hosts


def train_with_news(hvd: Any, kind: str, by_commit: bool) -> dict[str, Any]:
    """Six steps; rank 0 is told of a change during the third."""
    names = common(hvd)
    state = make_state(hvd, sampler=hvd.elastic.ElasticSampler(range(20)))
    starts: list[Any] = []
    resets: list[int] = []
    state.register_reset_callbacks([lambda: resets.append(state.step)])

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        starts.append(state.step)
        while state.step < 6:
            train_one(hvd, state)
            state.sampler.record_batch(0, 1)
            if state.step == 3 and len(starts) == 1 and hvd.rank() == 0:
                change = getattr(names.HostUpdateResult, kind)
                names.notification_manager.handle_hosts_updated(100, change)
                names.notification_manager.handle_hosts_updated(100, change)  # not news
            if by_commit:
                state.commit()
            else:
                state.check_host_updates()

    syncs: list[int] = []
    sync = state.sync

    def counted() -> None:
        syncs.append(state.step)
        sync()

    state.sync = counted
    train(state)
    return {
        "weights": weights(state),
        "starts": starts,
        "resets": resets,
        "syncs": syncs,
        "left": len(state.sampler),
    }


@ON_OURS
@pytest.mark.parametrize(
    ("kind", "by_commit"),
    [("added", True), ("removed", True), ("mixed", True), ("added", False), ("removed", False)],
)
def test_news_of_hosts_keep_the_state(hvd_ranks: HvdRanks, kind: str, by_commit: bool) -> None:
    """Between commits, too: Horovod sets the plain objects, but not the model, back to the last
    commit; and where hosts were only removed, it leaves the sampler to the old world.
    """
    whole = hvd_ranks.run(train_with_failures, ())
    for outcome in hvd_ranks.run(train_with_news, kind, by_commit):
        assert outcome["starts"] == [0, 3]
        assert outcome["resets"] == [3]
        if by_commit:
            assert outcome["syncs"] == ([0] if kind == "removed" else [0, 3])
        assert outcome["weights"] == whole[0]["weights"]
        assert outcome["left"] == (20 - 3 * 2) // 2


# States


def sync_and_restore(hvd: Any) -> list[Any]:
    state = make_state(hvd, epoch=10 + hvd.rank(), rates=[0.1 * (1 + hvd.rank())])
    found = [state.epoch, weights(state)]
    state.sync()
    found += [state.epoch, state.rates, weights(state)]
    state.epoch, state.step = 20, 3
    state.commit()
    train_one(hvd, state)
    state.epoch = 30
    state.restore()
    return [*found, state.epoch, state.step, weights(state)]


@ON_BOTH
def test_sync_takes_rank_zeros_and_restore_the_commits(hvd_ranks: HvdRanks) -> None:
    first, second = hvd_ranks.run(sync_and_restore)
    assert (first[0], second[0]) == (10, 11)
    assert first[1] != second[1]
    assert first[2:] == second[2:] == [10, [0.1], first[1], 20, 3, first[1]]


def assign_and_register(hvd: Any) -> list[Any]:
    module = import_module(f"{hvd.__name__}.elastic.state")

    class ListHandler(module.StateHandler):  # type: ignore[misc, name-defined]
        def save(self) -> None:
            self.saved = list(self.value)

        def restore(self) -> None:
            self.value[:] = self.saved

        def sync(self) -> None:
            self.value[:] = hvd.broadcast_object(self.value, name="list")

    before = module.get_handler_registry()
    module.set_handler_registry([*before, (list, ListHandler)])
    try:
        state = make_state(hvd, ranks=[hvd.rank()])
    finally:
        module.set_handler_registry(before)
    state.sync()
    state.ranks.append(5)
    state.save()
    state.ranks.append(6)
    state.model = other = torch.nn.Linear(4, 2)
    expected = other.weight.tolist()
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    return [state.ranks, state.model is other and other.weight.tolist() == expected]


@ON_BOTH
def test_own_handlers_and_assigned_modules_are_saved(hvd_ranks: HvdRanks) -> None:
    assert hvd_ranks.run(assign_and_register) == [[[0, 5], True]] * 2


# Samplers


def sample(hvd: Any, total: int, shuffle: bool, seed: int, epoch: int, done: int) -> list[Any]:
    sampler = hvd.elastic.ElasticSampler(range(total), shuffle, seed)
    sampler.set_epoch(epoch)
    for batch in range(done):
        sampler.record_batch(batch, 3)
    state = sampler.state_dict()
    other = hvd.elastic.ElasticSampler(range(total), shuffle, seed)
    other.load_state_dict(state)
    return [state, len(sampler), list(sampler), len(other), list(other)]


def share(indices: list[int], rank: int) -> list[int]:
    """What a rank of two gets: every other index, the first ones again where they are odd."""
    return (indices + indices[: len(indices) % 2])[rank::2]


@ON_BOTH
@pytest.mark.parametrize(
    ("total", "shuffle", "seed", "epoch", "done"),
    [(20, True, 0, 0, 0), (21, True, 7, 3, 2), (13, False, 0, 1, 1), (11, True, 0, 0, 9)],
)
def test_the_samplers_order_is_horovods(
    hvd_ranks: HvdRanks, total: int, shuffle: bool, seed: int, epoch: int, done: int
) -> None:
    order = list(range(total))
    if shuffle:
        random.Random(seed + epoch).shuffle(order)
    state = {"epoch": epoch, "processed_num": done * 3 * 2}
    for rank, got in enumerate(hvd_ranks.run(sample, total, shuffle, seed, epoch, done)):
        whole, left = share(order, rank), share(order[done * 3 * 2 :], rank)
        assert got == [state, len(whole), whole, len(left), left]


@pytest.mark.exhaustive  # three ranks
@pytest.mark.parametrize("hvd_ranks", [("hvd-torchrun", 3)], indirect=True)
def test_fewer_samples_left_than_ranks(hvd_ranks: HvdRanks) -> None:
    """Horovod fails here."""
    assert [found[2] for found in hvd_ranks.run(sample, 1, True, 0, 0, 0)] == [[0]] * 3


def test_an_elastic_job_of_horovodrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    with pytest.raises(LaunchError, match="start an elastic job by hvdrun, which has the options"):
        hvd.init()
