"""What the cases of DistributedOptimizer share: a model, batches, and training by hand on one
process.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.hvd import behaviour
from tests.hvd.behaviour import Hvd

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Data = tuple[Tensor, Tensor]

# Of a model with its optimizer.
COPIES: tuple[Callable[[Any], Any], ...] = (
    copy.deepcopy,
    lambda both: pickle.loads(pickle.dumps(both)),
)
ROWS = 12  # of a global batch: divisible by every number of ranks


case = partial(behaviour.case, sizes=(1, 2, 3))


class Recorder:
    """A compressor of a user: it changes numbers, dtype and shape, and counts its calls."""

    compressed: Counter[torch.Size] = Counter()
    decompressed: Counter[torch.Size] = Counter()

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        Recorder.compressed[tensor.shape] += 1
        return (tensor / 2).float().flatten(), tensor.shape

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        Recorder.decompressed[context] += 1
        return (tensor * 2).double().reshape(context)


def net(seed: int = 0) -> Any:
    """A small model in double precision, equal on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(step: int) -> Data:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.double)
    y = torch.randn(ROWS, 3, generator=generator, dtype=torch.double)
    return x, y


def part(rank: int, size: int, step: int) -> Data:
    """A rank's part of it."""
    x, y = batch(step)
    return x[rank::size], y[rank::size]


def shard(hvd: Hvd, step: int) -> Data:
    """This rank's part of it."""
    return part(hvd.rank(), hvd.size(), step)


def loss(model: nn.Module, data: Data) -> Any:
    return nn.functional.mse_loss(model(data[0]), data[1])


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def plain(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Nothing but the learning rate, so that the gradient is what a parameter moves by."""
    return torch.optim.SGD(parameters, lr=0.5)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)


def wrap(hvd: Hvd, model: nn.Module, make: Make = sgd, **options: Any) -> Any:
    """The model's optimizer, wrapped, with its parameters' names."""
    options.setdefault("named_parameters", model.named_parameters())
    return hvd.DistributedOptimizer(make(model.parameters()), **options)


def wrapped(
    hvd: Hvd, make: Make = sgd, *, new: Callable[[], Any] = net, **options: Any
) -> tuple[Any, Any]:
    """A new model, and its optimizer, wrapped."""
    model = new()
    return model, wrap(hvd, model, make, **options)


def by_hand(steps: int, make: Make = sgd, model: nn.Module | None = None) -> Any:
    """Train on the global batches without hvd: what every wrapped training is compared with."""
    model = model if model is not None else net()
    optimizer = make(model.parameters())
    for step in range(steps):
        update(model, optimizer, batch(step))
    return model


def train(hvd: Hvd, model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    """The loop of every Horovod script."""
    for step in steps:
        update(model, optimizer, shard(hvd, step))


def backward(hvd: Hvd, model: nn.Module, step: int) -> None:
    """Compute the gradients of this rank's part of a batch."""
    loss(model, shard(hvd, step)).backward()


def update(model: nn.Module, optimizer: Any, *batches: Data) -> None:
    """Make one step, wrapped or not, on the sum of the gradients of these batches."""
    optimizer.zero_grad()
    for data in batches:
        loss(model, data).backward()
    optimizer.step()


def side_by_side(
    hvd: Hvd,
    make: Make = sgd,
    *,
    new: Callable[[], Any] = net,
    steps: int = 4,
    tolerance: float = 1e-12,
    **options: Any,
) -> Iterator[tuple[int, Any, Any, Data]]:
    """Yield (step, model, optimizer, data) twice for each step: the wrapped optimizer with this
    rank's part of the batch, then a plain one with the whole batch. Both must move alike.
    """
    model, expected = new(), new()
    optimizer, by_itself = wrap(hvd, model, make, **options), make(expected.parameters())
    for step in range(steps):
        yield step, model, optimizer, shard(hvd, step)
        yield step, expected, by_itself, batch(step)
        close(model, expected, tolerance)
    equal_everywhere(hvd, model)


@contextlib.contextmanager
def synchronized(optimizer: Any, step: Callable[[], object] | None = None) -> Iterator[None]:
    """Run the block between synchronisation and step, as scripts do to clip the gradients. Of a
    plain optimizer, only the step is left.
    """
    is_wrapped = hasattr(optimizer, "synchronize")
    if is_wrapped:
        optimizer.synchronize()
    yield
    with optimizer.skip_synchronize() if is_wrapped else contextlib.nullcontext():
        (step or optimizer.step)()


def gradients(model: nn.Module, data: Data) -> list[Tensor]:
    """The gradients of these data, in the order of the parameters; the model is left alone."""
    return list(torch.autograd.grad(loss(model, data), list(model.parameters())))


def each_ranks(hvd: Hvd, model: nn.Module, step: int) -> list[list[Tensor]]:
    """The gradients of every rank's part of the batch, by rank."""
    n = hvd.size()
    return [gradients(model, part(rank, n, step)) for rank in range(n)]


def averages(hvd: Hvd, model: nn.Module, step: int) -> list[Tensor]:
    """The gradients that all ranks must have after synchronisation."""
    return [torch.stack(grads).mean(0) for grads in zip(*each_ranks(hvd, model, step), strict=True)]


def grads(model: nn.Module) -> list[Tensor]:
    """The gradients that the parameters have now; none may be None."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == len(list(model.parameters()))
    return found


def close(
    got: Iterable[Tensor] | nn.Module,
    expected: Iterable[Tensor] | nn.Module,
    tolerance: float = 1e-12,
) -> None:
    """Equal up to the rounding of double precision."""
    for a, b in zip(tensors(got), tensors(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def equal_everywhere(hvd: Hvd, values: Iterable[Tensor] | nn.Module) -> None:
    """Bitwise the same on all ranks."""
    flat = torch.cat([t.detach().reshape(-1).double() for t in tensors(values)])
    for other in hvd.allgather(flat[None], name="equal_everywhere"):
        assert torch.equal(other, flat)


def tensors(values: Iterable[Tensor] | nn.Module) -> list[Tensor]:
    values = values.parameters() if isinstance(values, nn.Module) else values
    return [value.detach() for value in values]


def twin(model: nn.Module) -> Any:
    """A copy to compute expectations on."""
    model = copy.deepcopy(model)
    model.zero_grad()
    return model


@contextlib.contextmanager
def all_warnings() -> Iterator[list[str]]:
    """Collect the texts of the warnings that the block gives."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught]
