"""What PyTorch builds on torch.distributed: the same training on every transport. What the backend
`ddp` uses of DDP is in tests/backends.

Each feature is a function of torch.distributed and a folder that every rank calls. It trains, and
returns the weights; test_features.py compares them, over the ranks and with Gloo's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# What torch warns of when it is imported is not for the process of the tests to see: the rest of
# torch.distributed is imported where it is used.
Dist = Any
Weights = dict[str, Tensor]
Training = Callable[[Dist, Path], Weights]


@dataclass(frozen=True)
class Feature:
    """A row of the table."""

    function: Training
    first_on: str  # the transport on which `make test` runs it; "" is none

    @property
    def name(self) -> str:
        return self.function.__name__

    def is_first_on(self, transport: str, n: int) -> bool:
        """Return whether `make test` runs the row there."""
        return transport == self.first_on


FEATURES: list[Feature] = []


def feature(first_on: str = "shm") -> Callable[[Training], Training]:
    """Make a function a row of the table."""

    def add(function: Training) -> Training:
        FEATURES.append(Feature(function, first_on))
        return function

    return add


class Net(nn.Module):
    """More than 1 MiB: its buckets are moved into shared memory. Compiled, it is two graphs."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Linear(64, 600)
        self.norm = norm(600)
        self.middle = nn.Linear(600, 600, bias=False)
        self.last = nn.Linear(600, 5)

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.norm(self.first(x)))
        torch._dynamo.graph_break()
        return self.last(x + self.middle(x))


def loss_of(model: Any, rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(8, 64, generator=generator)
    return nn.functional.mse_loss(model(x), x[:, :5].sin())


def parallel(model: nn.Module, **options: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, **options)


def weights_of(model: nn.Module) -> Weights:
    """Return copies of the parameters, whole. The buffers of ranks may differ."""
    named: Iterable[tuple[str, Any]] = model.named_parameters()
    whole = ((name, getattr(p, "full_tensor", lambda p=p: p)()) for name, p in named)
    return {name: p.detach().clone() for name, p in whole}


def train(
    dist: Dist,
    model: nn.Module,
    steps: Iterable[int] = range(5),
    optimizer: Any = None,
    loss: Callable[[Any, int, int], Any] = loss_of,
) -> Weights:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        loss(model, dist.get_rank(), step).backward()
        optimizer.step()
    return weights_of(model)


@feature()
def ddp(dist: Dist, folder: Path) -> Weights:
    return train(dist, parallel(Net()))


@feature(first_on="")
def ddp_with_views_and_many_buckets(dist: Dist, folder: Path) -> Weights:
    wrapped = parallel(Net(), gradient_as_bucket_view=True, bucket_cap_mb=1)
    return train(dist, wrapped)


@feature(first_on="")
def ddp_with_power_sgd(dist: Dist, folder: Path) -> Weights:
    """In one bucket: with several, what follows a bucket's first collective is called by another
    thread at any time, so that ranks call collectives in different orders. Gloo ends the process.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    wrapped = parallel(Net(), bucket_cap_mb=100)
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

    wrapped = parallel(Net(), bucket_cap_mb=0.1)
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
    return weights_of(Net())


@feature()
def ddp_with_uneven_inputs_of_those_left(dist: Dist, folder: Path) -> Weights:
    """Divided by the ranks that still train: DDP takes their number from an all-reduce of its."""
    wrapped = parallel(Net())
    with wrapped.join(divide_by_initial_world_size=False):
        train(dist, wrapped, range(3 + 2 * dist.get_rank()))
    return weights_of(wrapped)


@feature()
def zero_redundancy_optimizer(dist: Dist, folder: Path) -> Weights:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = parallel(Net())
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
    )
    trained = train(dist, wrapped, range(4), optimizer)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == len(trained)
    return trained


# Sharded


def sharded(dist: Dist, model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.first, model.middle, model):
        fully_shard(part, mesh=mesh)
    return model


@feature(first_on="mpi4py")
def fsdp2(dist: Dist, folder: Path) -> Weights:
    n = dist.get_world_size()
    trained = train(dist, sharded(dist, Net()), range(3))

    def mean_loss(model: Any, _: int, step: int) -> Any:
        return sum(loss_of(model, rank, step) for rank in range(n)) / n

    alone = train(dist, Net(), range(3), loss=mean_loss)
    torch.testing.assert_close(trained, alone, rtol=1e-4, atol=1e-5)
    return trained


@feature()
def checkpoint(dist: Dist, folder: Path) -> Weights:
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def begun(steps: Iterable[int]) -> tuple[Any, Any, dict[str, Any]]:
        model = sharded(dist, Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(dist, model, steps, optimizer)
        weights, state = get_state_dict(model, optimizer)
        return model, optimizer, {"model": weights, "optimizer": state, "note": {"rank": "all"}}

    model, optimizer, state = begun(range(2))
    state_dict_saver.save(state, checkpoint_id=folder / "saved")
    saved, trained = weights_of(model), train(dist, model, range(2, 4), optimizer)
    other, other_optimizer, state = begun(range(9, 10))
    state_dict_loader.load(state, checkpoint_id=folder / "saved")
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    torch.testing.assert_close(weights_of(other), saved, rtol=0, atol=0)
    again = train(dist, other, range(2, 4), other_optimizer)
    torch.testing.assert_close(again, trained, rtol=0, atol=0)
    return again


@feature(first_on="")
def checkpoint_in_the_background(dist: Dist, folder: Path) -> Weights:
    """While training goes on, so in a group of its own; named with its device, too."""
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    saved, wrapped = {}, parallel(Net())
    for name in (dist.get_backend(), f"cpu:{dist.get_backend()}"):
        group = dist.new_group(backend=name)
        saved = weights_of(wrapped)
        future: Any = state_dict_saver.async_save(
            {"model": saved}, checkpoint_id=folder / name, process_group=group
        )
        train(dist, wrapped, range(2))
        future.result()
        loaded = {"model": {key: torch.zeros_like(t) for key, t in saved.items()}}
        state_dict_loader.load(loaded, checkpoint_id=folder / name)
        torch.testing.assert_close(loaded["model"], saved, rtol=0, atol=0)
        dist.destroy_process_group(group)
    return saved


# torch.compile, in `make test-rest` alone. With BatchNorm, whose buffers DDP broadcasts in its
# forward pass.


def compiled(what: Any, compiler: str = "aot_eager") -> Any:
    torch.compiler.reset()  # all features share a process
    return torch.compile(what, backend=compiler)


@feature(first_on="")
def compiled_ddp(dist: Dist, folder: Path) -> Weights:
    return train(dist, compiled(parallel(Net(nn.BatchNorm1d))))


@feature(first_on="")
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


@feature(first_on="")
def compiled_fsdp2(dist: Dist, folder: Path) -> Weights:
    """Compiled before and after it is sharded."""
    before = sharded(dist, compiled(Net(nn.BatchNorm1d)))
    trained = train(dist, before, range(3))
    after = compiled(sharded(dist, Net(nn.BatchNorm1d)))
    return trained | {f"after {name}": t for name, t in train(dist, after, range(3)).items()}


# Groups of the script's own


@feature(first_on="")
def training_is_not_disturbed_by_other_groups(dist: Dist, folder: Path) -> Weights:
    """Metrics and messages of the script's own between, in and beside DDP's."""
    other = dist.new_group()
    beside: list[Any] = []

    def loss(model: Any, rank: int, step: int) -> Any:
        own = loss_of(model, rank, step)
        for work in beside:
            work.wait()
        beside[:] = [dist.all_reduce(own.detach().clone(), group=other, async_op=True)]
        dist.all_reduce(own.detach())
        dist.broadcast_object_list([step], src=0)
        return own

    trained = train(dist, parallel(Net()), range(4), loss=loss)
    beside[0].wait()
    dist.destroy_process_group(other)
    return trained
