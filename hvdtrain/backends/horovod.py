"""Real Horovod: hooks on the gradients, and a background thread that negotiates and averages.

`compat` is the same class on another module of the same API: what differs is at its end.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain import failure
from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain.backends.base import Backend, BackendOptions, Op, check_op
from hvdtrain.backends.model_sync import with_sparse_gradients
from hvdtrain.errors import HvdtrainError, InputError, WorldError, WorldMismatch, first_line
from hvdtrain.world import World, is_mpi

T = TypeVar("T")

# Dtypes that Horovod does not know, and one of the same width to move their bits in.
_BITS = {torch.bool: torch.uint8, torch.bfloat16: torch.int16, torch.complex64: torch.int64}

_STALL_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_STALL_CHECK = "HOROVOD_STALL_CHECK_TIME_SECONDS"
_STALL_CHECK_S = 60.0  # Horovod's own default
_POLL_S = 1.0


class Horovod(Backend):
    """`horovod.torch.DistributedOptimizer`."""

    name: ClassVar[str] = "horovod"

    def __init__(self, world: World, options: BackendOptions) -> None:
        super().__init__(world, options)
        self._hvd: Any = None
        self._skips: dict[int, ExitStack] = {}
        self._optimizers: dict[int, Any] = {}
        self._last = True
        """Whether this is the last micro-batch of a window."""
        self._wait: tuple[float, str] | None = None
        """Since when the main thread waits for the other ranks, and in what."""

    @classmethod
    def module(cls) -> ModuleType:
        """Import the API that this backend trains on."""
        import horovod.torch as hvd

        return cast("ModuleType", hvd)

    @classmethod
    def host_problem(cls) -> str | None:
        """Look for Horovod's native library and for the torch it was built for."""
        from hvdtrain.horovod_build import installed_horovod

        found = installed_horovod()
        if found is None:
            return "Horovod is not installed; build it with: hvdtrain install-horovod"
        problem = found.problem(torch.__version__)
        if problem is not None:
            return problem
        if not hasattr(cls.module(), "init"):  # it prints its ImportError and goes on without
            return (
                "Horovod's native library does not load; rebuild it with: "
                "hvdtrain install-horovod --force"
            )
        return None

    @classmethod
    def launcher_problem(cls, world: World) -> str | None:
        """Refuse torchrun, which Horovod does not know; no launcher; and mpirun where Horovod was
        built without MPI.
        """
        if world.launcher == "torchrun" and world.size > 1:
            return (
                f"Horovod does not know torchrun's ranks and would train {world.size} models; "
                "start it with horovodrun or mpirun, or use --backend ddp"
            )
        # Horovod joins MPI at once, which a process without mpirun can do in some installations
        # only. Where it cannot, Open MPI ends the process with pages of text.
        if world.launcher in ("none", "torchrun"):
            return (
                "Horovod's own launcher has not started this process; start it with: "
                "horovodrun -np 2 hvdtrain --backend horovod, or mpirun -np 2 hvdtrain --backend "
                "horovod"
            )
        if is_mpi(world) and not cls.module().mpi_built():
            return (
                "this Horovod was built without MPI; use horovodrun --gloo, or rebuild it with: "
                "hvdtrain install-horovod --with-mpi --force"
            )
        return None

    def open(self) -> None:
        """[all] `hvd.init()`, and check that it sees the launcher's world."""
        self._hvd = self.module()
        if self.device.type != "cpu":
            torch.cuda.set_device(self.device)
        self._init()
        seen = World(self._hvd.rank(), self._hvd.size())
        if str(seen) != str(self.world):
            raise WorldMismatch(
                f"{self.world.launcher} says {self.world}, but Horovod sees {seen}; use the "
                "mpirun that Horovod was built with (hvdtrain install-horovod --check)"
            )

    def _init(self) -> None:
        """[all] Initialise Horovod, which reads its variables meanwhile and not later."""
        # Horovod only warns of a stalled rank, for ever, unless told when to give up; and does not
        # give up where it would warn later than that. Its variables are whole seconds; 0: never.
        limit_s = self.options.timeout_s
        ours = {
            _STALL_SHUTDOWN: max(1, round(limit_s)),
            _STALL_CHECK: max(1, round(min(_STALL_CHECK_S, limit_s / 2))),
        }
        if os.environ.get(_STALL_SHUTDOWN, "").isdigit():
            limit_s = float(os.environ[_STALL_SHUTDOWN])  # what its user wants counts
        ours = {name: seconds for name, seconds in ours.items() if name not in os.environ}
        os.environ.update({name: str(seconds) for name, seconds in ours.items()})
        if limit_s:
            watch = threading.Thread(target=self._watch, args=(limit_s,), name="horovod-timeout")
            watch.daemon = True
            watch.start()
        try:
            with self._waiting("hvd.init"):
                self._hvd.init()
        finally:
            for name in ours:
                del os.environ[name]

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Note that the block waits for the other ranks: see `_watch`. Not collective."""
        self._wait = (time.monotonic(), what)
        try:
            yield
        finally:
            self._wait = None

    def _watch(self, limit_s: float) -> None:
        """End this rank, and with it the job, once it has waited for `limit_s`. In a thread.

        Horovod's stall inspector finds a rank that runs and does not come. With a stopped process
        its background thread itself blocks, in the gather of requests, and so does the main
        thread: in C++, where no exception can reach it.
        """
        poll_s = min(_POLL_S, limit_s / 4)
        before = resumed = time.monotonic()
        while self._hvd is not None:
            time.sleep(poll_s)
            now = time.monotonic()
            if now - before > 4 * _POLL_S:
                resumed = now  # this process was stopped itself: the others get the whole time
            before = now
            wait = self._wait
            if wait is not None and now - max(wait[0], resumed) > limit_s:
                said = f"timed out after {limit_s:g} s in {wait[1]}"
                error = WorldError(f"{said}: another rank is stopped, late or has gone")
                failure.end_job(self.world, error)

    def close(self, failed: bool = False) -> None:
        """[all] `hvd.shutdown()`; not after a failure: it could wait for a rank that is gone."""
        hvd = self._hvd
        for skip in self._skips.values():
            skip.close()
        try:
            if not failed and hvd is not None and hvd.is_initialized():
                with self._waiting("hvd.shutdown"):
                    hvd.barrier()
                    hvd.shutdown()
        finally:
            self._hvd = None  # which ends the thread that watches, too

    def describe(self) -> dict[str, Any]:
        """Add Horovod's version, its controller, and the settings of its own in force."""
        import horovod

        hvd = self._hvd
        settings = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_CACHE_CAPACITY")
        return {
            **super().describe(),
            "horovod": horovod.__version__,
            "controller": "mpi" if hvd.mpi_enabled() else "gloo",
            "nccl": bool(hvd.nccl_built()),
            "settings": {name: os.environ[name] for name in settings if name in os.environ},
        }

    def _peer_error(self, error: Exception) -> HvdtrainError | None:
        """Recognise HorovodInternalError: a collective that could not be finished."""
        if type(error).__name__ != "HorovodInternalError":
            return None
        return WorldError(
            f"lost contact with a peer, which has ended or hangs: {first_line(error)}"
        )

    # Training

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        state = optimizer.state_dict()
        for p in with_sparse_gradients(model):
            p.register_post_accumulate_grad_hook(self._coalesce)  # type: ignore[no-untyped-call]
        # Names are how the ranks of Horovod find each other: two models must not share any.
        prefix = f"{len(self._optimizers)}." if self._optimizers else ""
        named = [(prefix + name, p) for name, p in model.named_parameters()]
        try:
            wrapped = self._hvd.DistributedOptimizer(
                optimizer, named_parameters=named, op=self._hvd.Average
            )
        except TypeError as error:
            raise InputError(
                f"Horovod makes {type(optimizer).__name__} anew from its parameter groups, which "
                f"it does not allow ({error}); give its arguments defaults, or use --backend ddp"
            ) from None
        if optimizer.state:
            wrapped.load_state_dict(state)  # it is a new optimizer, made from param_groups alone
        self._optimizers[id(model)] = wrapped
        return model, cast("Optimizer", wrapped)

    def _sync_batch_norm(self) -> type[BatchNormBase] | None:
        """Horovod's layer, which knows CUDA alone."""
        cuda = self.device.type == "cuda"
        return cast("type[BatchNormBase]", self._hvd.SyncBatchNorm) if cuda else None

    def _coalesce(self, p: Tensor) -> None:
        """Add up this rank's rows before they are sent, as DDP does.

        Horovod would add up the rows of all ranks one by one, and so round differently.
        """
        if self._last and p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()

    def accumulate(self, net: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Let Horovod's hooks send gradients in the last micro-batch of a window only."""
        if id(net) not in self._optimizers:
            raise ValueError("accumulate wants the net that prepare returned")
        # The hooks count backward passes down from here. Setting the count for each pass, to one
        # for the last and to more for the others, makes a short window at the end of an epoch no
        # special case.
        self._optimizers[id(net)].set_backward_passes_per_step(1 if last else 2)
        self._last = last
        return nullcontext()

    def _reduce_gradients(self, optimizer: Optimizer) -> None:
        with self._waiting("the averaging of gradients"):
            optimizer.synchronize()  # type: ignore[attr-defined]
        # The step that follows must not reduce again. Entered anew each time, because Horovod's
        # load_state_dict silently ends it.
        skip = self._skips.setdefault(id(optimizer), ExitStack())
        skip.close()
        skip.enter_context(optimizer.skip_synchronize())  # type: ignore[attr-defined]

    # Small values

    def all_reduce(self, t: Tensor, op: Op = "mean") -> Tensor:
        """[all] Combine `t` over all ranks into a new tensor: see the contract."""
        check_op(t, op)
        hvd = self._hvd
        ops = {"mean": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
        # Horovod's CPU path does not know bfloat16.
        wide = t.float() if t.dtype == torch.bfloat16 else t
        with self._waiting("an all-reduce"):
            result = hvd.allreduce(wide.detach().contiguous(), op=ops[op])
        return cast("Tensor", result.to(t.dtype))

    def broadcast_(self, t: Tensor, root: int = 0) -> Tensor:
        """[all] Overwrite `t` with the root's, in place."""
        with self._waiting("a broadcast"):
            self._hvd.broadcast_(t.view(_BITS.get(t.dtype, t.dtype)), root_rank=root)
        return t

    def broadcast_object(self, obj: T, root: int = 0) -> T:
        """[all] Return the root's `obj`."""
        # Without a name Horovod takes the type's, and ranks with different types wait for ever.
        with self._waiting("the broadcast of an object"):
            got = self._hvd.broadcast_object(obj, root_rank=root, name="hvdtrain.object")
        return cast("T", got)

    def all_gather_object(self, obj: T) -> list[T]:
        """[all] Return every rank's `obj`, in rank order."""
        with self._waiting("the all-gather of objects"):
            got = self._hvd.allgather_object(obj, name="hvdtrain.objects")
        return cast("list[T]", got)

    def barrier(self) -> None:
        """[all] Wait for all."""
        with self._waiting("a barrier"):
            self._hvd.barrier()
