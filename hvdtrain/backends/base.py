"""The contract of a backend: `Backend`, its options, and the code that all backends share.

The Trainer, `hvdtrain compare` and users' own loops call it; the files beside this one implement
it. A subclass supplies the collectives and the averaging of gradients. What usually differs between
engines (initial state, buffers, missing gradients, errors) is written once, here.

To add a backend: write a subclass in its own file, and add a row to the table in `__init__.py`.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim import Optimizer

from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain._torch.peer_errors import is_peer_error
from hvdtrain.backends import backend_batch_norm
from hvdtrain.errors import (
    HvdtrainError,
    InputError,
    PeerLost,
    Preempted,
    WorldError,
    WorldMismatch,
    first_line,
)
from hvdtrain.job.addresses import network_in_use
from hvdtrain.job.rendezvous import open_store_over
from hvdtrain.job.world import World, is_mpi
from hvdtrain.liveness import failure
from hvdtrain.liveness.hang_watch import HangWatch
from hvdtrain.liveness.monitor import Monitor, RankProgress
from hvdtrain.optim import model_sync, sharded_optimizer
from hvdtrain.optim.model_sync import uncompiled, with_sparse_gradients
from hvdtrain.optim.shared_tensors import Group

Op = Literal["mean", "sum", "min", "max"]
Gradients = Literal["mean", "local"]
OPS: tuple[Op, ...] = ("mean", "sum", "min", "max")
T = TypeVar("T")
B = TypeVar("B", bound="Backend")


Buffers = Literal["broadcast", "average", "local"]
Unused = Literal["error", "zero"]
Compression = Literal["none", "fp16", "bf16", "powersgd"]

# Variables of the options. A parser raises ValueError with what it wants.


def _option(name: str, default: Any, parse: Callable[[str], Any] = str) -> Any:
    """Return a field whose default is HVDTRAIN_<name>; `default` if that is unset or empty."""

    def read() -> Any:
        text = os.environ.get(f"HVDTRAIN_{name}", "").strip()
        try:
            return parse(text) if text else default
        except ValueError as error:
            raise InputError(f"HVDTRAIN_{name}={text} must be {error}") from None

    return field(default_factory=read)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"one of: {', '.join(choices)}")
        return text

    return parse


def _positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise ValueError("a number greater than zero")


def _flag(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False}
    words |= {"t": True, "y": True, "f": False, "n": False, "no": False, "off": False}  # click's
    if text.lower() not in words:
        raise ValueError("true or false")
    return words[text.lower()]


@dataclass(frozen=True)
class BackendOptions:
    """Options of every backend. They must be equal on all ranks.

    What is left out has the value of its variable, HVDTRAIN_TRANSPORT and so on, if that is set, as
    for the options of `hvdtrain train`. Raises InputError for a variable that cannot be read.
    """

    device: str = _option("DEVICE", "auto", _one_of("auto", "cpu", "cuda"))
    """`auto`, `cpu` or `cuda`; auto is CUDA if this host has a GPU for each of its ranks."""
    transport: str = _option("TRANSPORT", "auto")
    timeout_s: float = _option("TIMEOUT", 300.0, _positive)
    """Seconds that a rank waits for its peers, in a rendezvous or in a collective."""
    bucket_mib: float = _option("BUCKET_MIB", 25.0, _positive)
    buffers: Buffers = _option("BUFFERS", "broadcast", _one_of(*get_args(Buffers)))
    """How BatchNorm statistics and other buffers are synchronised after every step: broadcast from
    rank 0, averaged (floating-point buffers; the others are broadcast), or left local.
    """
    unused_parameters: Unused = _option("UNUSED_PARAMETERS", "error", _one_of(*get_args(Unused)))
    """How a parameter without a gradient is treated: an error that names it, or a gradient of zeros
    (so that weight decay and momentum apply).
    """
    compression: Compression = _option("COMPRESSION", "none", _one_of(*get_args(Compression)))
    """How gradients are sent: as they are, in half precision, or as PowerSGD's low-rank factors.
    `hvdtrain.training.methods` has the table of the backends that can.
    """
    shard_optimizer: bool = _option("SHARD_OPTIMIZER", False, _flag)
    """Whether the ranks of a host share one copy of the parameters, and each steps a part of them:
    see `hvdtrain.optim.sharded_optimizer`.
    """


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
        self.monitor: Monitor | None = None
        """The connections to the other ranks that do not depend on the engine, once
        `start_monitor` was called; None with one rank.
        """
        self._hang_watch: HangWatch | None = None
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
        if self.monitor is not None:
            self.monitor.close()
            self.monitor = self._hang_watch = None

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
        return None

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
        made = _Prepared(wrapped, model, net, names, sparse, gradients)
        self._prepared[id(wrapped)] = made
        if gradients != "local":
            wrapped.register_step_pre_hook(made.begin_step)
            wrapped.register_step_post_hook(made.end_step)
        return net, wrapped

    def _shard(self, optimizer: Optimizer, names: dict[Tensor, str], gradients: Gradients) -> None:
        """Make each rank step its share of the parameters. Collective."""
        if gradients == "local":
            raise InputError("--shard-optimizer: the ranks step on gradients of their own")
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

        Also coalesce sparse gradients, and synchronise buffers by their policy. Raises InputError
        with the names of the parameters without a gradient, unless `unused_parameters` is "zero".
        """
        made = self._made_of(optimizer)
        optimizer = made.optimizer
        model_sync.fill_missing_gradients(optimizer, made.names, self.options.unused_parameters)
        if made.gradients == "local":
            return
        self._reduce_gradients(optimizer)
        for p in made.sparse:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.coalesce()
        model_sync.sync_buffers(self, made.model)

    def _made_of(self, optimizer: Optimizer) -> _Prepared:
        """Return what `prepare` has made of an optimizer, which a method may have wrapped since."""
        while id(optimizer) not in self._prepared:
            if not hasattr(optimizer, "wrapped"):
                raise ValueError("gradients wants the optimizer that prepare returned")
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

    @abstractmethod
    def broadcast_object(self, obj: T, root: int = 0) -> T:
        """Return the root's `obj`. Collective. Sent as a signed pickle."""

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
            with convert_peer_errors(self):
                self.close()
            return
        error = failure.cause_of(error)
        known = named_peer_error(self, error) if isinstance(error, Exception) else None
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

    `names`: those of the parameters. `sparse`: the parameters whose gradients are sparse.
    `gradients`: see `Backend.prepare`.
    """

    optimizer: Optimizer
    model: nn.Module
    net: nn.Module
    names: dict[Tensor, str]
    sparse: list[Tensor]
    gradients: Gradients
    has_averaged: bool = False
    """Whether `Backend.gradients` has ended since the last step."""
    steps_begun: int = 0
    """More than one where a step calls another: real Horovod's calls that of the class above."""

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


def check_same(backend: Backend, values: Mapping[str, object], advice: str = "") -> None:
    """Raise WorldMismatch, on every rank, for the first of `values` that differs between
    ranks. Collective. The message has both values, then `advice` on what to do.
    """
    everyone = backend.all_gather_object(dict(values))
    on = [f" on {host}" for host in backend.hosts] or [""] * len(everyone)
    for rank, other in enumerate(everyone):
        for key, value in everyone[0].items():
            if other.get(key) != value:
                raise WorldMismatch(
                    f"rank 0{on[0]} has {key} = {value}, but rank {rank}{on[rank]} has "
                    f"{other.get(key, 'nothing')}{advice}",
                    on_all_ranks=True,  # every rank gathered the same lists
                )


@contextmanager
def convert_peer_errors(backend: Backend) -> Iterator[None]:
    """Raise the backend's WorldError in place of an exception that means a lost peer.

    Not collective.
    """
    try:
        yield
    except Exception as error:
        known = named_peer_error(backend, error)
        if known is None:
            raise
        raise known from error


def start_monitor(backend: Backend) -> None:
    """Connect the ranks, and watch for those that keep the others waiting. Collective."""
    world, timeout_s = backend.world, backend.options.timeout_s
    if world.size > 1:
        store = backend.store or open_store_over(world, timeout_s, backend.broadcast_object)
        backend.monitor = Monitor(world, store, backend.hosts, backend.progress, timeout_s)
        backend._hang_watch = HangWatch(backend.monitor)


def named_peer_error(backend: Backend, error: Exception) -> HvdtrainError | None:
    """Return the backend's WorldError for a lost or late peer, and what the peer does, else None.

    Not collective. It may take some seconds.
    """
    known = backend._peer_error(error)
    if known is None or backend._hang_watch is None:
        return known
    return type(known)(f"{known}; {backend._hang_watch.explain(error)}")


def lost_contact(error: Exception) -> WorldError | None:
    """Return a WorldError for an error of a transport or a store about a lost or late peer, else
    None. Not collective.
    """
    if not (isinstance(error, PeerLost) or is_peer_error(error)):
        return None
    text = f"lost contact with a peer, which has ended or hangs: {first_line(error)}"
    if "connectFullMesh" in text and (network := network_in_use()) is not None:
        text += f" (Gloo uses {network}; GLOO_SOCKET_IFNAME can name another interface)"
    return WorldError(text)


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
