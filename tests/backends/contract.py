"""What every backend must do at any world size: functions that run on live ranks."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from hvdtrain import Backend
from hvdtrain.backends.base import OPS
from hvdtrain.errors import InputError, WorldMismatch
from tests.runs import Values, bits_of
from tests.transports.features import Net

CONTRACT: list[Callable[[Backend], None]] = []


def in_contract(function: Callable[[Backend], None]) -> Callable[[Backend], None]:
    """Make a function a row of the table that test_contract.py runs."""
    CONTRACT.append(function)
    return function


@in_contract
def all_reduce(backend: Backend) -> None:
    """Every operation, on a tensor that stays as it was; the numerics are those of transports."""
    rank, size = backend.world.rank, backend.world.size
    values = torch.stack([torch.arange(5.0) - 2 + r for r in range(size)])
    expected = {
        "sum": values.sum(0),
        "mean": values.mean(0),
        "min": values.amin(0),
        "max": values.amax(0),
    }
    for op, dtype in itertools.product(OPS, (torch.float32, torch.bfloat16, torch.int64)):
        mine = values[rank].to(dtype)
        if (op, dtype) == ("mean", torch.int64):
            with pytest.raises(ValueError, match="mean of integers"):
                backend.all_reduce(mine, op)
            continue
        result = backend.all_reduce(mine, op)
        torch.testing.assert_close(result, expected[op].to(dtype), rtol=1e-2, atol=1e-2)
        assert result.data_ptr() != mine.data_ptr()
        assert torch.equal(mine, values[rank].to(dtype)), f"{op} changed its input"
    strided = torch.ones(4, 6).t()[::2]
    assert torch.equal(backend.all_reduce(strided, "sum"), torch.full((3, 4), float(size)))
    with pytest.raises(ValueError, match="unknown op 'product'"):
        backend.all_reduce(strided, "product")  # type: ignore[arg-type]


@in_contract
def broadcast_from_every_root(backend: Backend) -> None:
    for root in range(backend.world.size):
        for dtype in (torch.float32, torch.int64, torch.bool):
            t = torch.full((3, 2), backend.world.rank).to(dtype)
            assert backend.broadcast_(t, root) is t
            assert torch.equal(t, torch.full((3, 2), root).to(dtype)), dtype


@in_contract
def objects(backend: Backend) -> None:
    rank, size = backend.world.rank, backend.world.size
    # Sizes, and types, that differ between ranks
    assert backend.all_gather_object("x" * rank) == ["x" * r for r in range(len(backend.hosts))]
    mixed = [None if r else {"r": r} for r in range(size)]
    assert backend.all_gather_object(mixed[rank]) == mixed
    for root in range(size):
        assert backend.broadcast_object(mixed[rank], root) == mixed[root]
    backend.barrier()


@in_contract
def errors_are_shared(backend: Backend) -> None:
    """That of the lowest rank, if several fail."""
    rank, size = backend.world.rank, backend.world.size

    def fail_from(first: int) -> None:
        with backend.share_errors():
            if rank >= first:
                raise InputError(f"the file of rank {rank} is not here")

    for first in {0, size - 1}:
        with pytest.raises(InputError) as caught:
            fail_from(first)
        prefix = f"rank {first}: " if first > 0 else ""
        assert str(caught.value) == f"{prefix}the file of rank {first} is not here"
        assert caught.value.on_all_ranks


def small_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


Loss = Callable[[Any], Any]
"""The loss of a net, with which it is called."""


def total_of(x: torch.Tensor) -> Loss:
    return lambda net: net(x).sum()


class Prepared:
    """What the backend makes of a model and of SGD for it."""

    def __init__(self, backend: Backend, model: nn.Module, **options: Any) -> None:
        sgd = torch.optim.SGD(model.parameters(), **{"lr": 0.1, **options})
        self.backend, self.model = backend, model
        self.net: Any
        self.optimizer: Any
        self.net, self.optimizer = backend.prepare(model, sgd)
        self.mean = (backend.world.size + 1) / 2
        """Of the gradients of `of_this_rank` over all ranks."""
        self.of_this_rank = total_of(torch.full((1, 1), backend.world.rank + 1.0))
        """The loss of an input that is the rank's number, counted from 1."""

    def backward(self, *losses: Loss) -> Values:
        """Compute the gradients of a step of so many micro-batches, by default one of this rank;
        return them by name.
        """
        for number, loss in enumerate(losses or [self.of_this_rank], 1):
            with self.backend.gradients(self.optimizer, last=number == max(len(losses), 1)):
                loss(self.net).backward()
        return {name: p.grad for name, p in self.model.named_parameters()}

    def step(self, *losses: Loss) -> Values:
        """Make a step of so many micro-batches; return its gradients by name."""
        gradients = self.backward(*losses)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return gradients


class Moments(NamedTuple):
    mean: torch.Tensor
    steps: int


@in_contract
def prepare_makes_equal(backend: Backend) -> None:
    """Weights, buffers and the optimizer's state become rank 0's, whatever their shape, layout and
    dtype, and what else a state holds; the weights are not decayed.
    """

    def filled(rank: int) -> tuple[Any, torch.optim.Optimizer]:
        model: Any = small_model(seed=rank)
        model.append(nn.Conv2d(2, 4, 3)).to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + rank, weight_decay=0.5)
        for p in model.parameters():
            p.grad = torch.full_like(p, rank + 1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state[model[0].weight] |= {
            "count": torch.tensor(rank),
            "flag": torch.tensor([rank == 0]),
            "number": rank,
        }
        # torch itself cannot load a namedtuple that is in the state of a parameter.
        optimizer.param_groups[0]["pair"] = Moments(torch.full((2,), float(rank)), rank)
        return model, optimizer

    (model, optimizer), (first, expected) = filled(backend.world.rank), filled(0)
    _, wrapped = backend.prepare(model, optimizer)
    assert bits_of(model.state_dict()) == bits_of(first.state_dict())
    assert model[-1].weight.is_contiguous(memory_format=torch.channels_last)
    for found in (optimizer, wrapped):
        # torch itself makes floats of all tensors in the state of a parameter that it loads.
        torch.testing.assert_close(
            found.state_dict(), expected.state_dict(), rtol=0, atol=0, check_dtype=False
        )
    assert isinstance(optimizer.param_groups[0]["pair"], Moments)
    assert all(p.grad is None for p in model.parameters())


@in_contract
def gradient_hooks_run_once(backend: Backend) -> None:
    """What hooks of the user's make of this rank's gradient is averaged, also in the first step."""
    kinds = ("tensor", "node pre", "post-accumulate", "node post")
    for kind, is_before, passes in itertools.product(kinds, (True, False), (1, 2)):
        if (backend.name, kind, is_before) == ("horovod", "node post", False):
            continue  # a race: its own hook, which comes before, has given the gradient to a thread
        model = nn.Linear(1, 1, bias=False)
        held = doubled(model.weight, kind) if is_before else None
        ready = Prepared(backend, model)
        held = held or doubled(model.weight, kind)
        for _ in range(2):
            ready.backward(*[ready.of_this_rank] * passes)
            # Twice each gradient; after the accumulation, twice the sum.
            factor = 2 * passes if kind in kinds[:2] else 2 ** (passes + 1) - 2
            assert model.weight.grad == factor * ready.mean, (kind, is_before, passes)
            ready.optimizer.zero_grad()
        del held


def doubled(p: torch.Tensor, kind: str) -> Any:
    """Double the gradient in a hook of this kind; return what must be held."""

    def double_(*_: Any) -> None:
        assert p.grad is not None
        p.grad.mul_(2)

    node: Any = p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    if kind == "tensor":
        p.register_hook(lambda grad: 2 * grad)  # type: ignore[no-untyped-call]
    elif kind == "post-accumulate":
        p.register_post_accumulate_grad_hook(double_)  # type: ignore[no-untyped-call]
    elif kind == "node pre":
        node.register_prehook(lambda grads: (2 * grads[0],))
    else:
        node.register_hook(double_)
    return node


@in_contract
def sparse_gradients(backend: Backend) -> None:
    """Each rank adds up its own rows, and then the ranks': bit by bit the same at two ranks.

    Rows repeat within a batch, within a window and across ranks.
    """
    rank, size = backend.world.rank, backend.world.size
    torch.manual_seed(5)
    model = nn.Embedding(40, 3, sparse=True)
    ready = Prepared(backend, model)

    def loss(rows: torch.Tensor, factors: torch.Tensor, embedding: Any) -> Any:
        return (embedding(rows) * factors).square().sum()

    for window in (1, 2, 1):
        batches = [
            [partial(loss, torch.randint(0, 20, (60,)), torch.randn(60, 1)) for _ in range(window)]
            for _ in range(size)
        ]
        total = torch.zeros(40, 3)
        for losses in batches:
            twin = copy.deepcopy(model)
            for one in losses:
                one(twin).backward()
            assert twin.weight.grad is not None
            total += twin.weight.grad.coalesce().to_dense()
        grad = ready.step(*batches[rank])["weight"]
        assert grad.is_coalesced()
        error = 0.0 if size <= 2 else 1e-5
        torch.testing.assert_close(grad.to_dense(), total / size, rtol=error, atol=error)


@in_contract
def state_loads_after_prepare(backend: Backend) -> None:
    """Loading state must not make the next step reduce twice, or otherwise differ.

    The gradients are small whole numbers whatever the weights, so that their sum over ranks is
    exact in any order and every comparison can be for equality.
    """
    model = nn.Linear(4, 2)
    ready = Prepared(backend, model, momentum=0.9)
    loss = total_of(torch.arange(4.0).view(1, 4) + backend.world.rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Horovod's word for a second reduction
        ready.step(loss)
        weights = copy.deepcopy(model.state_dict())
        state = copy.deepcopy(ready.optimizer.state_dict())
        ready.step(loss)
        expected = bits_of(model.state_dict())
        model.load_state_dict(weights)
        ready.optimizer.load_state_dict(state)
        ready.step(loss)
    assert bits_of(model.state_dict()) == expected


class Partial(nn.Module):
    """Two layers, of which a forward pass may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(1, 1, bias=False)
        self.idle = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, both: bool) -> Any:
        return self.used(x) + self.idle(x) if both else self.used(x)


@contextmanager
def options(backend: Backend, **changes: Any) -> Iterator[None]:
    """The live backend with other options."""
    before = backend.options
    backend.options = replace(before, **changes)
    yield
    backend.options = before


UNUSED = [
    # The policy, the backend that refuses the last step, and what the second layer is in each
    # micro-batch of each step. DDP cannot average a parameter that the last micro-batch leaves out,
    # or that is frozen later: it must say so, not step with the ranks apart.
    ("error", "every", "unused"),
    ("error", "ddp", "used unused"),
    ("error", "ddp", "used", "frozen"),
    ("error", "none", "frozen", "used", "used"),
    ("zero", "none", "frozen", "used", "used"),
    ("zero", "none", "used", "frozen"),
    ("zero", "none", "unused", "unused"),
]


@in_contract
def unused_and_frozen_parameters(backend: Backend) -> None:
    """Where it is allowed, an unused parameter gets zeros: weight decay applies to it."""
    x = torch.full((1, 1), backend.world.rank + 1.0)

    def loss(layer: str, net: Any) -> Any:
        return net(x, layer != "unused").sum()

    for policy, refuses, *steps in UNUSED:
        model = Partial()
        model.idle.requires_grad_(steps[0] != "frozen")
        with options(backend, unused_parameters=policy):
            ready = Prepared(backend, model)
            for number, step in enumerate(steps, 1):
                model.idle.requires_grad_(step != "frozen")
                layers = step.split()
                losses = [partial(loss, layer) for layer in layers]
                if number == len(steps) and refuses in ("every", backend.name):
                    says = r"idle\.weight, .*idle\.bias" + "; DDP needs" * (refuses == "ddp")
                    with pytest.raises(InputError, match=says):
                        ready.backward(*losses)
                    continue
                uses = layers.count("used")
                found = ready.step(*losses)
                expected = {
                    "used.weight": len(layers) * ready.mean,
                    "idle.weight": None if step == "frozen" else uses * ready.mean,
                    "idle.bias": None if step == "frozen" else uses,
                }
                for name in ["used.weight"] if "frozen" in steps[1:] else expected:
                    assert found[name] == expected[name], (policy, steps, name)


@in_contract
def buffers_follow_their_policy(backend: Backend) -> None:
    """BatchNorm's statistics after a step: rank 0's, the mean, or every rank's own."""
    for policy in ("broadcast", "average", "local"):
        model = small_model(0)
        norm = model.get_submodule("1")
        with options(backend, buffers=policy):
            ready = Prepared(backend, model)
            torch.manual_seed(100 + backend.world.rank)
            with backend.gradients(ready.optimizer):
                ready.net(torch.randn(6, 4)).square().mean().backward()
                own = backend.all_gather_object(norm.get_buffer("running_mean").clone())
        expected = {
            "broadcast": own[0],
            "average": torch.stack(own).mean(0),
            "local": own[backend.world.rank],
        }
        torch.testing.assert_close(norm.get_buffer("running_mean"), expected[policy])
        assert norm.get_buffer("num_batches_tracked") == 1


@in_contract
def different_models(backend: Backend) -> None:
    rank, size = backend.world.rank, backend.world.size
    if size == 1:
        return
    with pytest.raises(WorldMismatch) as caught:
        Prepared(backend, nn.Linear(2, 3 if rank == 0 else 4))
    expected = ("rank 1", "(4, 2)") if rank == 0 else ("rank 0", "(3, 2)")
    assert all(text in str(caught.value) for text in expected), caught.value


@in_contract
def parameters_of_one_but_not_the_other(backend: Backend) -> None:
    """The optimizer has one that the model has not, or lacks some of the model's."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stray = nn.Parameter(torch.ones(1))
    for parameters, text in (
        ([*model.parameters(), stray], "that the model lacks: 1"),
        (model[0].parameters(), r"1\.weight, 1\.bias"),
    ):
        with pytest.raises(InputError, match=text):
            backend.prepare(model, torch.optim.SGD(parameters, lr=0.1))


@in_contract
def buffers_that_grow(backend: Backend) -> None:
    """As the tables of rotary embeddings do with the longest input, which is each rank's own: no
    bytes of another buffer may end up in a table.
    """
    grown = torch.arange(3.0 + backend.world.rank)
    for policy in ("broadcast", "average", "local"):
        model = nn.Linear(1, 1)
        model.register_buffer("table", torch.arange(2.0), persistent=False)
        with options(backend, buffers=policy):
            ready = Prepared(backend, model)
            ready.step()
            model.table = grown
            if policy != "local" and backend.world.size > 1:
                with pytest.raises(InputError, match=r"buffer table has the shape \(\d,\), "):
                    ready.backward()
            else:
                ready.backward()
                assert torch.equal(model.table, torch.arange(3.0 + backend.world.rank))


@in_contract
def two_models(backend: Backend) -> None:
    """Two models at once, as a GAN has them, each with an optimizer of its own."""
    pair = [Prepared(backend, nn.Linear(1, 1, bias=False), lr=1.0) for _ in range(2)]
    for one in pair:
        one.backward()
    for one in pair:
        (weight,) = one.model.parameters()
        expected = weight.detach() - one.mean
        one.optimizer.step()
        torch.testing.assert_close(weight.detach(), expected)


@in_contract
def a_step_without_averaging(backend: Backend) -> None:
    """It raises, on every rank; so does a second step on the same gradients."""
    model = nn.Linear(1, 1)
    ready = Prepared(backend, model)
    ready.backward()
    ready.optimizer.step()
    before = model.weight.detach().clone()
    with pytest.raises(InputError, match=r"not averaged: .*`with backend.gradients"):
        ready.optimizer.step()
    assert torch.equal(model.weight, before)
    with pytest.raises(ValueError, match="the optimizer that prepare returned"):
        with backend.gradients(torch.optim.SGD(model.parameters(), lr=1.0)):
            pass


@in_contract
def sync_batch_norm(backend: Backend) -> None:
    """It normalizes over the batches of all ranks, of which rank r has 2 r + 2 samples: outputs and
    gradients are those of one batch of them all. torch's layer would be plain BatchNorm on CPUs.
    """
    rank, size = backend.world.rank, backend.world.size
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    model: nn.Module = convert(small_model(0)).double()
    parameters = list(model.parameters())
    ready = Prepared(backend, model)
    assert list(model.parameters()) == parameters  # the same ones
    inputs = torch.randn(size * (size + 1), 4, generator=torch.Generator().manual_seed(1)).double()
    mine = slice(rank * (rank + 1), (rank + 1) * (rank + 2))
    batch = inputs[mine].requires_grad_()
    # The sum over all samples, times the number of ranks, by which they are divided
    found = ready.backward(lambda net: net(batch).square().sum() * size)
    twin = small_model(0).double()
    whole = inputs.detach().clone().requires_grad_()
    twin(whole).square().sum().backward()
    assert whole.grad is not None
    expected = {name: p.grad for name, p in twin.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(batch.grad, whole.grad[mine] * size, rtol=0, atol=1e-11)
    if backend.options.buffers != "broadcast" or rank == 0:
        for name, t in twin.named_buffers():
            torch.testing.assert_close(model.get_buffer(name), t, rtol=0, atol=1e-12)


@in_contract
def sync_batch_norm_of_an_evaluation(backend: Backend) -> None:
    """Ranks may have different numbers of batches: it does not communicate, even where it has no
    running statistics.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4, track_running_stats=False)).double()
    Prepared(backend, model)
    model.eval()
    inputs = torch.randn(6, 4, dtype=torch.float64)
    expected = nn.functional.batch_norm(model[0](inputs), None, None, training=True)
    for _ in range(backend.world.rank + 1):
        torch.testing.assert_close(model(inputs), expected, rtol=0, atol=1e-12)
    backend.barrier()


def compiled_nets(backend: Backend) -> None:
    """torch.compile before and after `prepare` gives the same bits as without it.

    With three ranks to rounding: the order in which real Horovod adds depends on timing.
    """
    trained = []
    for when in ("never", "before", "after"):
        # Both kinds of BatchNorm, and a graph break.
        model: Any = nn.Sequential(nn.BatchNorm1d(64), Net(nn.SyncBatchNorm))
        if when == "before":
            model = torch.compile(model, backend="eager")
        ready = Prepared(backend, model)
        if when == "after":
            ready.net = torch.compile(ready.net, backend="eager")
        torch.manual_seed(100 + backend.world.rank)
        for _ in range(3):
            loss: Loss = lambda net: net(torch.randn(6, 64)).square().mean() / 2  # noqa: E731
            ready.step(loss, loss)
        trained.append([t.clone() for t in model.state_dict().values()])
    tolerance = 0.0 if backend.world.size <= 2 else 1e-6
    for other in trained[1:]:
        torch.testing.assert_close(other, trained[0], rtol=tolerance, atol=tolerance)
