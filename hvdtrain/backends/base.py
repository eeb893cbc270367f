"""The contract of a backend: `Backend`, its options, and the code that all backends share.

The Trainer, `hvdtrain compare` and users' own loops call it; the files beside this one implement
it. A subclass supplies the collectives and the averaging of gradients. What usually differs between
engines (initial state, buffers, missing gradients, errors) is written once, here.

To add a backend: write a subclass in its own file, and add a row to the table in `__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hvdtrain import failure
from hvdtrain.errors import HvdtrainError, InputError, WorldMismatch
from hvdtrain.trees import map_tree
from hvdtrain.world import World, is_mpi

Op = Literal["mean", "sum", "min", "max"]
OPS: tuple[Op, ...] = ("mean", "sum", "min", "max")
T = TypeVar("T")
B = TypeVar("B", bound="Backend")


@dataclass(frozen=True)
class BackendOptions:
    """Options of every backend. They must be equal on all ranks."""

    device: str = "auto"
    """`auto`, `cpu` or `cuda`; auto is CUDA if this host has a GPU for each of its ranks."""
    transport: str = "auto"
    timeout_s: float = 300.0
    """Seconds that a rank waits for its peers, in a rendezvous or in a collective."""
    bucket_mib: float = 25.0
    buffers: Literal["broadcast", "average", "local"] = "broadcast"
    """How BatchNorm statistics and other buffers are synchronised after every step: broadcast from
    rank 0, averaged (floating-point buffers; the others are broadcast), or left local.
    """
    unused_parameters: Literal["error", "zero"] = "error"
    """How a parameter without a gradient is treated: an error that names it, or a gradient of zeros
    (so that weight decay and momentum apply).
    """


class Backend(ABC):
    """One data-parallel world: averages gradients and combines small values over all ranks.

    [all] marks a collective: every rank calls it, in the same order. Use a backend as a context
    manager: leaving the block closes it, and under an MPI launcher an exception that leaves the
    block aborts the whole job.
    """

    name: ClassVar[str]
    one_process: ClassVar[bool] = False
    """Whether the backend is meant for one process. With one rank, the others add a hint how to
    start more.
    """

    transport: str = ""
    """The name of the transport, if `options.transport` selects one; else empty."""

    def __init__(self, world: World, options: BackendOptions) -> None:
        self.world = world
        self.options = options
        self.device = pick_device(world, options.device)
        self.reason = "as requested"
        """Why this backend was chosen."""
        self.hosts: list[str] = []
        """The host of every rank, in rank order; empty before the handshake."""
        # Keyed by id(optimizer). The optimizer is kept alive too, so that its id is not reused.
        self._prepared: dict[int, tuple[Optimizer, nn.Module, dict[Tensor, str]]] = {}
        self._sparse: dict[int, list[Tensor]] = {}
        """The parameters whose gradients are sparse, keyed by id(optimizer)."""

    # Availability, opening and closing

    @classmethod
    def unavailable(cls) -> str | None:
        """Return None if this host can run the backend, else the problem and its fix.

        Not collective.
        """
        return None

    @classmethod
    def refuses(cls, world: World) -> str | None:
        """Return None if the backend works under the launcher of `world`, else the problem and fix.

        Not collective.
        """
        return None

    @abstractmethod
    def open(self) -> None:
        """[all] Join the world. Raises WorldError, WorldMismatch or BackendUnavailable."""

    def close(self, failed: bool = False) -> None:  # noqa: B027 -- single has nothing to leave
        """[all] Leave the world. Safe to call twice, and after a failure.

        `failed`: do not wait for the other ranks.
        """

    def describe(self) -> dict[str, Any]:
        """Return the versions, the transport and the sizes in use, for run.json. Not collective."""
        return {"name": self.name, "device": str(self.device), "torch": torch.__version__}

    def peer_failure(self, error: Exception) -> HvdtrainError | None:
        """Return a WorldError if `error` means that a peer died or is late, else None.

        Not collective.
        """
        return None

    # Training

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """[all] Wrap both. Weights, buffers and existing optimizer state become rank 0's.

        `model` must be on `self.device` already. Load state and build a scheduler afterwards, on
        the returned objects: a backend may make a new optimizer. Keep `model` for `state_dict()`:
        the wrapper may change its names. Raises WorldMismatch if the models differ in a name, shape
        or dtype, and InputError if model and optimizer do not belong together.
        """
        _check_owned(model, optimizer)
        self._convert_sync_batch_norm(model)
        self._check_same_model(model)
        self.sync_state(model, optimizer)
        net, wrapped = self._wrap(model, optimizer)
        names: dict[Tensor, str] = {p: uncompiled(name) for name, p in model.named_parameters()}
        self._prepared[id(wrapped)] = (wrapped, model, names)
        self._sparse[id(wrapped)] = with_sparse_gradients(model)
        return net, wrapped

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        return model, optimizer

    def sync_batch_norm(self) -> type[_BatchNorm] | None:
        """Return the class of layers that normalize over the batches of all ranks on this backend
        and device, with the parameters of torch.nn.SyncBatchNorm; None if there is none.
        """
        return None

    def _convert_sync_batch_norm(self, model: nn.Module) -> None:
        """Replace the class of torch's SyncBatchNorm layers, in place, by one that works here.

        Raises InputError if there is none: torch's own would crash on a CPU, or silently normalize
        each rank's batch alone.
        """
        # The exact type: a subclass may behave differently.
        layers = {n: m for n, m in model.named_modules() if type(m) is nn.SyncBatchNorm}
        if not layers:
            return
        kind = self.sync_batch_norm() if self.world.size > 1 else _OneRankBatchNorm
        if kind is None:
            raise InputError(
                f"{len(layers)} layers are torch.nn.SyncBatchNorm ({', '.join(layers)}), which "
                f"backend {self.name} cannot synchronise on {self.device.type}; use --backend "
                "compat, which can, or plain BatchNorm"
            )
        for layer in layers.values():
            # Only the class changes: parameters, buffers and names stay the same.
            layer.__class__ = kind  # type: ignore[assignment]

    def sync_state(self, model: nn.Module, optimizer: Optimizer) -> None:
        """[all] Broadcast rank 0's weights, buffers and optimizer state, in place.

        Optimizer state is only copied. It is never created by a step on zero gradients, which would
        decay the weights.
        """
        if self.world.size == 1:
            return
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                self._broadcast_any(tensor)
        skeleton, tensors = _extract_tensors(to_cpu(optimizer.state_dict()))
        skeleton = self.broadcast_object(skeleton)
        if self.world.rank > 0:
            state, tensors = _insert_tensors(skeleton)
        for tensor in tensors:  # one by one: a single pickled object may exceed 2 GiB
            self.broadcast_(tensor)
        if self.world.rank > 0:
            optimizer.load_state_dict(state)

    def accumulate(self, net: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Return a context manager for the forward and backward pass of one micro-batch.

        `last`: the next call is `finish_backward`.

        Gradients add up over the micro-batches of a step, its window: divide the loss by their
        number.
        """
        return nullcontext()

    def finish_backward(self, optimizer: Optimizer) -> None:
        """[all] Finish the averaging: AFTERWARDS `p.grad` IS THE MEAN OVER ALL RANKS, on every
        backend. Also coalesce sparse gradients, and synchronise buffers by their policy.

        Call it once a window, before unscaling, clipping and stepping. Raises InputError with the
        names of the parameters without a gradient, unless `unused_parameters` is "zero".
        """
        if id(optimizer) not in self._prepared:
            raise ValueError("finish_backward wants the optimizer that prepare returned")
        _, model, names = self._prepared[id(optimizer)]
        self.settle_unused(optimizer, names)
        self._reduce_gradients(optimizer)
        for p in self._sparse[id(optimizer)]:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.coalesce()
        if self.world.size > 1:
            self.sync_buffers(model)

    def names(self, optimizer: Optimizer) -> dict[Tensor, str]:
        """Return the names of a prepared optimizer's parameters, by tensor. Not collective."""
        return self._prepared[id(optimizer)][2]

    def _reduce_gradients(self, optimizer: Optimizer) -> None:  # noqa: B027
        """[all] Average the gradients, or wait until they are averaged.

        A backend that averages within the backward pass has nothing to do here.
        """

    # Small values

    @abstractmethod
    def all_reduce(self, t: Tensor, op: Op = "mean") -> Tensor:
        """[all] Combine `t` over all ranks. Return a new tensor; `t` is unchanged.

        The result has the shape, dtype and device of `t`. Raises ValueError for an unknown op, and
        for the mean of integers.
        """

    @abstractmethod
    def broadcast_(self, t: Tensor, root: int = 0) -> Tensor:
        """[all] Overwrite `t`, which must be contiguous, with the root's, in place; return it."""

    @abstractmethod
    def broadcast_object(self, obj: T, root: int = 0) -> T:
        """[all] Return the root's `obj`. Pickle: trusted peers only."""

    @abstractmethod
    def all_gather_object(self, obj: T) -> list[T]:
        """[all] Return every rank's `obj`, in rank order. Pickle: trusted peers only."""

    @abstractmethod
    def barrier(self) -> None:
        """[all] Return once every rank has called."""

    @contextmanager
    def together(self) -> Iterator[None]:
        """[all] Raise an HvdtrainError of the block on every rank, so that no rank waits for one
        that failed.

        If several ranks fail, the error of the lowest is raised. The block must not contain a
        collective. Any other exception propagates unchanged, on its own rank only.
        """
        mine: HvdtrainError | None = None
        try:
            yield
        except HvdtrainError as error:
            mine = error
        errors = self.all_gather_object(None if mine is None else (type(mine), str(mine)))
        failed = [rank for rank, error in enumerate(errors) if error is not None]
        if not failed:
            return
        kind, text = cast("tuple[type[HvdtrainError], str]", errors[failed[0]])
        if len(failed) < len(errors):
            text = f"rank {failed[0]}: {text}"
        shared = kind(text)
        shared.on_all_ranks = True
        raise shared from mine

    # Shared parts

    def check_same(self, values: Mapping[str, object], advice: str = "") -> None:
        """[all] Raise WorldMismatch, on every rank, for the first of `values` that differs between
        ranks. The message has both values, then `advice` on what to do.
        """
        everyone = self.all_gather_object(dict(values))
        for rank, other in enumerate(everyone):
            for key, value in everyone[0].items():
                if other.get(key) != value:
                    error = WorldMismatch(
                        f"rank 0{self._on_host(0)} has {key} = {value}, but rank {rank}"
                        f"{self._on_host(rank)} has {other.get(key, 'nothing')}{advice}"
                    )
                    error.on_all_ranks = True  # every rank gathered the same lists
                    raise error

    def _on_host(self, rank: int) -> str:
        return f" on {self.hosts[rank]}" if self.hosts else ""

    @contextmanager
    def naming_peers(self) -> Iterator[None]:
        """Replace an exception that means a lost peer by `peer_failure`'s error. Not collective."""
        try:
            yield
        except Exception as error:
            known = self.peer_failure(error)
            if known is None:
                raise
            raise known from error

    def __enter__(self: B) -> B:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            with self.naming_peers():
                self.close()
            return
        error = failure.cause_of(error)
        known = self.peer_failure(error) if isinstance(error, Exception) else None
        shared = False
        if isinstance(error, HvdtrainError):
            error.after_open, shared = True, error.on_all_ranks
        # Every rank leaves its block by a shared error: they can still wait for each other.
        self.close(failed=not shared)
        if self.world.size > 1 and is_mpi(self.world) and failure.exit_code(error) != 0:
            failure.end_job(self.world, known or error)
        if known is not None:
            raise known from error

    def _check_same_model(self, model: nn.Module) -> None:
        """[all] Raise WorldMismatch if a name, shape or dtype differs from another rank's."""
        mine = [
            (name, tuple(t.shape), str(t.dtype))
            for name, t in (*model.named_parameters(), *model.named_buffers())
        ]
        for rank, other in enumerate(self.all_gather_object(mine)):
            if other != mine:
                pair = next(
                    p for p in zip([*mine, None], [*other, None], strict=False) if p[0] != p[1]
                )
                raise WorldMismatch(
                    f"the model differs: rank {self.world.rank} has {pair[0]}, "
                    f"rank {rank} has {pair[1]}"
                )

    def settle_unused(self, optimizer: Optimizer, names: dict[Tensor, str]) -> None:
        """Refuse parameters without a gradient, or give them a gradient of zeros. Not collective.

        `finish_backward` calls it; a loop that reduces gradients by itself calls it after that.
        Raises InputError with their `names`.
        """
        unused = [
            p
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is None and p.requires_grad
        ]
        if not unused:
            return
        if self.options.unused_parameters == "error":
            listed = ", ".join(names.get(p, "(not in the model)") for p in unused)
            raise InputError(
                f"{len(unused)} parameters got no gradient: {listed}; freeze or remove them, or "
                "allow them with --unused-parameters zero"
            )
        for p in unused:
            p.grad = torch.zeros_like(p)

    def sync_buffers(self, model: nn.Module) -> None:
        """[all] Apply the policy for buffers, with one collective for all buffers of a dtype.

        `finish_backward` calls it; a loop that reduces gradients by itself calls it after that.
        """
        if self.options.buffers == "local":
            return
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in model.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        with torch.no_grad():
            for dtype, buffers in by_dtype.items():
                flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
                # Integer buffers, such as num_batches_tracked, have no exact mean.
                if self.options.buffers == "average" and dtype.is_floating_point:
                    flat = self.all_reduce(flat, "mean")
                else:
                    self.broadcast_(flat)
                parts = torch.split(flat, [buffer.numel() for buffer in buffers])
                for buffer, part in zip(buffers, parts, strict=True):
                    buffer.copy_(part.view_as(buffer))

    def _broadcast_any(self, t: Tensor) -> None:
        """[all] Broadcast rank 0's `t`, in place, in any memory format, such as channels_last."""
        if t.is_contiguous():
            self.broadcast_(t.detach())
        else:
            t.copy_(self.broadcast_(t.detach().contiguous()))


class _OneRankBatchNorm(_BatchNorm):
    """torch.nn.SyncBatchNorm for a world of one rank, on any device."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def check_op(t: Tensor, op: Op) -> None:
    """Raise ValueError for an unknown op, and for the mean of integers. Not collective."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; one of: {', '.join(OPS)}")
    if op == "mean" and not (t.is_floating_point() or t.is_complex()):
        raise ValueError(f"the mean of integers ({t.dtype}) has no exact meaning; use sum")


def pick_device(world: World, wanted: str) -> torch.device:
    """Return this rank's device: `cuda:<local_rank>` or the CPU. Not collective.

    Raises InputError for an unknown device, and if the GPUs are too few for the host's ranks.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Neither falling back to the CPU nor sharing a GPU would be what the user expects.
    if wanted == "auto" and 0 < count < world.local_size:
        raise InputError(
            f"{world} sees {count} GPUs for the {world.local_size} ranks of its host; say "
            f"--device cuda if every rank sees a GPU of its own, or --device cpu"
        )
    if wanted == "auto":
        wanted = "cuda" if count else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted != "cuda":
        raise InputError(f"unknown device {wanted!r}; one of: auto, cpu, cuda")
    if count == 1:  # the host's only GPU, or the only one visible to this rank
        return torch.device("cuda", 0)
    if count < world.local_size:
        raise InputError(
            f"--device cuda wants a GPU for each rank; this host has {world.local_size} ranks and "
            f"{count} GPUs that torch {torch.__version__} can use"
        )
    return torch.device("cuda", world.local_rank)


def _check_owned(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise InputError unless the optimizer has the model's trained parameters and no others.

    A parameter outside the model would be stepped without being averaged.
    """
    trained = {uncompiled(name): p for name, p in model.named_parameters() if p.requires_grad}
    if lazy := [name for name, p in trained.items() if is_lazy(p)]:
        raise InputError(
            f"{len(lazy)} parameters have no shape yet: {', '.join(lazy)}; run a batch through the "
            "model before it is returned, or give its layers their sizes"
        )
    if not trained:
        raise InputError(f"{type(model).__name__} has no parameter that requires a gradient")
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, p in trained.items() if p not in stepped]
    if left_out:
        raise InputError(
            f"the optimizer does not have {len(left_out)} parameters of the model: "
            f"{', '.join(left_out)}; add them, or freeze them with requires_grad_(False)"
        )
    foreign = len(stepped - set(model.parameters()))
    if foreign:
        raise InputError(
            f"the optimizer has {foreign} parameters that are not the model's; make them part of it"
        )


def with_sparse_gradients(model: nn.Module) -> list[Tensor]:
    """Return the trained parameters whose gradients are sparse, by the same rule as DDP."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    weights = [m.weight for m in model.modules() if isinstance(m, tables) and m.sparse]
    return [p for p in dict.fromkeys(weights) if p.requires_grad]


@dataclass(frozen=True)
class _TensorPlaceholder:
    """The place of a tensor in a structure that is sent without its tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _extract_tensors(tree: Any) -> tuple[Any, list[Tensor]]:
    """Return a copy of a nested structure with placeholders for its tensors, and the tensors."""
    tensors: list[Tensor] = []

    def extract(t: Tensor) -> _TensorPlaceholder:
        tensors.append(t.contiguous())
        return _TensorPlaceholder(tuple(t.shape), t.dtype)

    return map_tree(extract, Tensor, tree), tensors


def _insert_tensors(tree: Any) -> tuple[Any, list[Tensor]]:
    """Return a copy with new, uninitialised tensors at the placeholders, and these in order."""
    tensors: list[Tensor] = []

    def insert(place: _TensorPlaceholder) -> Tensor:
        tensors.append(torch.empty(place.shape, dtype=place.dtype))
        return tensors[-1]

    return map_tree(insert, _TensorPlaceholder, tree), tensors


def to_cpu(tree: Any) -> Any:
    """Return a copy of a nested structure with every tensor on the CPU, without its graph."""
    return map_tree(lambda t: t.detach().cpu(), Tensor, tree)


def uncompiled(name: str) -> str:
    """Return a parameter's name without the `_orig_mod` that torch.compile inserts."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
