"""Local SGD and DiLoCo: the wrapper of an optimizer, in a loop of its own on live ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

from hvdtrain import Backend, Loader
from hvdtrain.optim.local_sgd import LocalSGD
from tests.methods.arms import TWO, on, rest
from tests.parity import reference
from tests.parity.reference import State
from tests.ranks import Ranks
from tests.runs import snapshot

STEPS = 10

on_live_ranks = on(("ddp-torchrun", 2), *rest(("compat-torchrun", 3), ("horovod-mpi", 3)))


def words_of(batch: Any) -> Tensor:
    """Return two words of a table for each sample: in each step the ranks have other rows."""
    words: Tensor = batch[0].flatten(1)[:, :2].abs() * 1000
    return words.long() % 300


def make(kind: str) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor]]:
    torch.manual_seed(1)
    if kind == "dense":
        return reference.make_model().double(), lambda net, batch: reference.loss_of(net, *batch)
    model = nn.Sequential(nn.EmbeddingBag(300, 4, sparse=True), nn.Linear(4, 3)).double()
    return model, lambda net, batch: net(words_of(batch)).square().mean()


def batches(backend: Backend) -> Iterable[Any]:
    """Return the batches of some steps on this rank."""
    data = TensorDataset(*(t.double() for t in reference.make_data().tensors))
    return islice(Loader(backend, data, 2), STEPS)


def trained(
    backend: Backend, /, kind: str, every: int, resume_at: int = -1, **options: Any
) -> tuple[State, int]:
    """Train some steps; return the weights, and how many elements were reduced. `resume_at`: the
    step after which all is made anew, with the state.
    """

    def made() -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor], nn.Module, Any]:
        model, loss_of = make(kind)
        prepared = backend.prepare(model, SGD(model.parameters(), lr=0.02), gradients="local")
        optimizer = LocalSGD(prepared[1], model, backend, every, **options)
        return model, loss_of, prepared[0], optimizer

    model, loss_of, net, optimizer = made()
    with mock.patch.object(backend, "all_reduce", wraps=backend.all_reduce) as reduce:
        for step, batch in enumerate(batches(backend)):
            if step == resume_at:
                states = model.state_dict(), optimizer.state_dict()
                model, loss_of, net, optimizer = made()
                model.load_state_dict(states[0])
                optimizer.load_state_dict(states[1])
            with backend.gradients(optimizer):
                loss_of(net, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
    sizes = (call.args[0].numel() for call in reduce.mock_calls)
    return snapshot(model), sum(n for n in sizes if n > 100)


assert_close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


def by_hand(backend: Backend, /, kind: str, every: int) -> tuple[State, State]:
    """Return the weights of the wrapper, and those of a loop whose ranks step alone."""
    mine, _ = trained(backend, kind, every)
    twin, loss_of = make(kind)
    optimizer = SGD(twin.parameters(), lr=0.02)
    for step, batch in enumerate(batches(backend), 1):
        optimizer.zero_grad()
        loss_of(twin, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % every == 0 or step == STEPS:
            for p in twin.parameters():
                p.data.copy_(backend.all_reduce(p.data, "mean"))
    return mine, snapshot(twin)


@on_live_ranks
@pytest.mark.parametrize(("kind", "every"), [("dense", 3), ("sparse", 1)])
def test_the_average_of_ranks_that_step_alone(ranks: Ranks, kind: str, every: int) -> None:
    """Windows of three steps, and the last one, which the end of the run cuts short."""
    for mine, own in ranks.run(by_hand, kind, every):
        assert_close(mine, own)


@TWO
def test_an_outer_step_of_rate_one_is_the_average(ranks: Ranks) -> None:
    plain, _ = ranks.run(trained, "dense", every=3)[0]
    diloco, _ = ranks.run(trained, "dense", every=3, outer=partial(SGD, lr=1.0))[0]
    assert_close(diloco, plain)
    outer = partial(SGD, lr=1.0, momentum=0.9, nesterov=True)
    nesterov, _ = ranks.run(trained, "dense", every=3, outer=outer)[0]
    assert any(not torch.equal(t, plain[name]) for name, t in nesterov.items())
    resumed, _ = ranks.run(trained, "dense", every=3, resume_at=6, outer=outer)[0]
    assert_close(resumed, nesterov)


@TWO
def test_fewer_elements_are_sent(ranks: Ranks) -> None:
    elements = 4 * 9 + 4 + 64 * 16 + 16 + 16 * 3 + 3
    for every, averages in ((4, 3), (16, 1)):
        assert ranks.run(trained, "dense", every=every)[0][1] == averages * elements
