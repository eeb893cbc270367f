"""Each training method in a loop of your own: one function for each, on any backend.

    torchrun --nproc-per-node 2 examples/methods.py mixed_precision
    horovodrun -np 2 python examples/methods.py local_sgd

`plain` is the loop that the others change. With the Trainer each of them is an option instead:
docs/methods.md. Several models and optimizers are in gan.py.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset

from hvdtrain import Backend, BackendOptions, Loader, open_backend, shard_bounds
from hvdtrain.optim.local_sgd import LocalSGD
from hvdtrain.tasks.digits import Digits
from hvdtrain.training.evaluation import Evaluation
from hvdtrain.training.metrics import agreed_fingerprint

EPOCHS, BATCH = 5, 32


def plain(backend: Backend) -> nn.Module:
    """Synchronous data-parallel SGD."""
    return train(backend, new_model())


def train(backend: Backend, model: nn.Module) -> nn.Module:
    net, optimizer = backend.prepare(model, sgd(model))
    loop(backend, net, optimizer)
    return model


def loop(backend: Backend, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loader = Loader(backend, TRAINED, BATCH)
    for _ in range(EPOCHS):
        for images, labels in loader:
            with backend.gradients(optimizer):
                loss = F.cross_entropy(net(images), labels)
                loss.backward()  # type: ignore[no-untyped-call]
            # now p.grad is the mean over all ranks
            optimizer.step()
            optimizer.zero_grad()


def gradient_accumulation(backend: Backend) -> nn.Module:
    """Four micro-batches for each step, and clipping."""
    model = new_model()
    net, optimizer = backend.prepare(model, sgd(model))
    loader = Loader(backend, TRAINED, BATCH)
    for _ in range(EPOCHS):
        for images, labels in loader:
            for part in range(4):
                # Only the last backward pass communicates.
                with backend.gradients(optimizer, last=part == 3):
                    loss = F.cross_entropy(net(images[part::4]), labels[part::4])
                    (loss / 4).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the mean, not each rank's own
            optimizer.step()
            optimizer.zero_grad()
    return model


def mixed_precision(backend: Backend) -> nn.Module:
    """fp16 with a scaled loss. For bf16: dtype=torch.bfloat16, and no scaler."""
    model = new_model()
    net, optimizer = backend.prepare(model, sgd(model))
    loader = Loader(backend, TRAINED, BATCH)
    scaler = torch.amp.GradScaler(backend.device.type)
    for _ in range(EPOCHS):
        for images, labels in loader:
            with backend.gradients(optimizer):
                with torch.autocast(backend.device.type, dtype=torch.float16):
                    loss = F.cross_entropy(net(images), labels)
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            # Averaged while scaled: an overflow on one rank reaches all, so all skip that step.
            scaler.unscale_(optimizer)  # before clipping, if there is any
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return model


def compressed_gradients(backend: Backend) -> nn.Module:
    """Gradients that are sent as fp16: an option of the backend, see OPTIONS below."""
    return plain(backend)


def sync_batch_norm(backend: Backend) -> nn.Module:
    """BatchNorm over the batches of all ranks. `prepare` makes torch's layers work everywhere."""
    return train(backend, nn.SyncBatchNorm.convert_sync_batchnorm(new_model()))  # type: ignore[no-untyped-call]


def learning_rate(backend: Backend) -> nn.Module:
    """The rate of one rank times the number of ranks, after a warm-up (Goyal et al., 2017)."""
    model = new_model()
    size, warmup = backend.world.size, 10
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * size)
    net, optimizer = backend.prepare(model, optimizer)
    loader = Loader(backend, TRAINED, BATCH)
    # A schedule belongs to the optimizer that `prepare` returns.
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    for _ in range(EPOCHS):
        for images, labels in loader:
            with backend.gradients(optimizer):
                loss = F.cross_entropy(net(images), labels)
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model


def local_sgd(backend: Backend, every: int = 8, **outer: Any) -> nn.Module:
    """Each rank steps alone; after every 8 steps the parameters are averaged."""
    model = new_model()
    net, own = backend.prepare(model, sgd(model), gradients="local")
    optimizer = LocalSGD(own, model, backend, every, **outer)
    loop(backend, net, optimizer)
    optimizer.synchronize()
    return model


def diloco(backend: Backend) -> nn.Module:
    """Local SGD whose average is the gradient of an outer optimizer (Douillard et al., 2023)."""
    outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
    return local_sgd(backend, outer=outer)


def sam(backend: Backend, rho: float = 0.05) -> nn.Module:
    """Sharpness-aware minimization (Foret et al., 2021): the mean of the gradients where a step of
    `rho` up each rank's own gradient leads.
    """
    model = new_model()
    net, optimizer = backend.prepare(model, sgd(model))
    loader = Loader(backend, TRAINED, BATCH)
    for _ in range(EPOCHS):
        for images, labels in loader:
            with backend.gradients(optimizer, last=False):  # nothing is averaged
                F.cross_entropy(net(images), labels).backward()  # type: ignore[no-untyped-call]
            before = {p: p.detach().clone() for p in model.parameters()}
            with torch.no_grad():
                grads = [p.grad for p in before if p.grad is not None]
                norm = nn.utils.get_total_norm(grads)
                for p, grad in zip(before, grads, strict=True):
                    p.add_(grad, alpha=rho / float(norm))
            model.zero_grad()  # not the optimizer's, which has not stepped
            with backend.gradients(optimizer):
                F.cross_entropy(net(images), labels).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                for p, value in before.items():
                    p.copy_(value)
            optimizer.step()
            optimizer.zero_grad()
    return model


def early_stop(backend: Backend, patience: int = 2) -> nn.Module:
    """torchmetrics (pip install torchmetrics) over all ranks, and an end that all agree on."""
    from torchmetrics.classification import MulticlassF1Score

    model = new_model()
    net, optimizer = backend.prepare(model, sgd(model))
    loader = Loader(backend, TRAINED, BATCH)
    f1: Any = MulticlassF1Score(10, average="macro").to(backend.device)
    best, waited = 0.0, 0
    for epoch in count():
        for images, labels in loader:
            with backend.gradients(optimizer):
                F.cross_entropy(net(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        found = evaluate(backend, model, {"f1": f1})
        waited = 0 if found["f1"] > best else waited + 1
        best = max(best, found["f1"])
        if waited == patience:  # the same bits on all ranks, so all stop here
            backend.print(f"stopped after {epoch + 1} epochs: f1 has not risen above {best:.4f}")
            return model
    raise AssertionError


def stream(backend: Backend) -> nn.Module:
    """Iterable data: each rank reads its own part, and the parts have different lengths."""
    model = new_model()
    net, optimizer = backend.prepare(model, sgd(model))
    start, end = shard_bounds(len(TRAINED), backend.world.rank, backend.world.size)
    for _ in range(EPOCHS):
        loader = iter(DataLoader(Part(start, end), batch_size=BATCH))
        while True:
            batch = next(loader, None)
            mine = torch.tensor(float(batch is not None), device=backend.device)
            everyone = backend.all_reduce(mine, "min")
            if batch is None or not everyone:  # in a step alone, a rank would wait for the others
                break
            images, labels = (t.to(backend.device) for t in batch)
            with backend.gradients(optimizer):
                F.cross_entropy(net(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return model


METHODS: dict[str, Callable[[Backend], nn.Module]] = {
    method.__name__: method
    for method in (
        plain,
        gradient_accumulation,
        mixed_precision,
        compressed_gradients,
        sync_batch_norm,
        learning_rate,
        local_sgd,
        sam,
        diloco,
        early_stop,
        stream,
    )
}
OPTIONS = {
    "compressed_gradients": BackendOptions(compression="fp16"),
    "local_sgd": BackendOptions(buffers="average"),
    "diloco": BackendOptions(buffers="average"),
}

# What all of them share: the model, the data, the evaluation.


def new_model() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)
    )


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


DIGITS: Any = Digits()
TRAINED, EVALUATED = DIGITS.datasets()  # 1,437 images with their labels, and 360


class Part(IterableDataset[tuple[Tensor, Tensor]]):
    """Some of the digits, one after the other, as from a file that is read once."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = TRAINED.tensors
        for index in range(self.start, self.end):
            yield images[index], labels[index]


def evaluate(backend: Backend, model: nn.Module, metrics: dict[str, Any]) -> dict[str, float]:
    """Return the accuracy and the given metrics over all 360 digits, the same on all ranks."""
    world, evaluation = backend.world, Evaluation()
    images, labels = (t[world.rank :: world.size].to(backend.device) for t in EVALUATED.tensors)
    model.eval()
    with torch.no_grad():
        for x, y in zip(torch.split(images, BATCH), torch.split(labels, BATCH), strict=True):
            scores = model(x)
            for metric in metrics.values():
                metric.update(scores, y)
            accuracy = (scores.argmax(1) == y).float().mean()
            evaluation.add({"accuracy": accuracy, **metrics}, len(y))
    model.train()
    return evaluation.reduce(backend)  # weighted by samples, in the order of the ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--backend")
    given = parser.parse_args()
    torch.manual_seed(0)
    with open_backend(given.backend, options=OPTIONS.get(given.method)) as backend:
        model = METHODS[given.method](backend)
        accuracy = evaluate(backend, model, {})["accuracy"]
        digest = agreed_fingerprint(backend, model)
        backend.print(f"{given.method} on {backend.world.size} ranks: accuracy {accuracy:.4f}")
        backend.print(f"params_sha256 {digest[:12]}")


if __name__ == "__main__":
    main()
