"""The contract of a backend: `Backend`, and the code that all backends share.

The Trainer, `hvdtrain compare` and users' own loops call it; the files beside this one implement
it. A subclass supplies the collectives and the averaging of gradients. What usually differs between
engines (initial state, buffers, missing gradients, errors) is written once, here.

To add a backend: write a subclass in its own file, and add a row to the table in `__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim import Optimizer

from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain._torch.peer_errors import is_peer_error
from hvdtrain.backends import backend_batch_norm
from hvdtrain.backends.device import pick_device
from hvdtrain.backends.options import BackendOptions
from hvdtrain.errors import (
    HvdtrainError,
    InputError,
    PeerLost,
    Preempted,
    WorldError,
    first_line,
)
from hvdtrain.job.addresses import network_in_use
from hvdtrain.job.job_secret import sign, unsign
from hvdtrain.job.world import World, is_mpi
from hvdtrain.liveness import failure
from hvdtrain.liveness.hang_watch import HangWatch
from hvdtrain.liveness.monitor import RankProgress
from hvdtrain.optim import model_sync, sharded_optimizer
from hvdtrain.optim.model_sync import uncompiled, with_sparse_gradients
from hvdtrain.optim.shared_tensors import Group
from hvdtrain.system.trees import parameters_of

Op = Literal["mean", "sum", "min", "max"]
Gradients = Literal["mean", "local"]
OPS: tuple[Op, ...] = ("mean", "sum", "min", "max")
T = TypeVar("T")
B = TypeVar("B", bound="Backend")


class RankState(Protocol):
    """State that differs between ranks, such as the errors of compressed gradients.

    The Trainer saves every rank's in its checkpoints, and gives it back to the same rank.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and numbers, in dicts and lists. Not collective."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, before the first step. Not collective."""


class Backend(ABC):
    """One data-parallel world: averages gradients and combines small values over all ranks.

    Every rank calls a collective, in the same order. Use a backend as a context manager: leaving
    the block closes it, and under an MPI launcher an exception that leaves the block aborts the
    whole job.
    """

    name: ClassVar[str]
    one_process: ClassVar[bool] = False
    """Whether the backend is meant for one process. With one rank, the other backends print
    how to start more.
    """

    compressions: ClassVar[tuple[str, ...]] = ("none",)
    """The values of `options.compression` that the backend has."""

    averages_thawed: ClassVar[bool] = False
    """Whether the engine averages parameters that were frozen in `prepare`, too."""

    can_shard_optimizer: ClassVar[bool] = False
    """Whether the backend has `options.shard_optimizer`."""

    transport: str = ""
    """The name of the transport, if `options.transport` selects one; else empty."""

    def __init__(self, world: World, options: BackendOptions) -> None:
        self.world = world
        self.options = options
        self.device = pick_device(world, options.device)
        self.reason = "as requested"
        """Why this backend was chosen."""
        self.rank_states: list[RankState] = []
        """This rank's own state between steps, one entry for each `prepare` that needs it."""
        self.hosts: list[str] = []
        """The host of every rank, in rank order; empty before the handshake."""
        self.progress = RankProgress()
        """What an error names if this rank is late or lost: the step, if the loop sets it."""
        self.optimizer_shares: list[int] = []
        """With `options.shard_optimizer`, once `prepare` was called: the ranks on each host."""
        self.store: Store | None = None
        """The engine's store, under a key prefix of these ranks; None if it has none."""
        self.hang_watch: HangWatch | None = None
        """The watch of the other ranks, by connections that do not depend on the engine; None with
        one rank, and before `open_backend` has opened them.
        """
        self._prepared: dict[int, _Prepared] = {}
        """What `prepare` has returned, keyed by id(optimizer)."""

    # Availability, opening and closing

    @classmethod
    def host_problem(cls) -> str | None:
        """Return None if this host can run the backend, else the problem and its fix.

        Not collective.
        """
        return None

    @classmethod
    def launcher_problem(cls, world: World) -> str | None:
        """Return None if the backend works under the launcher of `world`, else the problem and fix.

        Not collective.
        """
        return None

    @abstractmethod
    def open(self) -> None:
        """Join the world. Collective. Raises WorldError, WorldMismatch or BackendUnavailable."""

    def close(self, failed: bool = False) -> None:
        """Leave the world. Collective. Safe to call twice, and after a failure.

        `failed`: do not wait for the other ranks. A subclass calls this last.
        """
        if self.hang_watch is not None:
            self.hang_watch.monitor.close()
            self.hang_watch = None

    def describe(self) -> dict[str, Any]:
        """Return the versions, the transport and the sizes in use, for run.json. Not collective."""
        about: dict[str, Any] = {
            "name": self.name,
            "device": str(self.device),
            "torch": torch.__version__,
        }
        if self.options.shard_optimizer and self.optimizer_shares:
            about["optimizer_shares"] = self.optimizer_shares
        network = None if self.world.one_host else network_in_use()
        return about if network is None else {**about, "network": str(network)}

    def _peer_error(self, error: Exception) -> HvdtrainError | None:
        """Return a WorldError if `error` means that a peer died or is late, else None.

        Not collective.
        """
        if not (isinstance(error, PeerLost) or is_peer_error(error)):
            return None
        text = f"lost contact with a peer, which has ended or hangs: {first_line(error)}"
        if "connectFullMesh" in text and (network := network_in_use()) is not None:
            text += f" (Gloo uses {network}; GLOO_SOCKET_IFNAME can name another interface)"
        return WorldError(text)

    def _named_peer_error(self, error: Exception) -> HvdtrainError | None:
        """Return `_peer_error`, and what the peer does. Not collective; may take some seconds."""
        known = self._peer_error(error)
        return None if known is None else type(known)(f"{known}{self._explain(error)}")

    def _explain(self, error: Exception) -> str:
        """Return "; " and who was late, for the end of a message about `error`; "" before the watch
        has started. Not collective; may take some seconds.
        """
        return "" if self.hang_watch is None else f"; {self.hang_watch.explain(error)}"

    @contextmanager
    def _convert_peer_errors(self) -> Iterator[None]:
        """Raise `_named_peer_error` in place of an exception that means a lost peer."""
        try:
            yield
        except Exception as error:
            known = self._named_peer_error(error)
            if known is None:
                raise
            raise known from error

    # Training

    def prepare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        gradients: Gradients = "mean",
    ) -> tuple[nn.Module, Optimizer]:
        """Move the model to `self.device`, wrap it and its optimizer, and return the wrappers.
        Collective.

        Weights, buffers and existing optimizer state become rank 0's.

        `gradients`: what `p.grad` is after the context `gradients`. With "local" it stays this
        rank's own, nothing is wrapped, and the caller keeps the ranks equal, as `optim.LocalSGD`
        does.

        Load state and build a scheduler afterwards, on the returned objects: a backend may make a
        new optimizer. Keep `model` for `state_dict()`: the wrapper may change its names. Raises
        WorldMismatch if the models differ in a name, shape or dtype, and InputError if model and
        optimizer do not belong together.
        """
        model_sync.check_ownership(model, optimizer)
        model.to(self.device)
        kind = self._sync_batch_norm() if self.world.size > 1 else model_sync.OneRankBatchNorm
        model_sync.convert_sync_batch_norm(model, kind)
        model_sync.check_same_model(self, model)
        model_sync.broadcast_state(self, model, optimizer)
        names: dict[Tensor, str] = {p: uncompiled(name) for name, p in model.named_parameters()}
        if self.options.shard_optimizer:
            self._shard(optimizer, names, gradients)
        if gradients == "local":
            net, wrapped = model, optimizer
        else:
            net, wrapped = self._wrap(model, optimizer)
        sparse = with_sparse_gradients(model)
        trained = dict.fromkeys(p for p in names if p.requires_grad)
        shapes = {name: buffer.shape for name, buffer in model.named_buffers()}
        made = _Prepared(wrapped, model, net, names, trained, shapes, sparse, gradients)
        self._prepared[id(wrapped)] = made
        if gradients != "local":
            wrapped.register_step_pre_hook(made.begin_step)
            wrapped.register_step_post_hook(made.end_step)
        return net, wrapped

    def _shard(self, optimizer: Optimizer, names: dict[Tensor, str], gradients: Gradients) -> None:
        """Make each rank step its share of the parameters. Collective."""
        if gradients == "local":
            raise InputError("--shard-optimizer: gradients are not averaged; leave it out")
        group = Group(
            self.world.rank,
            self.world.size,
            self.all_gather_object,
            lambda flags: self.all_reduce(flags, "sum"),
        )
        self.optimizer_shares = sharded_optimizer.shard(optimizer, group, names)

    def _unshare_parameters(self) -> None:
        """Give this rank parameters of its own again, if it shares some: after `close` no other
        rank can change them. Not collective; called before the last barrier.
        """
        for made in self._prepared.values():
            if isinstance(made.optimizer, sharded_optimizer.ShardedOptimizer):
                made.optimizer.unshare_parameters()

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Wrap both in what the engine needs; by default return them as they are. Collective."""
        return model, optimizer

    def _sync_batch_norm(self) -> type[BatchNormBase]:
        """Return the class of layers that normalize over the batches of all ranks on this backend
        and device, with the parameters of torch.nn.SyncBatchNorm.
        """
        return backend_batch_norm.layer_of(self)

    @contextmanager
    def gradients(self, optimizer: Optimizer, last: bool = True) -> Iterator[None]:
        """Return a context for a forward and a backward pass: AFTERWARDS `p.grad` IS THE MEAN OVER
        ALL RANKS, on every backend (but see `prepare`). Collective.

        `optimizer`: what `prepare` returned, or one that has it as its `wrapped`. `last`: whether
        no further pass of this step follows. Only the last one averages; over the passes of a step
        the gradients are summed, so divide each loss by their number.

        Unscale, clip and step afterwards. The optimizer's next step raises InputError if nothing
        was averaged since the last one.
        """
        made = self._made_of(optimizer)
        if made.gradients == "local":
            yield
        else:
            with self._passes(made.net, made.optimizer, last):
                yield
        if last:
            self.average_gradients(optimizer)
            made.has_averaged = True

    def _passes(
        self, net: nn.Module, optimizer: Optimizer, last: bool
    ) -> AbstractContextManager[None]:
        """Return the engine's part of the context `gradients`, for what `_wrap` has returned."""
        return nullcontext()

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Finish the averaging at the end of `gradients`, which calls it. Collective.

        Also average those of parameters that were thawed since `prepare`, coalesce sparse
        gradients, and synchronise buffers by their policy. Raises InputError with the names of the
        parameters without a gradient, unless `unused_parameters` is "zero", and for a buffer that
        has another shape than in `prepare`.
        """
        made = self._made_of(optimizer)
        optimizer = made.optimizer
        model_sync.fill_missing_gradients(optimizer, made.names, self.options.unused_parameters)
        if made.gradients == "local":
            return
        self._reduce_gradients(optimizer)
        if self.world.size > 1 and not self.averages_thawed:
            model_sync.average(self, made.thawed_gradients())
        for p in made.sparse:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.coalesce()
        model_sync.sync_buffers(self, made.buffers())

    def _made_of(self, optimizer: Optimizer) -> _Prepared:
        """Return what `prepare` has made of an optimizer, which a method may have wrapped since."""
        while id(optimizer) not in self._prepared:
            if not hasattr(optimizer, "wrapped"):
                raise ValueError("gradients() takes the optimizer that prepare returned")
            optimizer = optimizer.wrapped
        return self._prepared[id(optimizer)]

    def _reduce_gradients(self, optimizer: Optimizer) -> None:  # noqa: B027
        """Average the gradients, or wait until they are averaged. Collective.

        A backend that averages within the backward pass has nothing to do here.
        """

    # Small values

    @abstractmethod
    def all_reduce(self, t: Tensor, op: Op = "mean") -> Tensor:
        """Reduce `t` over all ranks. Collective. Return a new tensor; `t` is unchanged.

        The result has the shape, dtype and device of `t`. Raises ValueError for an unknown op, and
        for the mean of integers.
        """

    @abstractmethod
    def broadcast_(self, t: Tensor, root: int = 0) -> Tensor:
        """Overwrite `t`, which must be contiguous, with the root's; return it. Collective."""

    def broadcast_object(self, obj: T, root: int = 0) -> T:
        """Return the root's `obj`. Collective. Sent as a signed pickle."""
        is_root = self.world.rank == root
        data = signed(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
        size = self.broadcast_(torch.tensor([data.numel()], device="cpu"), root)
        if not is_root:
            data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self.broadcast_(data, root)
        return obj if is_root else cast("T", unsign(data.numpy(), f"rank {root}"))

    @abstractmethod
    def all_gather_object(self, obj: T) -> list[T]:
        """Return every rank's `obj`, in rank order. Collective. Sent as a signed pickle."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called. Collective."""

    def print(self, *values: object) -> None:
        """Print the values on rank 0 alone, at once. Not collective."""
        if self.world.rank == 0:
            print(*values, flush=True)

    @contextmanager
    def share_errors(self) -> Iterator[None]:
        """Raise an HvdtrainError of the block on every rank, so that no rank waits for one
        that failed. Collective.

        If several ranks fail, the error of the lowest is raised. The block must not contain a
        collective. Any other exception propagates unchanged, on its own rank only.
        """
        mine: HvdtrainError | None = None
        try:
            yield
        except HvdtrainError as raised:
            mine = raised
        error = None if mine is None else (type(mine), str(mine))
        everyone = self.all_gather_object((self.world.rank, error))
        failed = [(rank, *error) for rank, error in everyone if error is not None]
        if not failed:
            return
        rank, kind, text = failed[0]
        if len(failed) < len(everyone):
            text = f"rank {rank}: {text}"
        shared = kind(text)
        shared.on_all_ranks = True
        raise shared from mine

    def __enter__(self: B) -> B:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            with self._convert_peer_errors():
                self.close()
            return
        error = failure.cause_of(error)
        known = self._named_peer_error(error) if isinstance(error, Exception) else None
        shared = is_preempted = isinstance(error, Preempted)
        if isinstance(error, HvdtrainError):
            error.after_open, shared = True, error.on_all_ranks
        # Every rank leaves its block by a shared error: they can still wait for each other.
        self.close(failed=not shared)
        is_error = failure.exit_code(error) != 0 and not is_preempted
        if self.world.size > 1 and is_mpi(self.world) and is_error:
            failure.end_job(self.world, known or error)
        if known is not None:
            raise known from error


@dataclass
class _Prepared:
    """A model and its optimizer, wrapped. Keeps the optimizer alive, so that its id is not reused.

    `names`: those of the parameters. `trained`: those that required a gradient. `sparse`: the
    parameters whose gradients are sparse. `gradients`: see `Backend.prepare`.
    """

    optimizer: Optimizer
    model: nn.Module
    net: nn.Module
    names: dict[Tensor, str]
    trained: dict[Tensor, None]
    buffer_shapes: dict[str, torch.Size]
    sparse: list[Tensor]
    gradients: Gradients
    has_averaged: bool = False
    """Whether `Backend.gradients` has ended since the last step."""
    steps_begun: int = 0
    """More than one where a step calls another: real Horovod's calls that of the class above."""

    def thawed_gradients(self) -> list[Tensor]:
        """Return the gradients of the parameters that the engine does not know: frozen in
        `prepare`, or given to the optimizer later.
        """
        later = (p for p in parameters_of(self.optimizer) if p not in self.trained)
        return [p.grad for p in later if p.requires_grad and p.grad is not None]

    def buffers(self) -> Iterator[Tensor]:
        """Yield the model's buffers, to be synchronised. Raises InputError for one that a forward
        pass has given another shape: other ranks may have sent the one before.
        """
        for name, buffer in self.model.named_buffers():
            shape = self.buffer_shapes.setdefault(name, buffer.shape)
            if buffer.shape != shape:
                raise InputError(
                    f"buffer {name} has the shape {tuple(buffer.shape)}, but had {tuple(shape)} "
                    "before, and ranks cannot synchronise a buffer whose shape changes; use "
                    "--buffers local, or keep it in an attribute that is not a buffer"
                )
            yield buffer

    def begin_step(self, _: object, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Check a step at its begin: a hook of the optimizer. Of one that has a closure, which may
        average the gradients, `end_step` does. `args`: the optimizer, and its step's own.
        """
        if self.steps_begun == 0 and not any((*args[1:], *options.values())):
            self._check()
        self.steps_begun += 1

    def end_step(self, *_: object) -> None:
        """Make the next step need gradients of its own: a hook of the optimizer."""
        self.steps_begun -= 1
        if self.steps_begun == 0:
            self._check()
            self.has_averaged = False

    def _check(self) -> None:
        if not self.has_averaged:
            raise InputError(
                "the optimizer steps on gradients that were not averaged: put forward and backward "
                "pass into `with backend.gradients(optimizer):`, and step after it",
                on_all_ranks=True,
            )


def signed(obj: object) -> Tensor:
    """Return a signed pickle, as a tensor of bytes. Not collective."""
    return torch.frombuffer(bytearray(sign(obj)), dtype=torch.uint8)


def check_op(t: Tensor, op: Op) -> None:
    """Raise ValueError for an unknown op, and for the mean of integers. Not collective."""
    if op not in OPS:
        raise ValueError(f"unknown op {op!r}; one of: {', '.join(OPS)}")
    if op == "mean" and not (t.is_floating_point() or t.is_complex()):
        raise ValueError(f"the mean of integers ({t.dtype}) has no exact meaning; use sum")
