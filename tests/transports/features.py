"""What PyTorch builds on torch.distributed: the same training on every transport. What the backend
`ddp` uses of DDP is in tests/backends.

Each feature is a function of torch.distributed and a folder that every rank calls. It trains, and
returns the weights; test_features.py compares them, over the ranks and with Gloo's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# What torch warns of when it is imported is not for the process of the tests to see: the rest of
# torch.distributed is imported where it is used.
Dist = Any
Weights = dict[str, Tensor]
Training = Callable[[Dist, Path], Weights]


class Net(nn.Module):
    """More than 1 MiB: its buckets are moved into shared memory. Compiled, it is two graphs, as the
    tests of backends/contract.py want it.
    """

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
) -> Weights:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    return weights_of(model)


def ddp_with_views_and_many_buckets(dist: Dist, folder: Path) -> Weights:
    wrapped = parallel(Net(), gradient_as_bucket_view=True, bucket_cap_mb=1)
    return train(dist, wrapped)


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


def ddp_with_uneven_inputs_of_those_left(dist: Dist, folder: Path) -> Weights:
    """Divided by the ranks that still train: DDP takes their number from an all-reduce of its."""
    wrapped = parallel(Net())
    with wrapped.join(divide_by_initial_world_size=False):
        train(dist, wrapped, range(3 + 2 * dist.get_rank()))
    return weights_of(wrapped)


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


def checkpoint(dist: Dist, folder: Path) -> Weights:
    """FSDP2. Saved in the background, while training goes on, so in a group of its own; named with
    its device, too.
    """
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def begun(steps: Iterable[int]) -> tuple[Any, Any, dict[str, Any]]:
        model = sharded(dist, Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train(dist, model, steps, optimizer)
        weights, state = get_state_dict(model, optimizer)
        return model, optimizer, {"model": weights, "optimizer": state, "note": {"rank": "all"}}

    model, optimizer, state = begun(range(2))
    for name in (dist.get_backend(), f"cpu:{dist.get_backend()}"):
        group = dist.new_group(backend=name)
        future: Any = state_dict_saver.async_save(
            state, checkpoint_id=folder / name, process_group=group
        )
        train(dist, model, range(2), optimizer)
        future.result()
        dist.destroy_process_group(group)
        model, optimizer, state = begun(range(9, 10))
        state_dict_loader.load(state, checkpoint_id=folder / name)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
    return train(dist, model, range(2, 4), optimizer)


# torch.compile, in `make test-rest` alone; of DDP, as backends use it, in tests/backends.


def collectives_in_a_compiled_function(dist: Dist, folder: Path) -> Weights:
    """torch puts some of them into the graph, and breaks it for the others."""

    def run(x: Tensor) -> Tensor:
        summed, sent = x * 2, x * 3
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_reduce(summed)
        work = dist.broadcast(sent, 1, async_op=True)
        dist.all_gather(parts, x + summed)
        work.wait()
        dist.barrier()
        return torch.cat([summed + 1, sent + 1, *parts])

    torch.compiler.reset()  # all features share a process
    compiled: Any = torch.compile(run, backend="aot_eager")
    return {f"call {n}": compiled(torch.arange(5.0) + dist.get_rank() + n) for n in range(2)}


FEATURES: dict[Training, str] = {
    ddp_with_views_and_many_buckets: "shm",
    ddp_with_power_sgd: "",
    ddp_with_uneven_inputs_of_those_left: "shm",
    zero_redundancy_optimizer: "shm",
    checkpoint: "shm mpi4py",
    collectives_in_a_compiled_function: "",
}
"""The rows of the table, each with the transports on which `make test` runs it."""
