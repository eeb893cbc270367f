"""What every backend does to a model, its gradients and its buffers, written once.

`Backend.prepare` and `Backend.average_gradients` call these functions; `training` and `compare`
call some of them too. Every rank calls a collective one, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hvdtrain.errors import InputError, WorldMismatch
from hvdtrain.job.world import World
from hvdtrain.optim.global_batch_norm import GlobalBatchNorm
from hvdtrain.system.trees import map_tree, parameters_of

T = TypeVar("T")


class Collectives(Protocol):
    """What the functions here need of a `Backend`, which is in a later layer."""

    @property
    def world(self) -> World:
        """The ranks."""

    @property
    def options(self) -> Any:
        """Has `buffers`, the policy for them: see `BackendOptions`."""

    def all_reduce(self, t: Tensor, op: Literal["mean", "sum", "max"] = "mean") -> Tensor:
        """Return the reduction over all ranks. Collective."""

    def broadcast_(self, t: Tensor, root: int = 0) -> Tensor:
        """Overwrite `t` with the root's; return it. Collective."""

    def broadcast_object(self, obj: T, root: int = 0) -> T:
        """Return the root's `obj`. Collective."""

    def all_gather_object(self, obj: T) -> list[T]:
        """Return every rank's `obj`, in rank order. Collective."""


# Model and optimizer, before training


def check_ownership(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise InputError unless the optimizer has the model's trained parameters and no others.

    A parameter outside the model would be stepped without being averaged.
    """
    trained = {uncompiled(name): p for name, p in model.named_parameters() if p.requires_grad}
    if lazy := [name for name, p in trained.items() if is_lazy(p)]:
        raise InputError(
            f"parameters without a shape: {', '.join(lazy)}; run a batch through the model before "
            "it is returned, or give its layers their sizes"
        )
    if not trained:
        raise InputError(f"{type(model).__name__} has no parameter that requires a gradient")
    stepped = set(parameters_of(optimizer))
    left_out = [name for name, p in trained.items() if p not in stepped]
    if left_out:
        raise InputError(
            f"the optimizer lacks parameters of the model: {', '.join(left_out)}; add them, or "
            "freeze them with requires_grad_(False)"
        )
    foreign = len(stepped - set(model.parameters()))
    if foreign:
        raise InputError(
            f"parameters of the optimizer that the model lacks: {foreign}; make them part of it"
        )


def check_same_model(backend: Collectives, model: nn.Module) -> None:
    """Raise WorldMismatch if a name, shape or dtype differs from another rank's. Collective."""
    mine = [
        (name, tuple(t.shape), str(t.dtype))
        for name, t in (*model.named_parameters(), *model.named_buffers())
    ]
    for rank, other in enumerate(backend.all_gather_object(mine)):
        if other != mine:
            pair = next(p for p in zip([*mine, None], [*other, None], strict=False) if p[0] != p[1])
            raise WorldMismatch(
                f"the model differs: rank {backend.world.rank} has {pair[0]}, "
                f"rank {rank} has {pair[1]}"
            )


def convert_sync_batch_norm(model: nn.Module, kind: type[nn.Module]) -> None:
    """Replace the class of torch's SyncBatchNorm layers, in place, by `kind`. Not collective.

    torch's own layer would crash on a CPU, or normalize each rank's batch alone without a word.
    """
    for layer in model.modules():
        # The exact type: a subclass may behave differently.
        if type(layer) is nn.SyncBatchNorm:
            # Only the class changes: parameters, buffers and names stay the same.
            layer.__class__ = kind  # type: ignore[assignment]


class OneRankBatchNorm(GlobalBatchNorm):
    """torch.nn.SyncBatchNorm for a world of one rank, on any device."""


def broadcast_state(
    backend: Collectives, model: nn.Module, optimizer: Optimizer, root: int = 0
) -> None:
    """Broadcast the root's weights, buffers and optimizer state, in place. Collective.

    Optimizer state is only copied. It is never created by a step on zero gradients, which would
    decay the weights.
    """
    if backend.world.size == 1:
        return
    broadcast_weights(backend, model, root)
    state = broadcast_tree(backend, to_cpu(optimizer.state_dict()), root)
    if backend.world.rank != root:
        optimizer.load_state_dict(state)


def broadcast_tree(backend: Collectives, tree: Any, root: int = 0) -> Any:
    """Return the root's nested structure of values and CPU tensors. Collective."""
    tensors: list[Tensor] = []

    def extract(t: Tensor) -> _TensorPlaceholder:
        tensors.append(t.contiguous())
        return _TensorPlaceholder(t.shape, t.dtype)

    def receive(place: _TensorPlaceholder) -> Tensor:
        return backend.broadcast_(torch.empty(place.shape, dtype=place.dtype), root)

    skeleton = backend.broadcast_object(map_tree(extract, Tensor, tree), root)
    if backend.world.rank != root:  # in the root's order, which is that of the structure
        return map_tree(receive, _TensorPlaceholder, skeleton)
    for tensor in tensors:  # one by one: a single pickled object may exceed 2 GiB
        backend.broadcast_(tensor, root)
    return tree


def broadcast_weights(backend: Collectives, model: nn.Module, root: int = 0) -> None:
    """Broadcast the root's weights and buffers, in place. Collective."""
    with torch.no_grad():
        for t in (*model.parameters(), *model.buffers()):
            if t.is_contiguous():
                backend.broadcast_(t.detach(), root)
            else:  # another memory format, such as channels_last
                t.copy_(backend.broadcast_(t.detach().contiguous(), root))


@dataclass(frozen=True)
class _TensorPlaceholder:
    """The place of a tensor in a structure that is sent without its tensors."""

    shape: torch.Size
    dtype: torch.dtype


def to_cpu(tree: Any) -> Any:
    """Return a copy of a nested structure with every tensor on the CPU, without its graph."""
    return map_tree(lambda t: t.detach().cpu(), Tensor, tree)


def uncompiled(name: str) -> str:
    """Return a parameter's name without the `_orig_mod` that torch.compile inserts."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


# Gradients and buffers, after each backward pass


def with_sparse_gradients(model: nn.Module) -> list[Tensor]:
    """Return the trained parameters whose gradients are sparse, by the same rule as DDP."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    weights = [m.weight for m in model.modules() if isinstance(m, tables) and m.sparse]
    return [p for p in dict.fromkeys(weights) if p.requires_grad]


def fill_missing_gradients(
    optimizer: Optimizer, names: dict[Tensor, str], policy: Literal["error", "zero"]
) -> None:
    """Refuse parameters without a gradient, or give them a gradient of zeros. Not collective.

    Raises InputError with their `names` if the policy is "error".
    """
    unused = [p for p in parameters_of(optimizer) if p.grad is None and p.requires_grad]
    if not unused:
        return
    if policy == "error":
        listed = ", ".join(names.get(p, "(not in the model)") for p in unused)
        raise InputError(
            f"parameters without a gradient: {listed}; freeze or remove them, or allow them with "
            "--unused-parameters zero"
        )
    for p in unused:
        p.grad = torch.zeros_like(p)


def sync_buffers(backend: Collectives, buffers: Iterable[Tensor]) -> None:
    """Apply the policy for buffers, with one collective for all buffers of a dtype. Collective."""
    policy = backend.options.buffers
    if policy == "local" or backend.world.size == 1:
        return

    def combine(flat: Tensor) -> Tensor:
        # Integer buffers, such as num_batches_tracked, have no exact mean.
        if policy == "average" and flat.is_floating_point():
            return backend.all_reduce(flat, "mean")
        return backend.broadcast_(flat)

    apply_flat(combine, buffers)


def average(backend: Collectives, tensors: Iterable[Tensor]) -> None:
    """Replace tensors by their means over all ranks, in place: one collective for each dtype.
    Collective.
    """
    apply_flat(lambda flat: backend.all_reduce(flat, "mean"), tensors)


@torch.no_grad()
def apply_flat(combine: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> None:
    """Replace tensors, in place, by what `combine` makes of them, flattened into one tensor for
    each dtype. Collective if `combine` is.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        by_dtype.setdefault(t.dtype, []).append(t)
    for same in by_dtype.values():
        flat = combine(torch.cat([t.reshape(-1) for t in same]))
        parts = torch.split(flat, [t.numel() for t in same])
        for t, part in zip(same, parts, strict=True):
            t.copy_(part.view_as(t))
