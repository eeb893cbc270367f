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
from hvdtrain.optim.model_sync import broadcast_state
from tests.runs import bits_of

CONTRACT: list[Callable[[Backend], None]] = []


def in_contract(function: Callable[[Backend], None]) -> Callable[[Backend], None]:
    """Make a function a row of the table that test_contract.py runs."""
    CONTRACT.append(function)
    return function


@in_contract
def is_described(backend: Backend) -> None:
    everyone = backend.all_gather_object((backend.world.rank, backend.describe()["name"]))
    assert everyone == [(rank, backend.name) for rank in range(len(backend.hosts))]


@in_contract
def all_reduce(backend: Backend) -> None:
    """Every operation, on a tensor that stays as it was; the numerics are those of transports."""
    rank, size = backend.world.rank, backend.world.size
    values = [torch.arange(5.0) - 2 + r for r in range(size)]
    stacked = torch.stack(values)
    expected = {
        "sum": stacked.sum(0),
        "mean": stacked.mean(0),
        "min": stacked.amin(0),
        "max": stacked.amax(0),
    }
    mine = values[rank].clone()
    for op in OPS:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            if op == "mean" and dtype == torch.int64:
                continue
            result = backend.all_reduce(mine.to(dtype), op)
            assert (result.dtype, result.shape) == (dtype, mine.shape)
            torch.testing.assert_close(result, expected[op].to(dtype), rtol=1e-2, atol=1e-2)
        assert backend.all_reduce(mine, op).data_ptr() != mine.data_ptr()
        assert torch.equal(mine, values[rank]), f"{op} changed its input"
    strided = torch.ones(4, 6).t()[::2]
    assert torch.equal(backend.all_reduce(strided, "sum"), torch.full((3, 4), float(size)))


@in_contract
def bad_ops(backend: Backend) -> None:
    integers = torch.ones(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="mean of integers"):
        backend.all_reduce(integers, "mean")
    with pytest.raises(ValueError, match="unknown op 'product'"):
        backend.all_reduce(integers, "product")  # type: ignore[arg-type]


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
    assert backend.all_gather_object("x" * rank) == ["x" * r for r in range(size)]
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

    def backward(self, *losses: Loss) -> None:
        """Compute the gradients of a step of so many micro-batches."""
        for number, loss in enumerate(losses, 1):
            with self.backend.gradients(self.optimizer, last=number == len(losses)):
                loss(self.net).backward()

    def step(self, *losses: Loss) -> None:
        """Make a step of so many micro-batches."""
        self.backward(*losses)
        self.optimizer.step()
        self.optimizer.zero_grad()


@in_contract
def prepare_makes_equal(backend: Backend) -> None:
    """Weights, buffers and the optimizer's state become rank 0's; the weights are not decayed."""
    rank = backend.world.rank
    model = small_model(seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for p in model.parameters():
        p.grad = torch.full_like(p, rank + 1.0)
    optimizer.step()
    optimizer.zero_grad()
    expected = backend.broadcast_object(bits_of(model.state_dict()))
    _, wrapped = backend.prepare(model, optimizer)
    assert bits_of(model.state_dict()) == expected
    states = wrapped.state_dict()["state"]
    assert [state["step"] for state in states.values()] == [1] * 6
    assert bits_of(states) == backend.broadcast_object(bits_of(states))
    assert all(p.grad is None for p in model.parameters())


@in_contract
def gradients_are_means(backend: Backend) -> None:
    """After `gradients` p.grad is the mean over ranks and micro-batches; again and again, so
    that state resets.
    """
    rank, size = backend.world.rank, backend.world.size
    torch.manual_seed(3)
    model = nn.Linear(3, 2).double()
    ready = Prepared(backend, model)

    def loss(x: torch.Tensor, window: int, net: Any) -> Any:
        return net(x).square().mean() / window

    for window in (3, 1, 1, 3):
        inputs = torch.randn(window, size, 5, 3, dtype=torch.float64)  # the same on every rank
        ready.backward(*(partial(loss, x[rank], window) for x in inputs))
        twin = copy.deepcopy(model)
        twin.zero_grad()
        loss(inputs.reshape(-1, 3), 1, twin).backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)
        ready.optimizer.step()
        ready.optimizer.zero_grad()


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
    values = torch.Generator().manual_seed(5)
    table = torch.randn(40, 3, generator=values)
    model = nn.Embedding(40, 3, sparse=True, _weight=table)
    ready = Prepared(backend, model)

    def loss(rows: torch.Tensor, factors: torch.Tensor, embedding: Any) -> Any:
        return (embedding(rows) * factors).square().sum()

    for window in (1, 2, 1):
        rows = torch.randint(0, 20, (size, window, 60), generator=values)
        factors = torch.randn(size, window, 60, 1, generator=values)
        pairs = zip(rows.flatten(0, 1), factors.flatten(0, 1), strict=True)
        losses = [partial(loss, *pair) for pair in pairs]  # of one rank after the other
        ready.backward(*losses[rank * window :][:window])
        total = torch.zeros(40, 3)
        for r in range(size):
            twin = nn.Embedding(40, 3, sparse=True, _weight=model.weight.detach().clone())
            for one in losses[r * window :][:window]:
                one(twin).backward()
            assert twin.weight.grad is not None
            total += twin.weight.grad.coalesce().to_dense()
        grad = model.weight.grad
        assert grad is not None
        assert grad.is_coalesced()
        if size <= 2:
            assert torch.equal(grad.to_dense(), total / size)
        torch.testing.assert_close(grad.to_dense(), total / size)
        ready.optimizer.step()
        ready.optimizer.zero_grad()


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
    """Two layers; the forward pass uses the second where `both`."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(1, 1, bias=False)
        self.idle = nn.Linear(1, 1)
        self.both = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.used(x)
        return result + self.idle(x) if self.both else result


@in_contract
def unused_parameters_are_named(backend: Backend) -> None:
    ready = Prepared(backend, Partial())
    with pytest.raises(InputError, match=r"idle\.weight, .*idle\.bias"):
        ready.backward(ready.of_this_rank)


@in_contract
def unused_in_the_last_micro_batch(backend: Backend) -> None:
    """Used in the first micro-batch of a step only: averaged all the same. DDP cannot average that;
    it must say so, not step with the ranks apart.
    """
    model = Partial()
    ready = Prepared(backend, model)

    def loss(both: bool, net: Any) -> Any:
        model.both = both
        return ready.of_this_rank(net)

    passes = partial(loss, True), partial(loss, False)
    if backend.name == "ddp":
        with pytest.raises(InputError, match=r"idle\.weight"):
            ready.backward(*passes)
        return
    ready.backward(*passes)
    found = {name: p.grad for name, p in model.named_parameters()}
    assert found == {"used.weight": 2 * ready.mean, "idle.weight": ready.mean, "idle.bias": 1.0}


@contextmanager
def options(backend: Backend, **changes: Any) -> Iterator[None]:
    """The live backend with other options."""
    before = backend.options
    backend.options = replace(before, **changes)
    yield
    backend.options = before


@in_contract
def unused_as_zero(backend: Backend) -> None:
    """Allowed, a parameter without a gradient gets zeros on every backend: weight decay applies."""
    model = Partial()
    with options(backend, unused_parameters="zero"):
        ready = Prepared(backend, model, weight_decay=1.0)
        before = [p.detach().clone() for p in model.idle.parameters()]
        for _ in range(2):
            ready.step(ready.of_this_rank)
    for p, old in zip(model.idle.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old * 0.81)


@in_contract
def thawed_in_training(backend: Backend) -> None:
    """Parameters that are frozen at first, and thawed after a step, as fine-tuning does."""
    for policy in ("error", "zero"):
        model = Partial()
        model.both = True
        model.idle.requires_grad_(False)
        with options(backend, unused_parameters=policy):
            ready = Prepared(backend, model)
            for thawed in (False, True, True):
                model.idle.requires_grad_(thawed)
                ready.backward(ready.of_this_rank)
                assert model.idle.weight.grad == (ready.mean if thawed else None), policy
                ready.optimizer.step()
                ready.optimizer.zero_grad()
        assert len(set(backend.all_gather_object(model.idle.weight.item()))) == 1


@in_contract
def frozen_in_training(backend: Backend) -> None:
    """DDP cannot leave a parameter out that it had at first, unless it looks for such: it says so
    in that step.
    """
    for policy in ("error", "zero"):
        model = Partial()
        model.both = True
        with options(backend, unused_parameters=policy):
            ready = Prepared(backend, model)
            ready.step(ready.of_this_rank)
            model.idle.requires_grad_(False)
            if backend.name == "ddp" and policy == "error":
                with pytest.raises(InputError, match=r"idle\.weight, idle\.bias; DDP needs"):
                    ready.backward(ready.of_this_rank)
                continue
            ready.step(ready.of_this_rank)
        assert len(set(backend.all_gather_object(model.used.weight.item()))) == 1


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
def channels_last(backend: Backend) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    weight = model.get_parameter("0.weight")
    weight.data = torch.full_like(weight, backend.world.rank).to(memory_format=torch.channels_last)
    broadcast_state(backend, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert weight.eq(0).all()
    assert weight.is_contiguous(memory_format=torch.channels_last)


@in_contract
def parameters_of_one_but_not_the_other(backend: Backend) -> None:
    """The optimizer has one that the model has not, or lacks some of the model's."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stray = nn.Parameter(torch.ones(1))
    with pytest.raises(InputError, match="1 parameters that are not the model's"):
        backend.prepare(model, torch.optim.SGD([*model.parameters(), stray], lr=0.1))
    with pytest.raises(InputError, match=r"1\.weight, 1\.bias"):
        backend.prepare(model, torch.optim.SGD(model[0].parameters(), lr=0.1))


class Cache(nn.Module):
    """A table that grows with its longest input, as that of rotary embeddings does."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.arange(2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = torch.arange(float(max(len(self.table), len(x))))
        return self.scale * x * self.table[: len(x)]


@in_contract
def buffers_that_grow(backend: Backend) -> None:
    """Each rank has its own length: no bytes of another buffer may end up in a table."""
    rank, size = backend.world.rank, backend.world.size
    longer = total_of(torch.ones(3 + rank))

    for policy in ("broadcast", "average", "local"):
        model = Cache()
        with options(backend, buffers=policy):
            ready = Prepared(backend, model)
            ready.step(total_of(torch.ones(2)))
            if policy != "local" and size > 1:
                with pytest.raises(InputError, match=r"buffer table has the shape \(\d,\), "):
                    ready.backward(longer)
            else:
                ready.backward(longer)
                assert torch.equal(model.table, torch.arange(3.0 + rank))


@in_contract
def two_models(backend: Backend) -> None:
    """Two models at once, as a GAN has them, each with an optimizer of its own."""
    pair = [Prepared(backend, nn.Linear(1, 1, bias=False), lr=1.0) for _ in range(2)]
    before = [float(next(one.net.parameters()).detach()) for one in pair]
    for one in pair:
        one.backward(one.of_this_rank)
    for one in pair:
        one.optimizer.step()
    for one, old in zip(pair, before, strict=True):
        after = float(next(one.net.parameters()).detach())
        torch.testing.assert_close(after, old - one.mean)


@in_contract
def a_step_without_averaging(backend: Backend) -> None:
    """It raises, on every rank; so does a second step on the same gradients."""
    model = nn.Linear(1, 1)
    ready = Prepared(backend, model)
    ready.backward(ready.of_this_rank)
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
    names, parameters = list(model.state_dict()), list(model.parameters())
    ready = Prepared(backend, model)
    assert list(model.state_dict()) == names
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    inputs = torch.randn(size * (size + 1), 4, generator=torch.Generator().manual_seed(1)).double()
    mine = slice(rank * (rank + 1), (rank + 1) * (rank + 2))
    batch = inputs[mine].requires_grad_()
    # The sum over all samples, times the number of ranks, by which they are divided
    ready.backward(lambda net: net(batch).square().sum() * size)
    twin = small_model(0).double()
    whole = inputs.detach().clone().requires_grad_()
    twin(whole).square().sum().backward()
    assert whole.grad is not None
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-11)
    torch.testing.assert_close(batch.grad, whole.grad[mine] * size, rtol=0, atol=1e-11)
    if backend.options.buffers != "broadcast" or rank == 0:
        for name, t in twin.named_buffers():
            torch.testing.assert_close(model.get_buffer(name), t, rtol=0, atol=1e-12)


@in_contract
def sync_batch_norm_of_an_evaluation(backend: Backend) -> None:
    """Ranks may have different numbers of batches: it does not communicate, even where it has no
    running statistics.
    """
    rank = backend.world.rank
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).double()
    model: nn.Module = convert(copy.deepcopy(plain))
    Prepared(backend, model)
    plain.load_state_dict(model.state_dict())
    model.eval()
    inputs = torch.randn(6, 4, dtype=torch.float64)
    for _ in range(rank + 1):
        torch.testing.assert_close(model(inputs), plain(inputs), rtol=0, atol=1e-12)
    backend.barrier()


class Moments(NamedTuple):
    mean: torch.Tensor
    steps: int


@in_contract
def state_of_any_kind(backend: Backend) -> None:
    """broadcast_state moves tensors of any shape and dtype, and what else a state holds."""

    def filled(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank, momentum=0.5)
        optimizer.state[model.weight] = {
            "momentum_buffer": torch.full((2, 3), float(rank)),
            "count": torch.tensor(rank),
            "flag": torch.tensor([rank == 0]),
            "number": rank,
        }
        # torch itself cannot load a namedtuple that is in the state of a parameter.
        optimizer.param_groups[0]["pair"] = Moments(torch.full((2,), float(rank)), rank)
        return model, optimizer

    model, optimizer = filled(backend.world.rank)
    broadcast_state(backend, model, optimizer)
    found, expected = optimizer.state_dict(), filled(0)[1].state_dict()
    # torch itself makes floats of all tensors in the state of a parameter that it loads.
    torch.testing.assert_close(found, expected, rtol=0, atol=0, check_dtype=False)
    assert isinstance(found["param_groups"][0]["pair"], Moments)


class WithBreak(nn.Module):
    """Both kinds of BatchNorm, and a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = small_model(seed=0)
        self.last = nn.Sequential(nn.SyncBatchNorm(2), nn.Linear(2, 1))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


def compiled_nets(backend: Backend) -> None:
    """torch.compile before and after `prepare` gives the same bits as without it.

    With three ranks to rounding: the order in which real Horovod adds depends on timing.
    """
    trained = []
    for when in ("never", "before", "after"):
        model: Any = WithBreak()
        if when == "before":
            model = torch.compile(model, backend="eager")
        ready = Prepared(backend, model)
        if when == "after":
            ready.net = torch.compile(ready.net, backend="eager")
        torch.manual_seed(100 + backend.world.rank)
        for _ in range(3):
            loss: Loss = lambda net: net(torch.randn(6, 4)).square().mean() / 2  # noqa: E731
            ready.step(loss, loss)
        trained.append([t.clone() for t in model.state_dict().values()])
    tolerance = 0.0 if backend.world.size <= 2 else 1e-6
    for other in trained[1:]:
        torch.testing.assert_close(other, trained[0], rtol=tolerance, atol=tolerance)
