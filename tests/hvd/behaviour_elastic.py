"""Elastic training in a world that stays the same: commits, failures, news of hosts, samplers; see
behaviour.py.
"""

from __future__ import annotations

import random
from functools import partial
from importlib import import_module
from typing import Any

import torch

from tests.hvd.behaviour import Hvd, case, is_real, raises

# Horovod itself is not asked to start anew: it cannot under MPI, and with Gloo, in a world that
# stays the same, its ranks now and then meet the addresses of the world before, and abort.
again = partial(case, stronger="a world of the same ranks begins anew", sizes=(2,))
on_both = partial(case, arms=["hvd-", "horovod-gloo"], sizes=(2,))


def common(hvd: Hvd) -> Any:
    """The names of horovod.common.elastic."""
    return import_module(
        "horovod.common.elastic" if is_real(hvd) else "hvdtrain.hvd.elastic.common"
    )


def make_state(hvd: Hvd, **more: Any) -> Any:
    """A model and an optimizer with momentum, different on every rank until they are synced."""
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    return hvd.elastic.TorchState(model, wrapped, step=0, **more)


def train_one(hvd: Hvd, state: Any) -> None:
    state.optimizer.zero_grad()
    state.model(torch.full((3, 4), float(state.step + hvd.rank()))).square().sum().backward()
    state.optimizer.step()
    state.step += 1


def weights(state: Any) -> list[float]:
    return [value for p in state.model.parameters() for value in p.flatten().tolist()]


def train_with_failures(hvd: Hvd, fail_at: tuple[int, ...], alone: bool = False) -> list[Any]:
    """Six steps with a commit after every second. All ranks fail once before each step of
    `fail_at`, or rank 1 alone does, while the others are in it. Return the weights, where it began,
    and what was reset.
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
    assert train(state, 3, times=2) == "done"
    return [weights(state), starts, resets]


@again()
def a_failure_goes_back_to_the_last_commit(hvd: Hvd) -> None:
    """Twice at one commit, too: Horovod's optimizer goes on with the tensors that were saved."""
    whole = train_with_failures(hvd, ())
    assert hvd.allgather_object(whole) == [[whole[0], [0], []]] * 2
    reset = [("first", 2), ("second", hvd.rank())]
    for fail_at, alone, starts in (((1, 5, 5), False, [0, 0, 4, 4]), ((5,), True, [0, 4])):
        expected = [whole[0], starts, reset * len(fail_at)]
        assert train_with_failures(hvd, fail_at, alone) == expected


@on_both()
def another_error_is_the_callers(hvd: Hvd) -> None:
    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        raise KeyError("mine")

    with raises(KeyError, "mine"):
        train(make_state(hvd))
    assert not common(hvd).notification_manager._listeners


def train_with_news(hvd: Hvd, kind: str, by_commit: bool) -> list[Any]:
    """Six steps; rank 0 is told of a change during the third. Return the weights, where it began,
    was reset and synced, and how many samples are left.
    """
    names = common(hvd)
    state = make_state(hvd, sampler=hvd.elastic.ElasticSampler(range(20)))
    starts, resets, syncs, sync = [], [], [], state.sync
    state.register_reset_callbacks([lambda: resets.append(state.step)])

    @hvd.elastic.run  # type: ignore[untyped-decorator]
    def train(state: Any) -> None:
        starts.append(state.step)
        while state.step < 6:
            train_one(hvd, state)
            state.sampler.record_batch(0, 1)
            if state.step == 3 and len(starts) == 1 and hvd.rank() == 0:
                change = getattr(names.HostUpdateResult, kind)
                for _ in range(2):  # the second time it is not news
                    names.notification_manager.handle_hosts_updated(100, change)
            if by_commit:
                state.commit()
            else:
                state.check_host_updates()

    def counted() -> None:
        syncs.append(state.step)
        sync()

    state.sync = counted
    train(state)
    return [weights(state), starts, resets, syncs, len(state.sampler)]


@again()
def news_of_hosts_keep_the_state(hvd: Hvd) -> None:
    """Between commits, too: Horovod sets the plain objects, but not the model, back to the last
    commit; and where hosts were only removed, it leaves the sampler to the old world.
    """
    whole = train_with_failures(hvd, ())[0]
    for kind, by_commit in (
        *(("added", True), ("removed", True), ("mixed", True)),
        *(("added", False), ("removed", False)),
    ):
        *found, syncs, left = train_with_news(hvd, kind, by_commit)
        assert found == [whole, [0, 3], [3]]
        if by_commit:
            assert syncs == ([0] if kind == "removed" else [0, 3])
        assert left == (20 - 3 * 2) // 2


@on_both()
def sync_takes_rank_zeros_and_restore_the_commits(hvd: Hvd) -> None:
    state = make_state(hvd, epoch=10 + hvd.rank(), rates=[0.1 * (1 + hvd.rank())])
    first, second = hvd.allgather_object(weights(state))
    assert first != second
    state.sync()
    assert (state.epoch, state.rates, weights(state)) == (10, [0.1], first)
    state.epoch, state.step = 20, 3
    state.commit()
    train_one(hvd, state)
    state.epoch = 30
    state.restore()
    assert (state.epoch, state.step, weights(state)) == (20, 3, first)


@on_both()
def own_handlers_and_assigned_modules_are_saved(hvd: Hvd) -> None:
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
    assert state.ranks == [0, 5]
    assert state.model is other
    assert other.weight.tolist() == expected


@on_both()
def the_samplers_order(hvd: Hvd) -> None:
    """A rank of two gets every other index, the first ones again where they are odd."""
    for total, shuffle, seed, epoch, done in (
        *((20, True, 0, 0, 0), (21, True, 7, 3, 2)),
        *((13, False, 0, 1, 1), (11, True, 0, 0, 9)),
    ):
        sampler, other = (hvd.elastic.ElasticSampler(range(total), shuffle, seed) for _ in range(2))
        sampler.set_epoch(epoch)
        for batch in range(done):
            sampler.record_batch(batch, 3)
        state = sampler.state_dict()
        assert state == {"epoch": epoch, "processed_num": done * 3 * 2}
        other.load_state_dict(state)
        order = list(range(total))
        if shuffle:
            random.Random(seed + epoch).shuffle(order)
        for each, indices in ((sampler, order), (other, order[done * 3 * 2 :])):
            share = (indices + indices[: len(indices) % 2])[hvd.rank() :: 2]
            assert [len(each), *each] == [len(share), *share]


@case(stronger="fewer samples may be left than there are ranks", sizes=(3,))
def fewer_samples_left_than_ranks(hvd: Hvd) -> None:
    assert list(hvd.elastic.ElasticSampler(range(1))) == [0]
