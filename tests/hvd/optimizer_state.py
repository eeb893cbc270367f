"""broadcast_parameters and broadcast_optimizer_state; see optimizer_table.py."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.hvd.behaviour import Hvd, raises
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
    for kind in (iter, tuple):
        model = net(hvd.rank())
        hvd.broadcast_parameters(kind(model.parameters()), root_rank=root(hvd))
        close(model, net(root(hvd)))


@case()
def parameters_of_something_else(hvd: Hvd) -> None:
    for wrong in (5, None):
        with raises(ValueError, f"invalid params of type: {type(wrong)}"):
            hvd.broadcast_parameters(wrong, root_rank=0)


@case(stronger="what is no tensor, or has no name of its own, is refused")
def parameters_that_cannot_be_sent(hvd: Hvd) -> None:
    one = torch.ones(1)
    wrong: list[Any] = [one, "ab", {"a": one, "b": 1.0}, [("a", one), ("a", one)]]
    texts = [f"invalid params of type: {type(params)}" for params in wrong[:2]]
    texts += ["params must be tensors: b is a", "two of params have the same name: a"]
    for params, text in zip(wrong, texts, strict=True):
        with raises(ValueError, text):
            hvd.broadcast_parameters(params, root_rank=0)


@case()
def parameters_in_any_order(hvd: Hvd) -> None:
    state = {name: torch.full((2,), hvd.rank() + ord(name)) for name in "abc"}
    if hvd.rank():
        state = dict(reversed(state.items()))
    hvd.broadcast_parameters(state, root_rank=0)
    assert all((value == ord(name)).all() for name, value in state.items())


@case(stronger="tensors of every dtype and form")
def parameters_of_every_dtype(hvd: Hvd) -> None:
    def made(rank: int) -> dict[str, Tensor]:
        return {
            "mask": torch.tensor([True, rank % 2 == 0]),
            "half": torch.full((3,), rank + 0.5, dtype=torch.bfloat16),
            "complex": torch.full((2,), complex(rank, 1)),
            "int16": torch.full((2,), rank, dtype=torch.int16),
            "scalar": torch.tensor(rank),
            "empty": torch.empty(0, 3),
            "leaf": nn.Parameter(torch.full((2,), float(rank))),
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


def same_in_all(a: Any, b: Any) -> None:
    """Equal in every type and value; tensors in dtype, device and bits."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        same_in_all(list(a.values()), list(b.values()))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same_in_all(one, other)
    elif isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    else:
        assert a == b


class Point(NamedTuple):
    x: int
    y: Any


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"betas": (0.8, 0.9), "weight_decay": 0, "amsgrad": True}),
    "tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.1), "foreach": False}),
    "AdamW": (torch.optim.AdamW, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.1}),
    "Rprop": (torch.optim.Rprop, {"etas": (0.4, 1.3)}),
}


def made(rank: int, name: str, steps: int) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """An optimizer that has made some steps, with options that differ between ranks."""
    torch.manual_seed(rank)
    params = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4)), nn.Parameter(
        torch.ones(1), requires_grad=False)]  # fmt: skip
    cls, options = OPTIMIZERS[name]
    optimizer: torch.optim.Optimizer = cls(
        [{"params": params[:1]}, {"params": params[1:]}], **options
    )
    for _ in range(steps):
        for p in params[:2]:
            p.grad = torch.randn_like(p)
        optimizer.step()
    for p in params:
        p.grad = None
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"] * (rank + 1)
        else:
            group["lr"] = type(group["lr"])(group["lr"] * (rank + 1))
        group["extra"] = [None, (rank, {"a": 1.5}), True, Point(rank, 2)]
    return params, optimizer


def state_becomes_the_roots(
    hvd: Hvd, name: str, steps: list[int], wrapped: bool, root: int
) -> None:
    params, optimizer = made(hvd.rank(), name, steps[hvd.rank()])
    expected = pickle.loads(pickle.dumps(made(root, name, steps[root])[1].state_dict()))
    if wrapped:
        state = optimizer.state_dict()
        names = [(f"p{i}", p) for i, p in enumerate(params)]
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names)
        optimizer.load_state_dict(state)
    before = [p.detach().clone() for p in params]
    tensors = {id(t) for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)}
    groups, had_state = optimizer.param_groups, bool(optimizer.state)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    same_in_all(optimizer.state_dict(), expected)
    same_in_all(
        params, [nn.Parameter(b, p.requires_grad) for b, p in zip(before, params, strict=True)]
    )
    assert all((p.grad is None) is (had_state or not p.requires_grad) for p in params)
    assert optimizer.param_groups is groups
    assert set(optimizer.state) <= set(params)
    if steps[hvd.rank()] and steps[root]:  # in place
        now = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        assert {id(t) for t in now} == tensors
    for p in params[:2]:
        p.grad = torch.ones_like(p)
    optimizer.step()


@case(stronger="state of any optimizer, also where only some ranks have it", sizes=(2, 3))
def state_of_every_optimizer(hvd: Hvd) -> None:
    for name in OPTIMIZERS:
        for steps in ([2, 3, 1], [2, 0, 0], [0, 2, 2], [0, 0, 0]):
            state_becomes_the_roots(hvd, name, steps, False, 0)
        state_becomes_the_roots(hvd, name, [0, 2, 2], False, root(hvd))


@case(stronger="state of any wrapped optimizer", sizes=(2, 3))
def state_of_every_wrapped_optimizer(hvd: Hvd) -> None:
    for name in ("SGD", "momentum", "Adam", "tensor lr"):
        for steps in ([2, 1, 3], [2, 0, 0], [0, 2, 0], [0, 0, 0]):
            state_becomes_the_roots(hvd, name, steps, True, 0)


class Odd(torch.optim.Optimizer):
    """With state of every kind."""

    def __init__(self, params: Any, rank: int) -> None:
        super().__init__(params, {"lr": 1.0})
        for i, p in enumerate(self.param_groups[0]["params"]):
            self.state[p] = {
                "none": None,
                "count": rank + i,
                "nested": [torch.full((2,), float(rank)), {"t": torch.full((1,), rank)}],
                "sparse": torch.eye(2).mul(rank + 1).to_sparse(),
                "bool": torch.tensor(rank == 0),
                "bf16": torch.full((2, 2), rank, dtype=torch.bfloat16).t(),
                "empty": torch.empty(0),
            }
        self.state["all"] = {"total": torch.tensor(rank), "name": f"rank {rank}"}  # type: ignore


@case(stronger="state of every kind", sizes=(2, 3))
def state_of_any_kind(hvd: Hvd) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = Odd(params, hvd.rank())
    hvd.broadcast_optimizer_state(optimizer, 0)
    expected = Odd(params, 0)
    for key, value in expected.state.items():
        mine = dict(optimizer.state[key])
        for name in ("sparse",) if isinstance(key, Tensor) else ():
            mine[name], value[name] = mine[name].to_dense(), value[name].to_dense()
        same_in_all(mine, dict(value))
    assert set(optimizer.state) == set(expected.state)


@case(stronger="ranks whose parameters do not fit all raise", sizes=(2, 3))
def state_that_does_not_fit(hvd: Hvd) -> None:
    rank = hvd.rank()
    here = ["parameter 1 of the optimizer is (2,) on the root, (3,) on this rank"]
    here += ["[2] on the root, [1] on this rank"]
    for shapes, text in zip(
        ([2, 3 if rank == 1 else 2], [2] * (2 - (rank == 1))), here, strict=True
    ):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(s)) for s in shapes], lr=rank + 1)
        elsewhere = "the optimizer of rank 1 of the set does not fit that of 0"
        with raises(ValueError, text if rank == 1 else elsewhere):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == rank + 1


@case(stronger="all of them take a process set", sizes=(3,), uneven=True)
def among_members(hvd: Hvd) -> None:
    members = hvd.add_process_set([0, 2])
    if members.included():
        assert hvd.broadcast_object(hvd.rank(), 2, process_set=members) == 2
        assert hvd.allgather_object(hvd.rank(), process_set=members) == [0, 2]
        t = torch.full((2,), float(hvd.rank()))
        hvd.broadcast_parameters([t], 2, process_set=members)
        assert t.tolist() == [2, 2]
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1 + hvd.rank())
        hvd.broadcast_optimizer_state(optimizer, 2, process_set=members)
        assert optimizer.param_groups[0]["lr"] == 3
    hvd.remove_process_set(members)
