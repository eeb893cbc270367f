"""What every backend must do at any world size: functions that run on live ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from hvdtrain import Backend
from hvdtrain.backends.base import OPS
from hvdtrain.backends.model_sync import broadcast_state
from hvdtrain.errors import InputError, WorldMismatch


def world_is_consistent(backend: Backend) -> dict[str, object]:
    assert backend.world.size == len(backend.hosts)
    return {"rank": backend.world.rank, "about": backend.describe()}


def all_reduce(backend: Backend) -> None:
    """Every operation on every type of number, but for the mean of integers."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for op in OPS:
            _all_reduce(backend, dtype, op)
    for dtype in (torch.int64, torch.int32):
        for op in OPS:
            if op != "mean":
                _all_reduce(backend, dtype, op)


def _all_reduce(backend: Backend, dtype: torch.dtype, op: str) -> None:
    rank, size = backend.world.rank, backend.world.size
    values = [torch.arange(5, dtype=torch.float64) - 2 + r for r in range(size)]
    stacked = torch.stack(values)
    expected = {
        "sum": stacked.sum(0),
        "mean": stacked.mean(0),
        "min": stacked.min(0).values,
        "max": stacked.max(0).values,
    }[op]
    mine = values[rank].to(dtype)
    before = mine.clone()
    result = backend.all_reduce(mine, op)  # type: ignore[arg-type]
    case = f"{op} of {dtype}"
    assert torch.equal(mine, before), f"{case}: the input changed"
    assert result.data_ptr() != mine.data_ptr(), case
    assert (result.dtype, result.shape, result.device) == (dtype, mine.shape, mine.device), case
    tolerance = 1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-6
    torch.testing.assert_close(
        result.double(),
        expected,
        rtol=tolerance,
        atol=tolerance,
        msg=lambda text: f"{case}: {text}",
    )


def all_reduce_shapes(backend: Backend) -> None:
    """Scalars, empty and strided tensors."""
    size = backend.world.size
    assert backend.all_reduce(torch.tensor(2.0), "sum") == 2.0 * size
    strided = torch.ones(4, 6).t()[::2]
    result = backend.all_reduce(strided, "sum")
    assert result.shape == strided.shape
    assert torch.equal(result, torch.full((3, 4), float(size)))


def bad_ops(backend: Backend) -> list[str]:
    texts = []
    for tensor, op in ((torch.ones(2, dtype=torch.int64), "mean"), (torch.ones(2), "product")):
        try:
            backend.all_reduce(tensor, op)  # type: ignore[arg-type]
        except ValueError as error:
            texts.append(str(error))
    return texts


def broadcast(backend: Backend, root: int) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool):
        t = torch.full((3, 2), backend.world.rank).to(dtype)
        same = backend.broadcast_(t, root)
        assert same is t
        assert torch.equal(t, torch.full((3, 2), root).to(dtype)), dtype


def objects(backend: Backend, root: int) -> None:
    rank, size = backend.world.rank, backend.world.size
    assert backend.broadcast_object({"from": rank}, root) == {"from": root}
    # Sizes, and types, that differ between ranks
    assert backend.all_gather_object("x" * rank) == ["x" * r for r in range(size)]
    mixed = [None if r else {"r": r} for r in range(size)]
    assert backend.all_gather_object(mixed[rank]) == mixed
    assert backend.broadcast_object(mixed[rank], root) == mixed[root]
    backend.barrier()


def share_errors(backend: Backend, first: int) -> tuple[str, bool]:
    """Fail on the ranks from `first` on."""
    rank = backend.world.rank
    try:
        with backend.share_errors():
            if rank >= first:
                raise InputError(f"the file of rank {rank} is not here")
    except InputError as error:
        return str(error), error.on_all_ranks
    raise AssertionError("no error")


def small_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))


def prepare_makes_equal(backend: Backend) -> None:
    """Weights, buffers and the optimizer's state become rank 0's; the weights are not decayed."""
    rank = backend.world.rank
    model = small_model(seed=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for p in model.parameters():
        p.grad = torch.full_like(p, rank + 1.0)
    optimizer.step()
    optimizer.zero_grad()
    mine = {name: t.clone() for name, t in model.state_dict().items()}
    backend_net, wrapped = backend.prepare(model, optimizer)
    expected = backend.broadcast_object(mine)
    for name, t in model.state_dict().items():
        assert torch.equal(t, expected[name]), name
    states = wrapped.state_dict()["state"]
    assert len(states) == 6, "the state was lost"
    everyone = backend.all_gather_object(states)
    for other in everyone:
        for index, state in other.items():
            assert state["step"] == 1
            assert torch.equal(state["exp_avg"], everyone[0][index]["exp_avg"])
    assert all(p.grad is None for p in model.parameters())
    assert backend_net is not None


def gradients_are_means(backend: Backend, micro_batches: int) -> None:
    """After finish_backward p.grad is the mean over ranks and micro-batches; twice, so that state
    resets.
    """
    rank, size = backend.world.rank, backend.world.size
    torch.manual_seed(3)
    model = nn.Linear(3, 2).double()
    net, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for window in (micro_batches, 1, micro_batches):
        inputs = torch.randn(window, size, 5, 3, dtype=torch.float64)  # the same on every rank
        inputs = backend.broadcast_object(inputs)
        for micro in range(window):
            with backend.accumulate(net, last=micro == window - 1):
                (net(inputs[micro, rank]).square().mean() / window).backward()
        backend.finish_backward(optimizer)
        twin = nn.Linear(3, 2).double()
        twin.load_state_dict(model.state_dict())
        twin(inputs.reshape(-1, 3)).square().mean().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.allclose(p.grad, q.grad, rtol=0, atol=1e-12)
        optimizer.step()
        optimizer.zero_grad()


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
        net, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if when == "after":
            net = torch.compile(net, backend="eager")  # type: ignore[assignment]
        torch.manual_seed(100 + backend.world.rank)
        for _ in range(3):
            for last in (False, True):
                with backend.accumulate(net, last):
                    (net(torch.randn(6, 4)).square().mean() / 2).backward()
            backend.finish_backward(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        backend.synchronize(optimizer, "parameters")
        trained.append([t.clone() for t in model.state_dict().values()])
    tolerance = 0.0 if backend.world.size <= 2 else 1e-6
    for other in trained[1:]:
        torch.testing.assert_close(other, trained[0], rtol=tolerance, atol=tolerance)


def tensor_hooks_run_once(backend: Backend) -> None:
    """A hook of the user's that changes a gradient is applied once, also in the first step."""
    rank, size = backend.world.rank, backend.world.size
    model = nn.Linear(1, 1, bias=False)
    model.weight.register_hook(lambda grad: 2 * grad)  # type: ignore[no-untyped-call]
    net, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    mean = sum(range(1, size + 1)) / size
    for _ in range(2):
        with backend.accumulate(net, last=True):
            net(torch.full((1, 1), rank + 1.0)).sum().backward()
        backend.finish_backward(optimizer)
        torch.testing.assert_close(model.weight.grad, torch.full((1, 1), 2 * mean))
        optimizer.zero_grad()


def sparse_gradients(backend: Backend) -> None:
    """Each rank adds up its own rows, and then the ranks': bit by bit the same at two ranks.

    Rows repeat within a batch, within a window and across ranks.
    """
    rank, size = backend.world.rank, backend.world.size
    values = torch.Generator().manual_seed(5)
    table = torch.randn(40, 3, generator=values)
    model = nn.Embedding(40, 3, sparse=True, _weight=table.clone())
    net, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for window in (1, 2, 1):
        rows = torch.randint(0, 20, (size, window, 60), generator=values)
        factors = torch.randn(size, window, 60, 1, generator=values)
        for micro in range(window):
            with backend.accumulate(net, last=micro == window - 1):
                (net(rows[rank, micro]) * factors[rank, micro]).square().sum().backward()
        backend.finish_backward(optimizer)
        total = torch.zeros(40, 3)
        for r in range(size):
            twin = nn.Embedding(40, 3, sparse=True, _weight=model.weight.detach().clone())
            for micro in range(window):
                (twin(rows[r, micro]) * factors[r, micro]).square().sum().backward()
            assert twin.weight.grad is not None
            total += twin.weight.grad.coalesce().to_dense()
        grad = model.weight.grad
        assert grad is not None
        assert grad.is_coalesced()
        if size <= 2:
            assert torch.equal(grad.to_dense(), total / size)
        torch.testing.assert_close(grad.to_dense(), total / size)
        optimizer.step()
        optimizer.zero_grad()


def state_loads_after_prepare(backend: Backend) -> None:
    """Loading state must not make the next step reduce twice, or otherwise differ.

    The gradients are small whole numbers whatever the weights, so that their sum over ranks is
    exact in any order and every comparison can be for equality.
    """
    model = nn.Linear(4, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    net, optimizer = backend.prepare(model, sgd)

    def step() -> None:
        with backend.accumulate(net, last=True):
            net(torch.arange(4.0).view(1, 4) + backend.world.rank).sum().backward()
        backend.finish_backward(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Horovod's word for a second reduction
            optimizer.step()
        optimizer.zero_grad()

    step()
    weights = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    step()
    expected = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    step()
    for name, t in model.state_dict().items():
        assert torch.equal(t, expected[name]), name


def unused_parameter(backend: Backend) -> str:
    """Return the error's text; on the ranks of an arm that refuses to train with it."""
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    net, optimizer = backend.prepare(Partial(model), torch.optim.SGD(model.parameters(), lr=0.1))
    with backend.accumulate(net, last=True):
        net(torch.ones(1, 2)).sum().backward()
    try:
        backend.finish_backward(optimizer)
    except InputError as error:
        return str(error)
    raise AssertionError("no error")


class Partial(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts
        self.both = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.parts["used"](x)
        return result + self.parts["idle"](x) if self.both else result


@contextmanager
def options(backend: Backend, **changes: Any) -> Iterator[None]:
    """The live backend with other options."""
    before = backend.options
    backend.options = replace(before, **changes)
    yield
    backend.options = before


def unused_as_zero(backend: Backend) -> None:
    """Allowed, a parameter without a gradient gets zeros on every backend: weight decay applies."""
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1.0)
    with options(backend, unused_parameters="zero"):
        net, optimizer = backend.prepare(Partial(model), optimizer)  # type: ignore[assignment]
        before = [p.detach().clone() for p in model["idle"].parameters()]
        for _ in range(2):
            with backend.accumulate(net, last=True):
                net(torch.ones(1, 2)).sum().backward()
            backend.finish_backward(optimizer)
            optimizer.step()
            optimizer.zero_grad()
    for p, old in zip(model["idle"].parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old * 0.81)


def buffers_follow(backend: Backend, policy: str) -> None:
    """BatchNorm's statistics after a step: rank 0's, the mean, or every rank's own."""
    model = small_model(0)
    norm = model.get_submodule("1")
    with options(backend, buffers=policy):
        net, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(100 + backend.world.rank)
        with backend.accumulate(net, last=True):
            net(torch.randn(6, 4)).square().mean().backward()
        own = backend.all_gather_object(norm.get_buffer("running_mean").clone())
        backend.finish_backward(optimizer)
    expected = {
        "broadcast": own[0],
        "average": torch.stack(own).mean(0),
        "local": own[backend.world.rank],
    }[policy]
    torch.testing.assert_close(norm.get_buffer("running_mean"), expected)
    assert norm.get_buffer("num_batches_tracked") == 1


def different_models(backend: Backend) -> str:
    model = nn.Linear(2, 3 if backend.world.rank == 0 else 4)
    try:
        backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except WorldMismatch as error:
        return str(error)
    return "no error"


def channels_last(backend: Backend) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    weight = model.get_parameter("0.weight")
    weight.data = torch.full_like(weight, backend.world.rank).to(memory_format=torch.channels_last)
    broadcast_state(backend, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert weight.eq(0).all()
    assert weight.is_contiguous(memory_format=torch.channels_last)


def unused_in_the_last_micro_batch(backend: Backend) -> str:
    """Used in the first micro-batch of a window only: averaged all the same, or an error."""
    rank, size = backend.world.rank, backend.world.size
    model = nn.ModuleDict(
        {"used": nn.Linear(1, 1, bias=False), "idle": nn.Linear(1, 1, bias=False)}
    )
    holder = Partial(model)
    net, optimizer = backend.prepare(holder, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.full((1, 1), rank + 1.0)
    with backend.accumulate(net, last=False):
        holder.both = True
        net(x).sum().backward()
    with backend.accumulate(net, last=True):
        holder.both = False
        net(x).sum().backward()
    try:
        backend.finish_backward(optimizer)
    except InputError as error:
        return str(error)
    mean = sum(r + 1.0 for r in range(size)) / size
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert gradients["used.weight"] == 2 * mean
    assert gradients["idle.weight"] == mean
    return "averaged"


def parameters_of_one_but_not_the_other(backend: Backend) -> list[str]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stray = nn.Parameter(torch.ones(1))
    texts = []
    for parameters in ([*model.parameters(), stray], list(model[0].parameters())):
        try:
            backend.prepare(model, torch.optim.SGD(parameters, lr=0.1))
        except InputError as error:
            texts.append(str(error))
    return texts


def two_models(backend: Backend) -> None:
    """Two models at once, as a GAN has them, each with an optimizer of its own."""
    size = backend.world.size
    pairs = [
        backend.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for model in (nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    ]
    weights = [next(net.parameters()) for net, _ in pairs]
    before = [float(weight.detach()) for weight in weights]
    x = torch.full((1, 1), backend.world.rank + 1.0)
    for net, _ in pairs:
        with backend.accumulate(net, last=True):
            net(x).sum().backward()
    for _, optimizer in pairs:
        backend.finish_backward(optimizer)
    for _, optimizer in pairs:
        optimizer.step()
        optimizer.zero_grad()
    mean = sum(r + 1.0 for r in range(size)) / size
    for weight, old in zip(weights, before, strict=True):
        torch.testing.assert_close(float(weight.detach()), old - mean)


class Moments(NamedTuple):
    mean: torch.Tensor
    steps: int


def sync_batch_norm(backend: Backend) -> None:
    """It normalizes over the batches of all ranks; parameters stay the same."""
    rank, size = backend.world.rank, backend.world.size
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    model: nn.Module = convert(small_model(0)).double()
    names, parameters = list(model.state_dict()), list(model.parameters())
    net, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(model.state_dict()) == names
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    inputs = torch.randn(size, 6, 4, generator=torch.Generator().manual_seed(1)).double()
    with backend.accumulate(net, last=True):
        net(inputs[rank]).square().mean().backward()
    backend.finish_backward(optimizer)
    twin = small_model(0).double()
    twin(inputs.reshape(-1, 4)).square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)
    for name, t in twin.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), t, rtol=0, atol=1e-12)
    model.eval()
    twin.eval()
    torch.testing.assert_close(model(inputs[0]), twin(inputs[0]), rtol=0, atol=1e-12)


def sync_batch_norm_without_running_statistics(backend: Backend) -> None:
    """In evaluations, of which ranks have different numbers of batches, it does not communicate."""
    rank, size = backend.world.rank, backend.world.size
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model: nn.Module = convert(nn.Sequential(nn.Linear(4, 4), norm)).double()
    backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.randn(size, 6, 4, generator=torch.Generator().manual_seed(1)).double()
    twin = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)).double()
    twin.load_state_dict(model.state_dict())
    whole = twin(inputs.reshape(-1, 4)).reshape(inputs.shape)
    torch.testing.assert_close(model(inputs[rank]), whole[rank], rtol=0, atol=1e-12)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(inputs[rank]), twin(inputs[rank]), rtol=0, atol=1e-12)
        for _ in range(rank):
            model(inputs[rank])
    backend.barrier()


def sync_batch_norm_of_uneven_batches(backend: Backend) -> None:
    """Rank r has 2 r + 2 samples: outputs and gradients are those of one batch of them all."""
    rank, size = backend.world.rank, backend.world.size
    convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
    model: nn.Module = convert(small_model(0)).double()
    net, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    inputs = torch.randn(size * (size + 1), 4, generator=torch.Generator().manual_seed(1)).double()
    mine = slice(rank * (rank + 1), (rank + 1) * (rank + 2))
    batch = inputs[mine].requires_grad_()
    with backend.accumulate(net, last=True):
        # The sum over all samples, times the number of ranks, of which finish_backward divides.
        (net(batch).square().sum() * size).backward()
    backend.finish_backward(optimizer)
    twin = small_model(0).double()
    whole = inputs.detach().clone().requires_grad_()
    twin(whole).square().sum().backward()
    assert whole.grad is not None
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-11)
    own = whole.grad[mine] * size
    torch.testing.assert_close(batch.grad, own, rtol=0, atol=1e-11)
    if backend.options.buffers != "broadcast" or rank == 0:
        for name, t in twin.named_buffers():
            torch.testing.assert_close(model.get_buffer(name), t, rtol=0, atol=1e-12)


def state_of_any_kind(backend: Backend) -> None:
    """broadcast_state moves tensors of any shape and dtype, and what else a state holds."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + backend.world.rank, momentum=0.5)
    state = optimizer.state[model.weight]
    state["momentum_buffer"] = torch.full((2, 3), float(backend.world.rank))
    state["count"] = torch.tensor(backend.world.rank)
    state["flag"] = torch.tensor([backend.world.rank == 0])
    state["number"] = backend.world.rank
    # torch itself cannot load a namedtuple that is in the state of a parameter.
    group = optimizer.param_groups[0]
    group["pair"] = Moments(torch.full((2,), float(backend.world.rank)), backend.world.rank)
    broadcast_state(backend, model, optimizer)
    state = optimizer.state[model.weight]
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert state["momentum_buffer"].eq(0).all()
    assert state["count"] == 0
    assert state["flag"].item()
    assert state["number"] == 0
    pair = optimizer.param_groups[0]["pair"]
    assert isinstance(pair, Moments)
    assert pair.mean.eq(0).all()
    assert pair.steps == 0
