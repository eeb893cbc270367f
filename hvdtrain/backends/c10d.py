"""The process group and the collectives of backends on torch.distributed. `ddp` builds on them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hvdtrain import transports
from hvdtrain._torch.group_numbers import restart_group_numbers
from hvdtrain.backends.base import Backend, Op, check_op, signed
from hvdtrain.backends.options import BackendOptions
from hvdtrain.errors import WorldMismatch
from hvdtrain.job.job_secret import unsign
from hvdtrain.job.rendezvous import open_store
from hvdtrain.job.world import World
from hvdtrain.transports.gloo import gloo_reachable

T = TypeVar("T")

_REDUCE = {
    "mean": dist.ReduceOp.SUM,  # `all_reduce` divides: Gloo has no AVG for every dtype
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class C10d(Backend):
    """A backend whose world is the default process group of torch.distributed.

    If the program has created that group already, it is used as it is and not destroyed.
    """

    name: ClassVar[str] = "c10d"

    def __init__(self, world: World, options: BackendOptions) -> None:
        super().__init__(world, options)
        self.transport, self.transport_reason = transports.choose(
            options.transport, self.device, world
        )
        self._owns_group = False

    @classmethod
    def host_problem(cls) -> str | None:
        """Return None if torch was built with torch.distributed."""
        if not dist.is_available():
            return f"torch {torch.__version__} was built without torch.distributed"
        return None

    def open(self) -> None:
        """Open the store and create the process group, unless there is one. Collective."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if dist.is_initialized():
            self._adopt_group()
            return
        engine = f"{self.name} over {self.transport}"
        self.store = store = open_store(self.world, self.options.timeout_s, engine=engine)
        restart_group_numbers()  # one that has failed, in an elastic job, had a number too
        with gloo_reachable():
            dist.init_process_group(
                transports.TRANSPORTS[self.transport],
                store=store,
                rank=self.world.rank,
                world_size=self.world.size,
                timeout=timedelta(seconds=self.options.timeout_s),
                device_id=self.device if self.transport == "nccl" else None,
            )
        self._owns_group = True

    def _adopt_group(self) -> None:
        """Use the program's own process group. Raises WorldMismatch if its ranks differ."""
        self.transport, self.transport_reason = (
            dist.get_backend(),
            "the program's own process group",
        )
        if (dist.get_rank(), dist.get_world_size()) != (self.world.rank, self.world.size):
            raise WorldMismatch(
                f"the program's own process group has rank {dist.get_rank()} of "
                f"{dist.get_world_size()}, but {self.world.launcher} says {self.world}"
            )

    def close(self, failed: bool = False) -> None:
        """Destroy the group that `open` created; first wait, unless `failed`. Collective."""
        if self._owns_group and dist.is_initialized():
            self._owns_group = False
            if not failed:
                self._unshare_parameters()
                self.barrier()
            dist.destroy_process_group()
        super().close(failed)

    def describe(self) -> dict[str, Any]:
        """Add the transport, the reason for its choice, and the version of NCCL."""
        about = {"transport": self.transport, "transport_reason": self.transport_reason}
        if self.transport == "nccl":
            version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            about["nccl"] = ".".join(map(str, version))
        return {**super().describe(), **about}

    # Small values

    def all_reduce(self, t: Tensor, op: Op = "mean") -> Tensor:
        check_op(t, op)
        result = t.detach().clone(memory_format=torch.contiguous_format)
        result = result.to(self._collective_device(t))
        dist.all_reduce(result, _REDUCE[op])
        if op == "mean":
            result.div_(self.world.size)
        return result.to(t.device)

    def broadcast_(self, t: Tensor, root: int = 0) -> Tensor:
        on_device = t.to(self._collective_device(t))
        dist.broadcast(on_device, src=root)
        return t if on_device is t else t.copy_(on_device)

    def all_gather_object(self, obj: T) -> list[T]:
        # As torch's, which would unpickle whatever arrives: first the sizes, then equal lengths.
        mine = signed(obj)
        sizes = [int(size) for size in self._all_gather(torch.tensor([mine.numel()], device="cpu"))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        padded[: mine.numel()] = mine
        parts = zip(self._all_gather(padded), sizes, strict=True)
        return [unsign(t[:size].numpy(), f"rank {r}") for r, (t, size) in enumerate(parts)]

    def _all_gather(self, t: Tensor) -> list[Tensor]:
        on_device = t.to(self._collective_device(t))
        gathered = [torch.empty_like(on_device) for _ in range(self.world.size)]
        dist.all_gather(gathered, on_device)
        return [other.cpu() for other in gathered]

    def barrier(self) -> None:
        """Wait for all ranks. Collective. Errors of Gloo and shm name the ranks that were late."""
        if self.transport == "gloo":
            # dist.barrier over Gloo times out without naming the missing ranks; with
            # wait_all_ranks this one names all of them, not only the first.
            dist.monitored_barrier(
                timeout=timedelta(seconds=self.options.timeout_s), wait_all_ranks=True
            )
        else:
            dist.barrier()

    def _collective_device(self, t: Tensor) -> torch.device:
        """Return the device that `t` must be on: NCCL takes CUDA tensors only."""
        return self.device if self.transport == "nccl" else t.device
