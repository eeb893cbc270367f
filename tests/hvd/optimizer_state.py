"""broadcast_parameters and broadcast_optimizer_state; see optimizer_table.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.hvd.behaviour import Hvd, last, raises
from tests.hvd.optimizer_table import (
    Make,
    adamw,
    batch,
    by_hand,
    case,
    close,
    equal_everywhere,
    loss,
    net,
    sgd,
    shard,
    train,
    update,
    wrap,
)


def locally(hvd: Hvd, make: Make, steps: int | None = None) -> tuple[Any, Any]:
    """A model and optimizer that this rank has trained alone, differently from the others."""
    model = net(hvd.rank())
    optimizer = make(model.parameters())
    for step in range(hvd.rank() + 1 if steps is None else steps):
        update(model, optimizer, batch(step))
    return model, optimizer


def root(hvd: Hvd) -> int:
    return int(hvd.size()) - 1


@case()
def parameters_of_a_dict(hvd: Hvd) -> None:
    model = nn.Sequential(net(hvd.rank()), nn.BatchNorm1d(3)).double()
    model(batch(hvd.rank())[0][: 2 + hvd.rank()])  # buffers, one of them an integer, differ
    before = [t.data_ptr() for t in model.state_dict().values()]
    assert hvd.broadcast_parameters(model.state_dict(), root_rank=root(hvd)) is None
    assert [t.data_ptr() for t in model.state_dict().values()] == before
    expected = nn.Sequential(net(root(hvd)), nn.BatchNorm1d(3)).double()
    expected(batch(root(hvd))[0][: 2 + root(hvd)])
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@case()
def parameters_of_lists(hvd: Hvd) -> None:
    for as_list in (
        lambda model: list(model.named_parameters()),
        lambda model: list(model.state_dict().items()),
        lambda model: list(model.parameters()),
    ):
        model = net(hvd.rank())
        hvd.broadcast_parameters(as_list(model), root_rank=0)  # type: ignore[no-untyped-call]
        close(model, net(0))
        assert all(p.requires_grad and p.is_leaf for p in model.parameters())


@case(real="generators are refused")
def parameters_of_a_generator_are_refused(hvd: Hvd) -> None:
    with raises(ValueError, "invalid params of type: <class 'generator'>"):
        hvd.broadcast_parameters(net().named_parameters(), root_rank=0)


@case(stronger="generators are accepted")
def parameters_of_a_generator(hvd: Hvd) -> None:
    model = net(hvd.rank())
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    close(model, net(0))
    model = net(hvd.rank())
    hvd.broadcast_parameters(model.parameters(), root_rank=root(hvd))
    close(model, net(root(hvd)))


@case()
def parameters_of_something_else(hvd: Hvd) -> None:
    for wrong in (5, None):
        with raises(ValueError, f"invalid params of type: {type(wrong)}"):
            hvd.broadcast_parameters(wrong, root_rank=0)


@case(stronger="tensors of every dtype and form")
def parameters_of_every_dtype(hvd: Hvd) -> None:
    def made(rank: int) -> dict[str, Tensor]:
        return {
            "mask": torch.tensor([True, rank % 2 == 0]),
            "half": torch.full((3,), rank + 0.5, dtype=torch.bfloat16),
            "complex": torch.full((2,), complex(rank, 1)),
            "last": torch.arange(24.0)
            .reshape(1, 2, 3, 4)
            .mul(rank + 1)
            .to(memory_format=torch.channels_last),
            "turned": torch.arange(6.0).mul(rank + 1).reshape(2, 3).t(),
        }

    tensors = made(hvd.rank())
    hvd.broadcast_parameters(tensors, root_rank=root(hvd))
    for name, value in made(root(hvd)).items():
        assert torch.equal(tensors[name], value), name


@case(sizes=(2, 3))
def state_of_every_rank_becomes_the_roots(hvd: Hvd) -> None:
    for make in (sgd, adamw):
        model, optimizer = locally(hvd, make)
        optimizer.param_groups[0]["lr"] = 0.1 + hvd.rank()
        before = [p.detach().clone() for p in model.parameters()]
        assert hvd.broadcast_optimizer_state(optimizer, root_rank=root(hvd)) is None
        close(model, before)
        expected = net(root(hvd))
        theirs = make(expected.parameters())
        for step in range(root(hvd) + 1):
            update(expected, theirs, batch(step))
        got, wanted = optimizer.state_dict(), theirs.state_dict()
        for index, values in wanted["state"].items():
            for key, value in values.items():
                assert torch.equal(
                    torch.as_tensor(got["state"][index][key]), torch.as_tensor(value)
                )
        assert got["param_groups"][0]["lr"] == 0.1 + root(hvd)


@case()
def training_goes_on_from_a_checkpoint(hvd: Hvd) -> None:
    """The root resumes, the others have nothing: the recipe of every script."""
    whole = by_hand(2)
    for wrapped in (True, False):
        model = net(hvd.rank())
        original = sgd(model.parameters())
        if hvd.rank() == 0:
            saved = net()
            alone = sgd(saved.parameters())
            for step in range(2):
                update(saved, alone, batch(step))
            model.load_state_dict(whole.state_dict())
            original.load_state_dict(alone.state_dict())
        optimizer = original
        if wrapped:
            optimizer = hvd.DistributedOptimizer(original, model.named_parameters())
            if hvd.rank() == 0:
                optimizer.load_state_dict(alone.state_dict())
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        else:
            hvd.broadcast_optimizer_state(original, root_rank=0)
            state = original.state_dict()
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = hvd.DistributedOptimizer(original, model.named_parameters())
            optimizer.load_state_dict(state)
        train(hvd, model, optimizer, range(2, 5))
        close(model, by_hand(5))
        equal_everywhere(hvd, model)


@case()
def options_keep_their_types(hvd: Hvd) -> None:
    kinds: list[Make] = [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.AdamW(p, lr=1, betas=(0.8, 0.9), foreach=None, amsgrad=True),
        lambda p: torch.optim.Rprop(p, lr=0.1, etas=(0.4, 1.3)),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    ]
    for make in kinds:
        model, optimizer = locally(hvd, make)
        before = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        after = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        assert after == before
        for key, value in before.items():
            assert type(after[key]) is type(value), key
        for p, values in optimizer.state.items():
            for value in values.values():
                assert not isinstance(value, Tensor) or value.shape in (p.shape, ())
        loss(model, batch(0)).backward()
        optimizer.step()


@case()
def lbfgs_is_refused(hvd: Hvd) -> None:
    with raises(ValueError, "cannot broadcast torch.optim.LBFGS state"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(net().parameters()), root_rank=0)


@case(real="making state moves the weights", sizes=(2, 3))
def weights_move_without_state(hvd: Hvd) -> None:
    model = net()
    hvd.broadcast_optimizer_state(sgd(model.parameters()), root_rank=0)
    close(model, [p * (1 - 0.1 * 0.01) for p in net().parameters()])


@case()
def zeros_are_left_as_gradients(hvd: Hvd) -> None:
    """Scripts read them at once, to clip them or to log their norm."""
    for make in (sgd, adamw, lambda p: torch.optim.SGD(p, lr=0.1)):
        for wrapped in (False, True):
            model = net()
            model[0].bias.requires_grad_(False)
            optimizer = wrap(hvd, model, make) if wrapped else make(model.parameters())
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for p in model.parameters():
                assert (p.grad is not None) is p.requires_grad
                assert p.grad is None or not p.grad.any()
            loss(model, shard(hvd, 0)).backward()  # and they can be added to
            optimizer.step()


@case()
def zeros_of_sparse_gradients(hvd: Hvd) -> None:
    for kind in (torch.optim.SparseAdam, lambda p: torch.optim.SGD(p, lr=0.1)):
        model = nn.Embedding(5, 2, sparse=True)
        hvd.broadcast_optimizer_state(kind(model.parameters()), root_rank=0, model=model)
        assert model.weight.grad is not None
        assert model.weight.grad.is_sparse
        assert not model.weight.grad.to_dense().any()


@case(stronger="neither weights nor gradients change, nor does the number of steps")
def weights_stay(hvd: Hvd) -> None:
    for make in (sgd, adamw):
        for wrapped in (False, True):
            model = net()
            optimizer = wrap(hvd, model, make) if wrapped else make(model.parameters())
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            close(model, net())
            if wrapped:
                train(hvd, model, optimizer, range(3))
                close(model, by_hand(3, make))


@case(real="without state, nothing is broadcast", sizes=(2, 3))
def rate_of_plain_sgd_stays_local(hvd: Hvd) -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=1.0 + hvd.rank())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 1.0 + hvd.rank()


@case(stronger="options are broadcast without state too")
def rate_of_plain_sgd(hvd: Hvd) -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=1.0 + hvd.rank())
    hvd.broadcast_optimizer_state(optimizer, root_rank=root(hvd))
    assert optimizer.param_groups[0]["lr"] == 1.0 + root(hvd)


@case(stronger="the rate may be a tensor")
def rate_in_a_tensor(hvd: Hvd) -> None:
    rate = torch.tensor(0.1 + hvd.rank())
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    if last(hvd):
        loss(model, batch(0)).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=root(hvd))
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.1 + root(hvd))
    for values in optimizer.state.values():
        assert isinstance(values["step"], Tensor)
        assert values["step"] == 1
        assert values["step"].shape == ()
    equal_everywhere(hvd, [v["exp_avg"] for v in optimizer.state.values()])


@case(stronger="a rank with state loses it where the root has none", sizes=(2, 3))
def state_that_the_root_has_not(hvd: Hvd) -> None:
    _, optimizer = locally(hvd, sgd, steps=2 if last(hvd) else 0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert not any(state for state in optimizer.state.values())


@case(stronger="ranks whose parameters do not fit all raise", sizes=(2, 3))
def state_that_does_not_fit(hvd: Hvd) -> None:
    model = net()
    parameters = list(model.parameters())[: 3 if last(hvd) else 4]
    with raises(ValueError):
        hvd.broadcast_optimizer_state(sgd(parameters), root_rank=0)
