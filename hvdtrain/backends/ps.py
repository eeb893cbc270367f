"""The parameter server: gradients go to the rank that owns the parameters, which steps for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed import DistError
from torch.optim import Optimizer

from hvdtrain.backends.base import Backend, Gradients, Op, check_op, lost_contact
from hvdtrain.backends.ps_messages import Messages, decode, encode
from hvdtrain.backends.server_optimizer import ServerOptimizer, owners_of
from hvdtrain.errors import HvdtrainError, InputError, WorldError, first_line
from hvdtrain.job.addresses import listen_addresses
from hvdtrain.job.job_secret import sign, unsign
from hvdtrain.job.rendezvous import open_store
from hvdtrain.optim import model_sync
from hvdtrain.system.trees import parameters_of

T = TypeVar("T")


class ParameterServer(Backend):
    """Rank 0, or every rank, is a server: see `server_optimizer`. Under every launcher.

    Once training has begun, a rank that ends and is no server is named, and the others go on
    without it, if the launcher lets them. A server that ends, ends the job.
    """

    name: ClassVar[str] = "ps"
    _messages: Messages
    _lost: Mapping[int, str] = {}

    @property
    def is_asynchronous(self) -> bool:  # type: ignore[override]
        """Whether ranks step at different times: a maximal staleness of 0 is synchronous."""
        return self.options.ps_async and self.options.ps_max_staleness != 0

    def open(self) -> None:
        """Connect every rank to every other one. Collective."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._optimizers: list[ServerOptimizer] = []
        self._all_staleness: Counter[int] = Counter()
        self._steps = 0
        self.store = store = open_store(self.world, self.options.timeout_s)
        try:
            addresses = listen_addresses(self.world)
            self._messages = Messages(self.world, store, addresses, self.options.timeout_s)
        except DistError as error:
            raise WorldError(f"lost rank 0's store: {first_line(error)}") from None
        self._lost = self._messages.lost
        self._messages.tolerates_loss = self._tolerates_loss
        self._messages.on_lost = self._on_lost

    def _tolerates_loss(self, rank: int) -> bool:
        """Return whether training goes on if `rank` ends: it has begun, and `rank` is no server."""
        begun = self._steps > 0
        return begun and rank > 0 and not any(rank in o.servers for o in self._optimizers)

    def _on_lost(self, rank: int) -> None:
        for optimizer in self._optimizers:
            optimizer.forget(rank)

    def close(self, failed: bool = False) -> None:
        """Close the connections; first wait for all ranks, unless `failed`. Collective."""
        if hasattr(self, "_messages"):
            messages = self._messages
            del self._messages
            messages.close(failed)
        super().close(failed)

    def describe(self) -> dict[str, Any]:
        """Add the servers, what they wait for, the staleness that occurred, and lost ranks."""
        options = self.options
        servers = "rank 0" if options.ps_servers == "rank0" else "every rank, of its share"
        about: dict[str, Any] = {"servers": servers}
        note = f"server: {servers}; synchronous"
        if self.is_asynchronous:
            limit = options.ps_max_staleness
            about |= {"max_staleness": limit, "sync_every": options.ps_sync_every}
            note = f"server: {servers}; asynchronous, staleness "
            note += "without limit" if limit is None else f"of at most {limit} steps"
            about["staleness"] = _staleness_summary(self._all_staleness)
        if self._lost:
            about["lost_ranks"] = dict(self._lost)
        return {**super().describe(), **about, "note": note}

    def _peer_error(self, error: Exception) -> HvdtrainError | None:
        """Return a WorldError for a lost or late rank."""
        return lost_contact(error)

    # Training

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, gradients: Gradients = "mean"
    ) -> tuple[nn.Module, Optimizer]:
        """Wrap the optimizer in a ServerOptimizer. Collective."""
        if gradients == "mean" and self.is_asynchronous:
            raise InputError(
                'asynchronous ranks have no mean gradient: call prepare(..., gradients="share"), '
                "and read no p.grad before step()"
            )
        return super().prepare(model, optimizer, gradients)

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        parameters = parameters_of(optimizer)
        num_servers = self.world.size if self.options.ps_servers == "all" else 1
        # A class with the name of the wrapped optimizer's, as Horovod's is: it does the same.
        kind = type(type(optimizer).__name__, (ServerOptimizer,), {})
        wrapped: ServerOptimizer = kind(
            optimizer,
            self._messages,
            owners_of(parameters, num_servers),
            len(self._optimizers),
            self.is_asynchronous,
            self.options.ps_max_staleness,
        )
        self._optimizers.append(wrapped)
        wrapped.after_step = lambda: self._after_asynchronous_step(wrapped)
        return model, wrapped

    def _reduce_gradients(self, optimizer: Optimizer) -> None:
        assert isinstance(optimizer, ServerOptimizer)
        self._steps += 1
        if optimizer.is_asynchronous:
            self._start_and_measure(optimizer)
            return
        optimizer.reduce_to_servers()
        if self._prepared[id(optimizer)].gradients == "mean":
            optimizer.share_means()

    def _start_and_measure(self, optimizer: ServerOptimizer) -> None:
        """Start the servers before the first step; copy this rank's staleness to `log_fields`."""
        if not optimizer.has_started:
            optimizer.start_server()
            self.barrier()
            optimizer.has_started = True
        self.log_fields = {
            f"staleness_{k}": v for k, v in _staleness_summary(optimizer.staleness).items()
        }

    def _after_asynchronous_step(self, optimizer: ServerOptimizer) -> None:
        every = self.options.ps_sync_every
        if every and optimizer.steps % every == 0:
            self.synchronize(optimizer, "parameters")

    def synchronize(
        self, optimizer: Optimizer, what: Literal["gradients", "parameters", "state"]
    ) -> None:
        if not isinstance(optimizer, ServerOptimizer):  # prepared as "local"
            return
        if what == "gradients" and not optimizer.is_asynchronous:
            optimizer.share_means()
        elif what == "parameters" and optimizer.is_asynchronous:
            self._synchronize_parameters(optimizer)
        elif what == "state" and len(optimizer.servers) > 1:
            states = self.all_gather_object(model_sync.to_cpu(optimizer.own_state()))
            if self.world.rank == 0:
                optimizer.set_state({i: s for part in states for i, s in part.items()})

    def _synchronize_parameters(self, optimizer: ServerOptimizer) -> None:
        if not optimizer.has_started:
            return
        # Each of these collectives pulls. Now all ranks have pushed; none pushes before the end.
        everyone = self.all_gather_object(optimizer.staleness)
        self._all_staleness = sum(everyone, Counter())
        model_sync.sync_buffers(self, self._prepared[id(optimizer)].model)
        self._messages.collect(b"")

    # Small values

    def _collect(self, value: bytes) -> list[bytes]:
        """Return the values of all living ranks, in rank order. Collective.

        While a rank waits here it computes no gradient: no server must wait for one.
        """
        trained = [o for o in self._optimizers if o.is_asynchronous and o.has_started]
        for optimizer in trained:
            optimizer.report_idle()
        values = self._messages.collect(value)
        for optimizer in trained:
            optimizer.pull()
        return values

    def all_reduce(self, t: Tensor, op: Op = "mean") -> Tensor:
        check_op(t, op)
        values = [decode(data) for data in self._collect(encode(t))]
        total: Tensor = values[0]
        half = total.dtype in (torch.float16, torch.bfloat16)
        for value in values[1:]:
            if op in ("min", "max"):
                total = torch.minimum(total, value) if op == "min" else torch.maximum(total, value)
            else:
                total = (total.float() if half else total) + value
        if op == "mean":
            total = total / len(values)
        return total.to(device=t.device, dtype=t.dtype)

    def broadcast_(self, t: Tensor, root: int = 0) -> Tensor:
        is_root = self.world.rank == root
        data = b"".join(self._collect(encode(t) if is_root else b""))
        return t if is_root else t.copy_(decode(data))

    def broadcast_object(self, obj: T, root: int = 0) -> T:
        is_root = self.world.rank == root
        data = b"".join(self._collect(sign(obj) if is_root else b""))
        return obj if is_root else cast("T", unsign(data, f"rank {root}"))

    def all_gather_object(self, obj: T) -> list[T]:
        """Return the `obj` of every rank that has not ended, in rank order. Collective."""
        return [unsign(data) for data in self._collect(sign(obj))]

    def barrier(self) -> None:
        """Return once every rank that has not ended has called. Collective."""
        self._collect(b"")


def _staleness_summary(staleness: Counter[int]) -> dict[str, float]:
    """Return the mean, the 95th percentile and the maximum; nothing without a step."""
    total = sum(staleness.values())
    if not total:
        return {}
    mean = sum(value * count for value, count in staleness.items()) / total
    seen = 0
    for value in sorted(staleness):
        seen += staleness[value]
        if seen >= 0.95 * total:
            break
    return {"mean": mean, "p95": value, "max": max(staleness)}
