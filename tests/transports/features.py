"""What PyTorch builds on torch.distributed: the same training on every transport.

Each feature is a function of torch.distributed and a folder that every rank calls. It trains, and
returns the weights; test_features.py compares them, over the ranks and with Gloo's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.runs import snapshot

# What torch warns of when it is imported is not for the process of the tests to see: the rest of
# torch.distributed is imported where it is used.
Dist = Any
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Feature:
    """A row of the table."""

    function: Callable[[Dist, Path], Weights]
    first_on: str  # the transport on which `make test` runs it, with two ranks; "" is none
    sizes: Sequence[int]

    @property
    def name(self) -> str:
        return self.function.__name__

    def holds_on(self, transport: str, n: int) -> bool:
        return n in self.sizes and (n == 2 or transport == self.first_on)

    def is_first_on(self, transport: str, n: int) -> bool:
        """Return whether `make test` runs the row there."""
        return n == 2 and transport == self.first_on


FEATURES: list[Feature] = []


def feature(
    first_on: str = "shm", sizes: Sequence[int] = (2, 3)
) -> Callable[[Callable[[Dist, Path], Weights]], Callable[[Dist, Path], Weights]]:
    """Make a function a row of the table."""

    def add(function: Callable[[Dist, Path], Weights]) -> Callable[[Dist, Path], Weights]:
        FEATURES.append(Feature(function, first_on, sizes))
        return function

    return add


class Net(nn.Module):
    """More than 1 MiB: its buckets are moved into shared memory. A part is for odd inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 600)
        self.norm = nn.LayerNorm(600)
        self.odd = nn.Linear(600, 600, bias=False)
        self.last = nn.Linear(600, 5)

    def forward(self, x: Tensor, odd: bool = True) -> Any:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(x + self.odd(x) if odd else x)


def made() -> Net:
    torch.manual_seed(11)
    return Net()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 64, generator=generator)
    return x, x[:, :5].sin()


def loss_of(model: nn.Module, rank: int, step: int, odd: bool = True) -> Any:
    x, y = batch(rank, step)
    return nn.functional.mse_loss(model(x, odd), y)


def parallel(model: nn.Module, **options: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, **options)


def train(
    dist: Dist,
    ddp: Any,
    steps: Iterable[int] = range(5),
    sometimes: bool = False,
) -> Weights:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.003, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        loss_of(ddp, dist.get_rank(), step, not sometimes or step % 2 == 0).backward()
        optimizer.step()
    return snapshot(ddp.module)


@feature()
def ddp(dist: Dist, folder: Path) -> Weights:
    return train(dist, parallel(made()))


@feature(first_on="")
def ddp_with_views_and_many_buckets(dist: Dist, folder: Path) -> Weights:
    wrapped = parallel(made(), gradient_as_bucket_view=True, bucket_cap_mb=1)
    return train(dist, wrapped)


@feature(first_on="mpi4py")
def ddp_with_unused_parameters(dist: Dist, folder: Path) -> Weights:
    wrapped = parallel(made(), find_unused_parameters=True)
    return train(dist, wrapped, sometimes=True)


@feature(first_on="")
def ddp_with_fp16_compression(dist: Dist, folder: Path) -> Weights:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    wrapped = parallel(made())
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(dist, wrapped)


@feature(first_on="")
def ddp_with_power_sgd(dist: Dist, folder: Path) -> Weights:
    """In one bucket: with several, what follows a bucket's first collective is called by another
    thread at any time, so that ranks call collectives in different orders. Gloo ends the process.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    wrapped = parallel(made(), bucket_cap_mb=100)
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2
    )
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(dist, wrapped)


@feature()
def ddp_with_overlapping_zero(dist: Dist, folder: Path) -> Weights:
    """Its hook broadcasts from callbacks: as PowerSGD with several buckets; torch refuses Gloo."""
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = parallel(made(), bucket_cap_mb=0.1)
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.SGD, lr=0.01, overlap_with_ddp=True
    )
    interleaved = ddp_zero_hook.hook_with_zero_step_interleaved
    try:
        hook = interleaved(default_hooks.allreduce_hook, wrapped, optimizer)
        wrapped.register_comm_hook(None, hook)
        for step in range(20):
            loss_of(wrapped, dist.get_rank(), step).backward()
    except RuntimeError as error:
        # Not always: the ranks may call them in the same order.
        said = "Gloo backend" if dist.get_backend() == "gloo" else "use one bucket"
        if said not in str(error):
            raise
    return snapshot(made())


@feature(first_on="")
def ddp_with_the_hook_in_c(dist: Dist, folder: Path) -> Weights:
    wrapped = parallel(made())
    wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return train(dist, wrapped)


@feature()
def ddp_with_sparse_gradients(dist: Dist, folder: Path) -> Weights:
    """DDP takes a sparse bucket's result out of the future: to find none there ends the process."""
    torch.manual_seed(11)
    model = nn.Sequential(nn.EmbeddingBag(1000, 8, sparse=True), nn.Linear(8, 5))
    wrapped = parallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        words = torch.arange(12).view(3, 4) * (dist.get_rank() + 2) + step
        wrapped(words).square().mean().backward()
        optimizer.step()
    return snapshot(model)


@feature()
def ddp_without_synchronisation_at_times(dist: Dist, folder: Path) -> Weights:
    wrapped = parallel(made())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        with wrapped.no_sync():
            loss_of(wrapped, dist.get_rank(), 2 * step).backward()
        loss_of(wrapped, dist.get_rank(), 2 * step + 1).backward()
        optimizer.step()
    return snapshot(wrapped.module)


@feature(first_on="")
def ddp_with_uneven_inputs(dist: Dist, folder: Path) -> Weights:
    from torch.distributed.algorithms.join import Join

    wrapped = parallel(made())
    with Join([wrapped]):
        train(dist, wrapped, range(3 + 2 * dist.get_rank()))
    return snapshot(wrapped.module)


@feature()
def ddp_with_uneven_inputs_of_those_left(dist: Dist, folder: Path) -> Weights:
    """Divided by the ranks that still train: DDP takes their number from an all-reduce of its."""
    wrapped = parallel(made())
    with wrapped.join(divide_by_initial_world_size=False):
        train(dist, wrapped, range(3 + 2 * dist.get_rank()))
    return snapshot(wrapped.module)


@feature()
def zero_redundancy_optimizer(dist: Dist, folder: Path) -> Weights:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = parallel(made())
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
    )
    for step in range(4):
        optimizer.zero_grad()
        loss_of(wrapped, dist.get_rank(), step).backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(wrapped.parameters()))
    return snapshot(wrapped.module)


# Sharded


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(96, 4, 384, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(96, 7)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sequence(rank: int, step: int) -> Tensor:
    return torch.randn(3, 10, 96, generator=torch.Generator().manual_seed(77 * step + rank))


def sharded(dist: Dist) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(3)
    model = Transformer()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def step_sharded(dist: Dist, model: nn.Module, optimizer: Any, steps: Iterable[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(sequence(dist.get_rank(), step)).square().mean().backward()
        optimizer.step()


def whole(model: nn.Module) -> Weights:
    parameters: Iterable[tuple[str, Any]] = model.named_parameters()
    return {name: p.full_tensor().detach().clone() for name, p in parameters}


@feature(first_on="mpi4py")
def fsdp2(dist: Dist, folder: Path) -> Weights:
    model = sharded(dist)
    step_sharded(dist, model, torch.optim.SGD(model.parameters(), lr=0.1), range(3))

    torch.manual_seed(3)
    alone = Transformer()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            loss: Any = alone(sequence(rank, step)).square().mean() / dist.get_world_size()
            loss.backward()
        optimizer.step()
    result = whole(model)
    for name, p in alone.named_parameters():
        torch.testing.assert_close(result[name], p.detach(), rtol=1e-4, atol=1e-5)
    return result


@feature()
def checkpoint(dist: Dist, folder: Path) -> Weights:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
        weights, state = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": state, "note": {"rank": "all"}}

    model = sharded(dist)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step_sharded(dist, model, optimizer, range(2))
    state_dict_saver.save(state_of(model, optimizer), checkpoint_id=folder / "saved")
    after = whole(model)
    step_sharded(dist, model, optimizer, range(2, 4))

    other = sharded(dist)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3)
    step_sharded(dist, other, other_optimizer, range(9, 10))
    state = state_of(other, other_optimizer)
    state_dict_loader.load(state, checkpoint_id=folder / "saved")
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    for name, t in whole(other).items():
        assert torch.equal(t, after[name]), name
    step_sharded(dist, other, other_optimizer, range(2, 4))
    result = whole(other)
    for name, t in whole(model).items():
        assert torch.equal(t, result[name]), name
    return result


@feature(first_on="")
def checkpoint_in_the_background(dist: Dist, folder: Path) -> Weights:
    """While training goes on, so in a group of its own; named with its device, too."""
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    saved, trained = {}, made()
    wrapped = parallel(trained)
    for name in (dist.get_backend(), f"cpu:{dist.get_backend()}"):
        group = dist.new_group(backend=name)
        saved = snapshot(trained)
        future: Any = state_dict_saver.async_save(
            {"model": saved}, checkpoint_id=folder / name, process_group=group
        )
        train(dist, wrapped, range(2))
        future.result()
        loaded = {"model": {key: torch.zeros_like(t) for key, t in saved.items()}}
        state_dict_loader.load(loaded, checkpoint_id=folder / name)
        for key, t in loaded["model"].items():
            assert torch.equal(t, saved[key]), key
        dist.destroy_process_group(group)
    return saved


# torch.compile. One row of it is enough in `make test`.


class WithBreak(nn.Module):
    """With BatchNorm, whose buffers DDP broadcasts in its forward pass, and a graph break."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Linear(64, 700)
        self.norm = nn.BatchNorm1d(700)
        self.odd = nn.Linear(700, 700)
        self.last = nn.Linear(700, 5)

    def forward(self, x: Tensor, odd: bool = True) -> Any:
        x = torch.relu(self.norm(self.first(x)))
        torch._dynamo.graph_break()
        return self.last(x + self.odd(x))


def compiled(what: Any, compiler: str = "aot_eager") -> Any:
    torch.compiler.reset()  # all features share a process
    return torch.compile(what, backend=compiler)


def parameters(model: nn.Module) -> Weights:
    """Return copies of the parameters. A rank's statistics differ until its next forward pass."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@feature(first_on="", sizes=(2,))
def compiled_ddp(dist: Dist, folder: Path) -> Weights:
    wrapped = parallel(WithBreak())
    train(dist, compiled(wrapped))
    return parameters(wrapped)


@feature(first_on="", sizes=(2,))
def collectives_in_a_compiled_function(dist: Dist, folder: Path) -> Weights:
    """torch puts some of them into the graph, and breaks it for the others."""

    def run(x: Tensor) -> tuple[Tensor, ...]:
        summed, sent, parts = (
            x * 2,
            x * 3,
            [torch.empty_like(x) for _ in range(dist.get_world_size())],
        )
        dist.all_reduce(summed)
        work = dist.broadcast(sent, 1, async_op=True)
        dist.all_gather(parts, x + summed)
        work.wait()
        dist.barrier()
        return summed + 1, sent + 1, torch.cat(parts)

    run = compiled(run)
    results = [t for n in range(2) for t in run(torch.arange(5.0) + dist.get_rank() + n)]
    return {str(i): t for i, t in enumerate(results)}


@feature(first_on="", sizes=(2,))
def compiled_fsdp2(dist: Dist, folder: Path) -> Weights:
    """Compiled before and after it is sharded."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    trained: Weights = {}
    for when in ("before", "after"):
        model: nn.Module = WithBreak()
        if when == "before":
            model = compiled(model)
        fully_shard(model.get_submodule("odd"), mesh=mesh)
        fully_shard(model, mesh=mesh)
        net = model if when == "before" else compiled(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(net, dist.get_rank(), step).backward()
            optimizer.step()
        trained |= {f"{when} {name}": t for name, t in whole(model).items()}
    return trained


# Groups of the script's own


@feature(first_on="")
def training_is_not_disturbed_by_other_groups(dist: Dist, folder: Path) -> Weights:
    """Metrics and messages of the script's own between, in and beside DDP's."""
    other = dist.new_group()
    wrapped = parallel(made())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(wrapped, dist.get_rank(), step)
        beside = dist.all_reduce(loss.detach().clone(), group=other, async_op=True)
        loss.backward()
        dist.all_reduce(loss.detach())
        beside.wait()
        optimizer.step()
        told = [step]
        dist.broadcast_object_list(told, src=0)
    dist.destroy_process_group(other)
    return snapshot(wrapped.module)
