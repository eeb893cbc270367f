"""The backend `horovod`: real Horovod, whose hooks on the gradients feed a background thread.

`compat` is a subclass on another module of the same API, `hvdtrain.hvd`.
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

from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain.backends.backend_batch_norm import local_in_evaluation
from hvdtrain.backends.base import Backend, Op, check_op, signed
from hvdtrain.backends.options import BackendOptions
from hvdtrain.errors import HvdtrainError, InputError, WorldError, WorldMismatch, first_line
from hvdtrain.job import elastic_world, job_secret
from hvdtrain.job.job_secret import unsign
from hvdtrain.job.world import World, is_mpi
from hvdtrain.liveness import failure
from hvdtrain.optim.model_sync import with_sparse_gradients

T = TypeVar("T")

# Dtypes that Horovod does not know: their bits travel as a dtype of the same width.
_AS_BITS = {torch.bool: torch.uint8, torch.bfloat16: torch.int16, torch.complex64: torch.int64}

_STALL_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_STALL_CHECK = "HOROVOD_STALL_CHECK_TIME_SECONDS"
_STALL_CHECK_S = 60.0  # Horovod's own default
_POLL_S = 1.0  # how often the timeout is checked


class Horovod(Backend):
    """`horovod.torch.DistributedOptimizer`."""

    name: ClassVar[str] = "horovod"
    compressions: ClassVar[tuple[str, ...]] = ("none", "fp16")

    def __init__(self, world: World, options: BackendOptions) -> None:
        super().__init__(world, options)
        self._hvd: Any = None
        self._is_own = True
        """Whether this backend has initialised Horovod, and shuts it down."""
        self._skips: dict[int, ExitStack] = {}
        self._is_last = True
        """Whether this is the last micro-batch of a step."""
        self._wait: tuple[float, str] | None = None
        """When the main thread began to wait for the other ranks, and in which operation."""

    @classmethod
    def module(cls) -> ModuleType:
        """Import and return the module with the Horovod API."""
        import horovod.torch as hvd

        return cast("ModuleType", hvd)

    @classmethod
    def host_problem(cls) -> str | None:
        """Return None if Horovod is installed, built for this torch, and its library loads."""
        from hvdtrain.horovod_build import horovod_problem

        if problem := horovod_problem(torch.__version__):
            return problem
        if not hasattr(cls.module(), "init"):  # horovod.torch prints its ImportError and continues
            return (
                "Horovod's native library does not load; rebuild it with: "
                "hvdtrain install-horovod --force"
            )
        return None

    @classmethod
    def launcher_problem(cls, world: World) -> str | None:
        """Return the problem with torchrun, with no launcher, and with mpirun if Horovod was built
        without MPI.
        """
        if elastic_world.is_elastic():
            return "real Horovod is elastic under horovodrun only, not hvdrun; use --backend compat"
        if world.launcher in ("torchrun", "env://") and world.size > 1:
            return (
                f"Horovod does not know the ranks of {world.started_by} and would train "
                f"{world.size} models; start it with horovodrun or mpirun, or use --backend ddp"
            )
        # Horovod initialises MPI at once. Without mpirun that works in some installations only; in
        # the others Open MPI ends the process with pages of text.
        if world.launcher in ("none", "torchrun", "env://"):
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
        """Call `hvd.init()`, and check that it sees the launcher's world. Collective.

        If the script has called it already, its hvd is used, and stays when the backend closes.
        """
        self._hvd = self.module()
        self._is_own = not self._hvd.is_initialized()
        if self.device.type != "cpu":
            torch.cuda.set_device(self.device)
        self._init()
        seen = World(self._hvd.rank(), self._hvd.size())
        if str(seen) != str(self.world):
            raise WorldMismatch(
                f"{self.world.launcher} says {self.world}, but Horovod sees {seen}; use the "
                "mpirun that Horovod was built with (hvdtrain install-horovod --check)"
            )
        if self._hvd.mpi_enabled():  # hosts under mpirun need not share a home
            own = job_secret.secret() if self.world.rank == 0 else bytes(job_secret.SECRET_BYTES)
            rank0s = self.broadcast_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
            job_secret.adopt(bytes(rank0s.tolist()))

    def _init(self) -> None:
        """Initialise Horovod with the options' timeout, through its own variables. Collective.

        It reads them during `init` only, so they are removed afterwards.
        """
        # By default Horovod only warns of a stalled rank, for ever. It shuts down after the
        # shutdown time, but only if it warns earlier. Both are whole seconds; 0 means never.
        limit_s = self.options.timeout_s
        ours = {
            _STALL_SHUTDOWN: max(1, round(limit_s)),
            _STALL_CHECK: max(1, round(min(_STALL_CHECK_S, limit_s / 2))),
        }
        if os.environ.get(_STALL_SHUTDOWN, "").isdigit():
            limit_s = float(os.environ[_STALL_SHUTDOWN])  # the user's own value comes first
        ours = {name: seconds for name, seconds in ours.items() if name not in os.environ}
        os.environ.update({name: str(seconds) for name, seconds in ours.items()})
        if limit_s:
            thread = threading.Thread(
                target=self._enforce_timeout, args=(limit_s,), name="horovod-timeout", daemon=True
            )
            thread.start()
        try:
            with self._waiting("hvd.init"):
                self._hvd.init()
        finally:
            for name in ours:
                del os.environ[name]

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Record that the block waits for the other ranks: see `_enforce_timeout`."""
        self._wait = (time.monotonic(), what)
        try:
            yield
        finally:
            self._wait = None

    def _enforce_timeout(self, limit_s: float) -> None:
        """End this rank, and with it the job, once it has waited for `limit_s`. Runs in a thread.

        Horovod's stall inspector detects a rank that runs and does not submit a tensor. If a
        process is stopped, Horovod's background thread itself blocks, in the gather of requests,
        and the main thread blocks in C++, where no exception can be raised.
        """
        poll_s = min(_POLL_S, limit_s / 4)
        before = resumed = time.monotonic()
        while self._hvd is not None:
            time.sleep(poll_s)
            now = time.monotonic()
            if now - before > 4 * _POLL_S:
                resumed = now  # this process was stopped: the others get the whole time
            before = now
            wait = self._wait
            if wait is not None and now - max(wait[0], resumed) > limit_s:
                text = f"timed out after {limit_s:g} s in {wait[1]}: another rank is stopped, late "
                text += "or has ended"
                error = WorldError(f"{text}{self._explain(WorldError(text))}")
                failure.end_job(self.world, error)

    def close(self, failed: bool = False) -> None:
        """Call `hvd.shutdown()`; not after a failure: it could wait for a dead rank. Collective."""
        hvd = self._hvd
        for skip in self._skips.values():
            skip.close()
        try:
            if not failed and hvd is not None and hvd.is_initialized():
                self._unshare_parameters()
                with self._waiting("hvd.shutdown"):
                    hvd.barrier()
                    if self._is_own:
                        hvd.shutdown()
        finally:
            self._hvd = None  # this also ends the thread of `_enforce_timeout`
        super().close(failed)

    def describe(self) -> dict[str, Any]:
        """Add Horovod's version, its controller, and its settings from the environment."""
        import horovod

        hvd = self._hvd
        names = ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_CACHE_CAPACITY")
        return {
            **super().describe(),
            "horovod": horovod.__version__,
            "controller": "mpi" if hvd.mpi_enabled() else "gloo",
            "nccl": bool(hvd.nccl_built()),
            "settings": set_variables(*names),
        }

    def _peer_error(self, error: Exception) -> HvdtrainError | None:
        """Return a WorldError for HorovodInternalError: a collective that could not finish."""
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
        # Horovod matches tensors of all ranks by name: two models must not share any.
        prefix = f"{len(self._prepared)}." if self._prepared else ""
        named = [(prefix + name, p) for name, p in model.named_parameters()]
        try:
            wrapped = self._hvd.DistributedOptimizer(
                optimizer,
                named_parameters=named,
                op=self._hvd.Average,
                compression=getattr(self._hvd.Compression, self.options.compression),
            )
        except TypeError as error:
            raise InputError(
                f"Horovod recreates {type(optimizer).__name__} from its parameter groups, which "
                f"fails ({error}); give its arguments defaults, or use --backend ddp"
            ) from None
        if optimizer.state:
            wrapped.load_state_dict(state)  # Horovod made a new optimizer from the param_groups
        return model, cast("Optimizer", wrapped)

    def _sync_batch_norm(self) -> type[BatchNormBase]:
        """Return a subclass of Horovod's layer on CUDA, its only device."""
        if self.device.type == "cuda":
            return local_in_evaluation(self._hvd.SyncBatchNorm)
        return super()._sync_batch_norm()

    def _coalesce(self, p: Tensor) -> None:
        """Coalesce this rank's sparse gradient before it is sent, as DDP does.

        Horovod would add the rows of all ranks one by one, with another rounding.
        """
        if self._is_last and p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()

    def _passes(
        self, net: nn.Module, optimizer: Optimizer, last: bool
    ) -> AbstractContextManager[None]:
        """Let Horovod's hooks send gradients in the last micro-batch of a step only."""
        # The hooks count backward passes down from this number and send at zero. It is set anew for
        # each pass, so that a step with fewer micro-batches at an epoch's end is no special case.
        cast("Any", optimizer).set_backward_passes_per_step(1 if last else 2)
        self._is_last = last
        return nullcontext()

    def _reduce_gradients(self, optimizer: Optimizer) -> None:
        with self._waiting("the averaging of gradients"):
            optimizer.synchronize()  # type: ignore[attr-defined]
        # The step that follows must not reduce again. `load_state_dict` of Horovod silently ends
        # this context, so it is entered anew each time.
        skip = self._skips.setdefault(id(optimizer), ExitStack())
        skip.close()
        skip.enter_context(optimizer.skip_synchronize())  # type: ignore[attr-defined]

    # Small values

    def all_reduce(self, t: Tensor, op: Op = "mean") -> Tensor:
        check_op(t, op)
        hvd = self._hvd
        ops = {"mean": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
        # Horovod's CPU path does not know bfloat16.
        wide = t.float() if t.dtype == torch.bfloat16 else t
        with self._waiting("an all-reduce"):
            result = hvd.allreduce(wide.detach().contiguous(), op=ops[op])
        return cast("Tensor", result.to(t.dtype))

    def broadcast_(self, t: Tensor, root: int = 0) -> Tensor:
        with self._waiting("a broadcast"):
            self._hvd.broadcast_(t.view(_AS_BITS.get(t.dtype, t.dtype)), root_rank=root)
        return t

    def all_gather_object(self, obj: T) -> list[T]:
        hvd, data = self._hvd, signed(obj)  # Horovod's own unpickles whatever arrives
        with self._waiting("the all-gather of objects"):
            size = torch.tensor([data.numel()], device="cpu")
            sizes = hvd.allgather(size, name="hvdtrain.objects.sizes").tolist()
            parts = hvd.allgather(data, name="hvdtrain.objects").split(sizes)
        return [unsign(part.numpy(), f"rank {rank}") for rank, part in enumerate(parts)]

    def barrier(self) -> None:
        with self._waiting("a barrier"):
            self._hvd.barrier()


def set_variables(*names: str) -> dict[str, str]:
    """Return those of the environment variables that are set. Not collective."""
    return {name: os.environ[name] for name in names if name in os.environ}
