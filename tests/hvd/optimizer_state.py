"""broadcast_parameters and broadcast_optimizer_state; see optimizer_table.py."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.hvd.behaviour import Hvd, added, data, raises
from tests.hvd.optimizer_table import (
    adamw,
    backward,
    batch,
    by_hand,
    case,
    close,
    equal_everywhere,
    net,
    plain,
    sgd,
    train,
    update,
    wrap,
)
from tests.hvd.test_properties import LAYOUTS, OURS, laid_out


def root(hvd: Hvd) -> int:
    """The last rank."""
    return int(hvd.size()) - 1


def parameters_are_the_roots(hvd: Hvd, *forms: Any) -> None:
    """Broadcast a model in these forms: its state is the root's, in the memory that it had."""

    def made(rank: int) -> Any:
        model = nn.Sequential(net(rank), nn.BatchNorm1d(3)).double()
        model(batch(rank)[0][: 2 + rank])  # buffers, one of them an integer, differ
        return model

    for form in forms:
        model, expected = made(hvd.rank()), made(root(hvd))
        before = [t.data_ptr() for t in model.state_dict().values()]
        assert hvd.broadcast_parameters(form(model), root_rank=root(hvd)) is None
        assert [t.data_ptr() for t in model.state_dict().values()] == before
        close(model, expected)
        assert all(p.requires_grad and p.is_leaf for p in model.parameters())
        if isinstance(form(model), dict):
            same_in_all(model.state_dict(), expected.state_dict())


@case()
def parameters_of_a_dict_or_a_list(hvd: Hvd) -> None:
    parameters_are_the_roots(
        hvd,
        lambda model: dict(list(model.state_dict().items())[:: -1 if hvd.rank() else 1]),
        lambda model: list(model.named_parameters()),
        lambda model: list(model.state_dict().items()),
        lambda model: list(model.parameters()),
    )


@case(stronger="generators are accepted")
def parameters_of_a_generator(hvd: Hvd) -> None:
    parameters_are_the_roots(
        hvd,
        lambda model: model.named_parameters(),
        lambda model: iter(list(model.parameters())),
        lambda model: tuple(model.parameters()),
    )


@case(stronger="what is no tensor, or has no name of its own, is refused")
def parameters_that_cannot_be_sent(hvd: Hvd) -> None:
    one = torch.ones(1)
    wrong: list[Any] = [one, "ab", {"a": one, "b": 1.0}, [("a", one), ("a", one)]]
    texts = [f"invalid params of type: {type(params)}" for params in wrong[:2]]
    texts += ["params must be tensors: b is a", "a tensor with the same name as another"]
    for params, text in zip(wrong, texts, strict=True):
        with raises(ValueError, text):
            hvd.broadcast_parameters(params, root_rank=0)


@case(stronger="tensors of every dtype and form")
def parameters_of_every_dtype(hvd: Hvd) -> None:
    def made(rank: int) -> dict[str, Tensor]:
        values = data(rank, 1, 3, 2, 2) % 3
        found = {"scalar": torch.tensor(rank), "empty": torch.empty(0, 3)}
        found["leaf"] = nn.Parameter(torch.full((2,), float(rank)))
        for dtype, layout in itertools.product(OURS, LAYOUTS):
            found[f"{dtype}.{layout}"] = laid_out(values.to(dtype), layout)
        return found

    tensors = made(hvd.rank())
    hvd.broadcast_parameters(tensors, root_rank=root(hvd))
    for name, value in made(root(hvd)).items():
        assert torch.equal(tensors[name], value), name


@case(exact=True)
def training_goes_on_from_a_checkpoint(hvd: Hvd) -> None:
    """The root resumes, the others have nothing: the recipe of every script."""
    for wraps_first in (True, False):
        model = net(hvd.rank())
        original = sgd(model.parameters())
        saved = net()
        alone = sgd(saved.parameters())
        for step in range(2):
            update(saved, alone, batch(step))
        if hvd.rank() == 0:
            model.load_state_dict(saved.state_dict())
            original.load_state_dict(alone.state_dict())
        if wraps_first:
            optimizer = hvd.DistributedOptimizer(original, model.named_parameters())
            if hvd.rank() == 0:
                optimizer.load_state_dict(alone.state_dict())
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        else:
            hvd.broadcast_optimizer_state(original, root_rank=0)
            state = original.state_dict()
            optimizer = hvd.DistributedOptimizer(original, model.named_parameters())
            optimizer.load_state_dict(state)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        train(hvd, model, optimizer, range(2, 5))
        close(model, by_hand(5))
        equal_everywhere(hvd, model)


@case()
def lbfgs_is_refused(hvd: Hvd) -> None:
    with raises(ValueError, "cannot broadcast torch.optim.LBFGS state"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(net().parameters()), root_rank=0)


@case(real="making state moves the weights", sizes=(2, 3))
def weights_move_without_state(hvd: Hvd) -> None:
    model = net()
    hvd.broadcast_optimizer_state(sgd(model.parameters()), root_rank=0)
    close(model, [p * (1 - 0.1 * 0.01) for p in net().parameters()])


@case(exact=True)
def zeros_are_left_as_gradients(hvd: Hvd) -> None:
    """Scripts read them at once, to clip them or to log their norm."""
    for make, wrapped in itertools.product((sgd, adamw, plain), (False, True)):
        model = net()
        model[0].bias.requires_grad_(False)
        optimizer = wrap(hvd, model, make) if wrapped else make(model.parameters())
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for p in model.parameters():
            assert (p.grad is not None) is p.requires_grad
            assert p.grad is None or not p.grad.any()
        backward(hvd, model, 0)  # and they can be added to
        optimizer.step()
    for kind in (torch.optim.SparseAdam, plain):
        words = nn.Embedding(5, 2, sparse=True)
        hvd.broadcast_optimizer_state(kind(words.parameters()), root_rank=0, model=words)
        grad = words.weight.grad
        assert grad is not None
        assert grad.is_sparse
        assert not grad.to_dense().any()


@case(real="without state, nothing is broadcast", sizes=(2, 3))
def rate_of_plain_sgd_stays_local(hvd: Hvd) -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=1.0 + hvd.rank())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 1.0 + hvd.rank()


def same_in_all(a: Any, b: Any) -> None:
    """Equal in every type and value; tensors in dtype, device and bits."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        same_in_all([*a.items()], [*b.items()])
    elif isinstance(a, (list, tuple)):
        for one, other in zip(a, b, strict=True):
            same_in_all(one, other)
    elif isinstance(a, Tensor):
        assert a.layout == b.layout
        torch.testing.assert_close(a.to_dense(), b.to_dense(), rtol=0, atol=0)
    else:
        assert a == b


class Point(NamedTuple):
    x: int
    y: Any


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    partial(torch.optim.SGD, lr=0.1, weight_decay=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.Adam, betas=(0.8, 0.9), weight_decay=0, amsgrad=True),
    partial(torch.optim.Adam, lr=torch.tensor(0.1), foreach=False),
    torch.optim.Adafactor,
    torch.optim.ASGD,
    partial(torch.optim.Rprop, etas=(0.4, 1.3)),
]


def made(rank: int, make: Any, steps: int) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """An optimizer that has made some steps, with options that differ between ranks."""
    torch.manual_seed(rank)
    params = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]
    params.append(nn.Parameter(torch.ones(1), requires_grad=False))
    optimizer: torch.optim.Optimizer = make([{"params": params[:1]}, {"params": params[1:]}])
    for _ in range(steps):
        for p in params[:2]:
            p.grad = torch.randn_like(p)
        optimizer.step()
    for p in params:
        p.grad = None
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * (rank + 1)
        group["extra"] = [None, (rank, {"a": 1.5}), True, Point(rank, 2)]
    return params, optimizer


def state_becomes_the_roots(
    hvd: Hvd, make: Any, steps: list[int], root: int = 0, wrapped: bool = False
) -> None:
    params, optimizer = made(hvd.rank(), make, steps[hvd.rank()])
    expected = copy.deepcopy(made(root, make, steps[root])[1].state_dict())
    if wrapped:
        state = optimizer.state_dict()
        optimizer = hvd.DistributedOptimizer(optimizer)
        optimizer.load_state_dict(state)

    def tensors() -> set[int]:
        states = optimizer.state.values()
        return {id(t) for state in states for t in state.values() if isinstance(t, Tensor)}

    before, in_place = copy.deepcopy(params), tensors()
    groups, had_state = optimizer.param_groups, bool(optimizer.state)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    same_in_all(optimizer.state_dict(), expected)
    same_in_all(params, before)
    assert all((p.grad is None) is (had_state or not p.requires_grad) for p in params)
    assert optimizer.param_groups is groups
    assert set(optimizer.state) <= set(params)
    assert tensors() == in_place or not (steps[hvd.rank()] and steps[root])
    for p in params[:2]:
        p.grad = torch.ones_like(p)
    optimizer.step()


@case(stronger="state of any optimizer, also where only some ranks have it", sizes=(2, 3))
def state_of_every_optimizer(hvd: Hvd) -> None:
    for make in OPTIMIZERS:
        for steps in ([2, 3, 1], [2, 0, 0], [0, 2, 2], [0, 0, 0]):
            state_becomes_the_roots(hvd, make, steps)
        state_becomes_the_roots(hvd, make, [0, 2, 2], root(hvd))
        for steps in ([2, 1, 3], [0, 0, 0]):
            state_becomes_the_roots(hvd, make, steps, wrapped=True)


def with_odd_state(rank: int) -> torch.optim.Optimizer:
    """An optimizer with state of every kind."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = sgd(params)
    for i, p in enumerate(params):
        optimizer.state[p] = {
            "none": None,
            "count": rank + i,
            "nested": [torch.full((2,), float(rank)), {"t": torch.full((1,), rank)}],
            "sparse": torch.eye(2).mul(rank + 1).to_sparse(),
            "bool": torch.tensor(rank == 0),
            "bf16": torch.full((2, 2), rank, dtype=torch.bfloat16).t(),
            "empty": torch.empty(0),
        }
    optimizer.state["all"] = {"total": torch.tensor(rank), "name": f"rank {rank}"}  # type: ignore
    return optimizer


@case(stronger="state of every kind", sizes=(2, 3))
def state_of_any_kind(hvd: Hvd) -> None:
    optimizer = with_odd_state(hvd.rank())
    hvd.broadcast_optimizer_state(optimizer, 0)
    expected = with_odd_state(0).state
    same_in_all([*optimizer.state.values()], [*expected.values()])


@case(stronger="ranks whose parameters do not fit all raise", sizes=(2, 3))
def state_that_does_not_fit(hvd: Hvd) -> None:
    rank = hvd.rank()
    for odd, text in (
        ([2, 3], "parameter 1 of the optimizer is (2,) on the root, (3,) on this rank"),
        ([2], "[2] on the root, [1] on this rank"),
    ):
        shapes = odd if rank == 1 else [2, 2]
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(s)) for s in shapes], lr=rank + 1)
        elsewhere = "rank 1 of the process set has an optimizer that differs from rank 0's"
        with raises(ValueError, text if rank == 1 else elsewhere):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == rank + 1


@case(stronger="all of them take a process set", sizes=(3,))
def among_members(hvd: Hvd) -> None:
    with added(hvd, 0, 2) as members:
        if not members.included():
            return
        assert hvd.broadcast_object(hvd.rank(), 2, process_set=members) == 2
        assert hvd.allgather_object(hvd.rank(), process_set=members) == [0, 2]
        (parameter,) = parameters = [nn.Parameter(torch.full((2,), float(hvd.rank())))]
        hvd.broadcast_parameters(parameters, 2, process_set=members)
        assert parameter.tolist() == [2, 2]
        optimizer = torch.optim.SGD(parameters, lr=1 + hvd.rank())
        hvd.broadcast_optimizer_state(optimizer, 2, process_set=members)
        assert optimizer.param_groups[0]["lr"] == 3
