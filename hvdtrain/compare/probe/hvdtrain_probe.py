"""The probe in one process: it takes the steps of the first optimizer that trains there.

    the script                this module                              the comparison
    optimizer.step()   ---->  before: record the gradient
                              after: count; the first time connect  ---->  (rank, size, pid, host)
                              when no step is left, wait for a call <----  (call, *arguments)
                       <----  return, if the call wants steps
                              after the last one, answer            ---->  (True, answer)

A call is the name of a method of `Probe` that begins with `call_`; None, or a closed connection,
ends the script. A step goes from the end of one `optimizer.step` to the end of the next; the first
is the first on gradients that are not zero, because Horovod's `broadcast_optimizer_state` makes an
optimizer's state by a step on zeros. What is recorded of the first steps is what
`hvdtrain.compare.proof.work_trace` describes, as plain values: this module runs in environments
that lack hvdtrain.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import glob
import hashlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Connection
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

# How launchers tell rank and number of ranks.
_WORLD = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # of srun's ranks; a job has others, too
)
# Wrappers put these before the names of parameters.
_PREFIXES = ("module.", "_orig_mod.", "_forward_module.", "model.")
# Options that change how a step is computed, not what it computes.
_HOW_OPTIONS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_SAMPLED = 1 << 18  # elements of all parameters together; at least one of each
PIECE = 1 << 18  # elements that are processed at once


def connect(address: str, rank: int, size: int, comparison: int = 0) -> Connection:
    """Connect to the comparison's socket; on another host, to one that ssh forwards there, whose
    name ends with the number of the host. Tells who connects.

    `comparison`: its process id. A rank that it has started itself, without a launcher, is killed
    with it: stopped, it would handle no other signal.
    """
    if os.getppid() == comparison:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for path in [address, *sorted(glob.glob(f"{address}-*"))]:
        with contextlib.suppress(OSError):
            connection = Client(path, "AF_UNIX")
            connection.send((rank, size, os.getpid(), path.removeprefix(address)))
            return connection
    raise OSError(f"no socket of the comparison at {address}")


class RefusedError(Exception):
    """A script cannot be compared; the text says why, and is the same on all ranks."""


class Probe:
    """The optimizer whose steps are taken, the connection, and the steps that are left."""

    def __init__(self, address: str = "", number: int = 1, comparison: int = 0) -> None:
        """`number`: which optimizer is taken, by the order in which they step first; from 1."""
        self._address, self._number, self._comparison = address, number, comparison
        self._seen: list[torch.optim.Optimizer] = []
        """One optimizer for each set of parameters, by the order of their first steps."""
        self._optimizer: torch.optim.Optimizer | None = None
        self._frames: list[FrameType] = []
        """Those of the steps in progress, each called by the one before it."""
        self._stepping: torch.optim.Optimizer | None = None
        """The optimizer of the first of them, if that is a step that counts."""
        self._left = 1
        self._taken = 0
        self._recorder: Recorder | None = None
        self._connection: Connection | None = None
        self._finish: Callable[[], Any] | None = None
        self._marks: list[Any] = []
        self._input_s: list[float] = []
        self._cpu: list[float] = []
        self._cpu_at = -1
        self._parameters: list[Tensor] = []
        self._is_cuda = False
        self._peak_is_of_steps = False
        self._pid = os.getpid()
        self._show_error: Callable[..., Any] = sys.excepthook
        self._has_failed = False
        self._finder = ModelFinder()

    def hook(self) -> list[Any]:
        """Register the hooks of every optimizer's steps; return what removes them."""
        return [
            torch_optimizer.register_optimizer_step_pre_hook(self.before),
            torch_optimizer.register_optimizer_step_post_hook(self.after),
        ]

    # The hooks of torch.optim

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called before each step of any optimizer."""
        frame = sys._getframe(1)
        self._leave_steps(frame)
        self._frames.append(frame)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if len(self._frames) == 1:
            is_own = is_own_step(optimizer, frame)
            follows = self._follow(optimizer, is_own, has_closure=closure is not None)
            self._stepping = optimizer if follows and is_own else None
        # The step of Horovod's optimizer averages, and then calls that of its base class.
        if self._recorder is not None and optimizer is self._stepping:
            self._recorder.before_step(optimizer, has_closure=closure is not None)

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Called after each step of any optimizer. Waits for the comparison if no step is left."""
        self._leave_steps(sys._getframe(1))
        if self._frames:
            self._frames.pop()
        if self._frames or optimizer is not self._stepping:
            return
        if optimizer is self._optimizer:
            self.end_step()
        elif self._recorder is not None:
            self._recorder.after_other(optimizer)

    def _leave_steps(self, frame: FrameType) -> None:
        """Forget the steps that an exception has ended: `frame` has not been called by them."""
        while self._frames and not any(self._frames[-1] is f for f in callers(frame)):
            self._frames.pop()

    def end_step(self) -> None:
        """Count a step. Waits for the comparison if no step is left."""
        self._taken += 1
        self._left -= 1
        if self._taken == 1 and (model := self._finder.end()) is not None:
            model.register_forward_pre_hook(self._before_forward)
        if self._recorder is not None:
            self._recorder.after_step()
        elif self._marks:
            self._mark()
            if self._left == self._cpu_at:
                self._cpu.append(time.process_time())
        if self._left <= 0:
            self._serve()

    def _follow(self, optimizer: torch.optim.Optimizer, is_own: bool, has_closure: bool) -> bool:
        """Return whether the steps of `optimizer` are taken, or recorded beside those. Take them if
        it is the one to take, or replaces that.
        """
        if optimizer is self._optimizer:
            return True
        if os.getpid() != self._pid or (optimizer in self._seen and self._recorder is None):
            return False
        if not has_closure and not has_gradient(optimizer):
            return False
        if not is_own and self._finder.root is None:
            return False  # it may have some of its parameters only
        if self._number_of(optimizer) != self._number:
            return self._recorder is not None
        is_first, self._optimizer = self._optimizer is None, optimizer
        if not is_first:  # wrapped since, or made anew
            if self._recorder is not None:
                self._recorder.optimizer = optimizer
            return True
        names, self._parameters = self._named_parameters(optimizer)
        self._recorder = Recorder(optimizer, names, self._parameters, self._finder)
        self._is_cuda = any(p.is_cuda for p in parameters_of(optimizer))
        atexit.register(self._ended)
        self._show_error, sys.excepthook = sys.excepthook, self._failed
        return True

    def _number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the place of an optimizer by the order of first steps, from 1. One that has all
        parameters of an earlier one takes its place.
        """
        own = {id(p) for p in parameters_of(optimizer)}
        for i, known in enumerate(self._seen):
            if optimizer is known or {id(p) for p in parameters_of(known)} <= own:
                self._seen[i] = optimizer
                return i + 1
        self._seen.append(optimizer)
        return len(self._seen)

    def _named_parameters(self, optimizer: torch.optim.Optimizer) -> tuple[list[str], list[Tensor]]:
        """Return the parameters of the model, or the optimizer's if the model that was found lacks
        some of them.
        """
        own, model = parameters_of(optimizer), self._finder.root
        named = [] if model is None else list(model.named_parameters())
        if not {id(p) for p in own} <= {id(p) for _, p in named}:
            return [f"parameter {i}" for i in range(len(own))], own
        return [plain_name(name) for name, _ in named], [p for _, p in named]

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        """Note how long the script took from the end of the step before to its model."""
        if self._marks and len(self._input_s) < len(self._marks) and not self._is_cuda:
            self._input_s.append(time.perf_counter() - self._marks[-1])

    def _mark(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    # The comparison

    def _serve(self) -> None:
        """Answer the call that has its steps, and then others until one wants steps."""
        if self._connection is None:
            self._connection = connect(self._address, *self._world(), self._comparison)
        finish, self._finish = self._finish, None
        if finish is not None:
            self._answer(finish)
        while not self._left > 0:
            try:
                call = self._connection.recv()
            except (EOFError, OSError):
                call = None
            if call is None:
                self._connection.close()
                self._connection = None
                raise SystemExit(0)
            what, *arguments = call
            self._answer(lambda: getattr(self, f"call_{what}")(*arguments))  # noqa: B023

    def _answer(self, action: Callable[[], Any]) -> None:
        """Send what `action` returns, unless it wants steps first and so sets `_finish`."""
        assert self._connection is not None
        try:
            reply: tuple[bool, Any] = (True, action())
        except RefusedError as error:
            reply = (False, str(error))
        except Exception as error:
            reply = (False, f"rank {self._world()[0]}: {type(error).__name__}: {error}")
        if self._finish is None:
            self._connection.send(reply)

    def _failed(self, *error: Any) -> None:
        """Show an error, and leave it to the comparison to read it in the log."""
        self._has_failed = True
        self._show_error(*error)

    def _ended(self) -> None:
        """Tell the comparison that the script has come to its end without an error."""
        if self._connection is not None and os.getpid() == self._pid and not self._has_failed:
            text = f"the script ended after {self._taken} steps; let it train longer"
            try:
                self._connection.send((False, text))
                self._connection.close()
            except OSError:
                pass

    def _world(self) -> tuple[int, int]:
        """Return rank and number of ranks, as the engine knows them. An engine that knows of one
        alone, or none, may not know the launcher: then as that tells them.
        """
        engine = engine_world()
        if engine is not None and engine[1] > 1:
            return engine
        for rank, size in _WORLD:
            if rank in os.environ and size in os.environ:
                return int(os.environ[rank]), int(os.environ[size])
        return engine or (0, 1)

    # Calls

    def call_open(self) -> dict[str, Any]:
        """Return the settings in force, and the size of a step."""
        assert self._recorder is not None
        if type(self._optimizer).__name__ == "LBFGS":
            raise RefusedError("LBFGS computes several gradients in a step; use another optimizer")
        facts = self._recorder.facts()
        rank, size = self._world()
        return {
            **facts,
            "threads": torch.get_num_threads(),
            "affinity": sorted(os.sched_getaffinity(0)),
            "variables": dict(os.environ),
            "describe": {"engine": engine_name(), "torch": str(torch.__version__), "rank": rank},
            "samples": facts["samples"] * size,
        }

    def call_trace(self, steps: int) -> dict[str, Any] | None:
        """Return what is recorded of the first `steps` steps; take those that are left of them."""
        recorder = self._recorder
        assert recorder is not None
        rank, size = self._world()
        size = (engine_world() or (rank, size))[1]

        def finish() -> dict[str, Any]:
            self._recorder = None
            return {**recorder.finish(), "rank": rank, "world_size": size}

        if steps <= self._taken:
            return finish()
        self._left, self._finish = steps - self._taken, finish
        return None

    def call_time_steps(self, steps: int, skip: int) -> None:
        """Take `skip` untimed steps, then time `steps`; return milliseconds and CPU seconds.

        Raises RefusedError if parameters are not finite any more.
        """
        if self._recorder is not None:
            self._recorder.finish()
            self._recorder = None
        if not self._peak_is_of_steps:
            self._peak_is_of_steps = True
            self._reset_peak()
        self._marks, self._input_s, self._cpu = [], [], []
        self._mark()
        if not skip:
            self._cpu.append(time.process_time())
        self._left, self._cpu_at = steps + skip, steps

        def finish() -> dict[str, Any]:
            end = time.process_time()
            marks, self._marks = self._marks, []
            self._check_finite()
            if self._is_cuda:
                torch.cuda.synchronize()
                pairs = zip(marks, marks[1:], strict=False)
                step_ms = [float(before.elapsed_time(after)) for before, after in pairs]
            else:
                step_ms = [1000 * (b - a) for a, b in zip(marks, marks[1:], strict=False)]
            return {
                "step_ms": step_ms[skip:],
                "input_ms": [1000 * s for s in self._input_s[skip : skip + steps]],
                "cpu_s": end - self._cpu[0],
            }

        self._finish = finish

    def _check_finite(self) -> None:
        """Raise RefusedError if the smallest parameter is not finite: others then are not either,
        and what such steps cost says nothing.
        """
        smallest = min((p for p in self._parameters if p.numel()), key=Tensor.numel)
        if not bool(torch.isfinite(smallest.detach()).all()):
            raise RefusedError(
                f"the parameters were not finite by step {self._taken}, and steps on such numbers "
                "are not what training costs; lower the learning rate"
            )

    def _reset_peak(self) -> None:
        """Let the peak of the memory begin here, so that it is that of steps alone."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
        # proc(5): writing "5" resets VmHWM to the present resident size. If that is not permitted,
        # the peak includes the start.
        with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")

    def call_peak_mib(self) -> float:
        """Return the peak memory of this rank in MiB: resident, or on a GPU allocated there. A page
        that several processes share counts in parts, as in the proportional set size.
        """
        if self._is_cuda:
            return torch.cuda.max_memory_allocated() / 2**20
        found: dict[str, int] = {}
        for name in ("/proc/self/status", "/proc/self/smaps_rollup"):
            with contextlib.suppress(OSError), open(name, encoding="ascii") as file:
                fields = (line.split() for line in file)
                found.update((f[0], int(f[1])) for f in fields if f[-1:] == ["kB"])
        shared = found.get("Rss:", 0) - found.get("Pss:", 0)
        return (found["VmHWM:"] - shared) / 2**10

    def call_fingerprint(self) -> tuple[int, str]:
        """Return the number of steps taken, and a hash of the parameters after them."""
        return self._taken, fingerprint(self._parameters)


class ModelFinder:
    """Finds the model: the first module that the script calls. It records the samples that the
    model is called with before the first step, and each rank's own gradient of that step.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.root: nn.Module | None = None
        self.precision = "fp32"
        self.samples: list[str] = []
        self.micro_batches = 0
        self.local: dict[int, Tensor] = {}
        """The gradients that this rank has computed, by the id of the parameter."""
        self.before_last: dict[int, Tensor] = {}
        """Those before the last micro-batch."""
        self._handles: list[Any] = []
        self._original = nn.Module.__call__
        finder, original = self, self._original

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if finder.root is None and torch.is_grad_enabled() and module.training:
                finder.found(module)
            return original(module, *args, **kwargs)

        nn.Module.__call__ = called  # type: ignore[method-assign]

    def found(self, module: nn.Module) -> None:
        """Take a module that is called as the model, if it has parameters to train."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        if not parameters or os.getpid() != self._pid:
            return
        self.root = module
        nn.Module.__call__ = self._original  # type: ignore[method-assign]
        hook = module.register_forward_pre_hook(self._record, with_kwargs=True)
        self._handles = [hook, *(self._watch(p) for p in parameters)]

    def end(self) -> nn.Module | None:
        """Stop watching, and return the model; None if no module was called."""
        nn.Module.__call__ = self._original  # type: ignore[method-assign]
        for handle in self._handles[1:]:
            handle.remove()
        return self.root

    def stop_recording(self) -> None:
        """Record no more samples."""
        for handle in self._handles[:1]:
            handle.remove()

    def _record(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        self.micro_batches += 1
        self.samples += hash_samples((args, kwargs))
        self.before_last = dict(self.local)
        if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
            device = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
            half = torch.get_autocast_dtype(device) == torch.float16
            self.precision = "fp16" if half else "bf16"

    def _watch(self, p: Tensor) -> Any:
        """Hook a parameter so that its gradient is kept as backward computes it."""

        def keep(grad: Tensor) -> None:
            dense = grad.detach().to_dense() if grad.is_sparse else grad.detach()
            before = self.local.get(id(p))
            self.local[id(p)] = dense.clone() if before is None else before + dense

        return p.register_hook(keep)  # type: ignore[no-untyped-call]


class Part:
    """The parameters that the steps of one optimizer move, and what is recorded of them."""

    def __init__(self, names: Sequence[str], parameters: Sequence[Tensor], every: int) -> None:
        self.parameters, self._stride = parameters, every
        self.layout = [
            (name, -(-p.numel() // every)) for name, p in zip(names, parameters, strict=True)
        ]
        self.initial = sample(parameters, every)
        self.sha256 = fingerprint(parameters)
        self.gradient = self.largest = self._last = np.empty(0)
        """The gradient of the first step, and the largest absolute one of all steps."""

    def gradients(self) -> list[Tensor | None]:
        """Return the present gradients, dense."""
        return [
            None if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad
            for p in self.parameters
        ]

    def sample(self, tensors: Sequence[Tensor | None]) -> Any:
        """Return a sample of one tensor for each parameter; zeros for None."""
        zero = torch.zeros(())
        pairs = zip(tensors, self.parameters, strict=True)
        return sample([zero.expand(p.shape) if t is None else t for t, p in pairs], self._stride)

    def before_step(self) -> None:
        """Record the gradient of a step."""
        self._last = self.sample(self.gradients())

    def after_step(self, gradient: Any = None) -> None:
        """Keep the gradient of a step that has ended; a sample, or the one before the step."""
        self._last = self._last if gradient is None else gradient
        if not self.gradient.size:
            self.gradient = self.largest = self._last
        self.largest = np.maximum(self.largest, np.abs(self._last))


class Recorder:
    """Records the first steps of one optimizer, and what others set and move meanwhile."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Sequence[str],
        parameters: list[Tensor],
        finder: ModelFinder,
    ) -> None:
        """`parameters`: those of other optimizers are appended when these step."""
        self.optimizer = optimizer
        self._names, self._parameters, self._finder = list(names), parameters, finder
        self._stride = stride(parameters)
        self._part = Part(names, list(parameters), self._stride)
        self._others: dict[torch.optim.Optimizer, Part] = {}
        counts = [
            int(state["step"])
            for state in optimizer.state.values()
            if isinstance(state, dict) and "step" in state
        ]
        self._has_closure = False
        self._norm_before = 0.0
        self._steps: list[dict[str, Any]] = []
        self._elements: dict[str, Any] = {}
        self._state_step = max(counts, default=0)
        self._settings = [settings(group) for group in optimizer.param_groups]
        self._kind = type(optimizer).__name__

    def before_step(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        """Record the parameters, and the gradient, which a closure has not computed yet. In a step
        that calls that of a base class, once more.
        """
        if optimizer is not self.optimizer:
            self._part_of(optimizer).before_step()
            return
        self._has_closure = has_closure
        self._norm_before = norm(self._part.parameters)
        if not has_closure:
            self._record_gradient()

    def after_step(self) -> None:
        """Record the gradient after a step with a closure; begin the next step."""
        if self._has_closure:
            self._record_gradient()
        step, finder = self._steps[-1], self._finder
        self._part.after_step(step.pop("gradient"))
        step["is_over"] = True
        if len(self._steps) == 1:
            self._record_local()
        step["samples"], finder.samples = finder.samples, []
        step["micro_batches"], finder.micro_batches = finder.micro_batches, 0

    def after_other(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the step of another optimizer than the one whose steps are taken."""
        self._part_of(optimizer).after_step()

    def _part_of(self, optimizer: torch.optim.Optimizer) -> Part:
        """Return the part of another optimizer: its parameters that are not there yet."""
        if optimizer not in self._others:
            known = {id(p) for p in self._parameters}
            new = [p for p in parameters_of(optimizer) if id(p) not in known]
            names = [f"parameter {i + len(known)}" for i in range(len(new))]
            self._others[optimizer] = Part(names, new, self._stride)
            self._parameters += new
            self._settings += [settings(group) for group in optimizer.param_groups]
            self._kind += f", {type(optimizer).__name__}"
        return self._others[optimizer]

    def _record_gradient(self) -> None:
        if not self._steps or "is_over" in self._steps[-1]:
            self._steps.append({})
        grads = self._part.gradients()
        known = [g for g in grads if g is not None]
        self._steps[-1].update(
            gradient=self._part.sample(grads),
            lr=[
                float(group["lr"])
                for optimizer in (self.optimizer, *self._others)
                for group in optimizer.param_groups
                if group.get("lr") is not None
            ],
            parameter_norm=self._norm_before,
            gradient_norm=norm(known),
            gradient_bytes=sum(g.numel() * g.element_size() for g in known),
            gradient_dtypes=sorted({dtype_name(g) for g in known}),
        )

    def _record_local(self) -> None:
        """Record this rank's own gradient of the first step, if backward was seen."""
        finder, parameters = self._finder, self._part.parameters
        local, before = finder.local, finder.before_last
        finder.local, finder.before_last = {}, {}
        # Not with a loss scale, which they still have, nor if the model has other parameters.
        known = all(p.grad is None or id(p) in local for p in parameters)
        if local and known and finder.precision != "fp16":
            for name, found in (("local", local), ("before_last", before)):
                if found:
                    self._elements[name] = self._part.sample([found.get(id(p)) for p in parameters])
            self._steps[0]["local_norm"] = norm(list(local.values()))

    def facts(self) -> dict[str, Any]:
        """Return the size of a step and of the model."""
        step = self._steps[0]
        return {
            "samples": len(step["samples"]),
            "gradient_bytes": step["gradient_bytes"],
            "parameters": sum(p.numel() for p in self._parameters),
            "lr": step["lr"],
        }

    def finish(self) -> dict[str, Any]:
        """Return the trace, and record no more."""
        finder, elements = self._finder, self._elements
        finder.stop_recording()
        parts = [self._part, *self._others.values()]
        for name in ("initial", "gradient", "largest"):
            elements[name] = np.concatenate([getattr(part, name) for part in parts])
        elements["layout"] = [item for part in parts for item in part.layout]
        elements["final"] = sample(self._parameters, self._stride)
        for name in ("local", "before_last"):
            if name in elements:  # of other optimizers' parameters it was not seen
                missing = elements["initial"].size - elements[name].size
                elements[name] = np.pad(elements[name], (0, missing), constant_values=np.nan)
        dtypes: dict[str, int] = {}
        for p in self._parameters:
            dtypes[dtype_name(p)] = dtypes.get(dtype_name(p), 0) + p.numel()
        buffers = [] if finder.root is None else list(finder.root.named_buffers())
        floating = [b for _, b in buffers if b.is_floating_point()]
        means = [
            torch.full_like(b, name.endswith("running_mean"))
            for name, b in buffers
            if b.is_floating_point()
        ]
        elements["buffers"] = sample(floating, stride(floating))
        elements["means"] = sample(means, stride(floating))
        for step in self._steps:
            step.pop("is_over", None)
        return {
            "parameters": dtypes,
            "optimizer": self._kind,
            "settings": self._settings,
            "state_step": self._state_step,
            "initial_sha256": " ".join(part.sha256 for part in parts),
            "precision": finder.precision,
            "elements": elements,
            "steps": self._steps,
            "final_sha256": fingerprint(self._parameters),
            "final_buffers_sha256": fingerprint([b for _, b in buffers]),
        }


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any gradient is not zero: a step on zeros does not train."""
    grads = (p.grad for p in parameters_of(optimizer) if p.grad is not None)
    return any(bool((g.coalesce().values() if g.is_sparse else g).any()) for g in grads)


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_own_step(optimizer: torch.optim.Optimizer, frame: FrameType) -> bool:
    """Return whether this is the step of the optimizer's class, not that of a base class. Horovod's
    Adasum calls the latter in backward, for each parameter apart.

    `frame`: that of torch's wrapper around each `step`, `Optimizer.profile_hook_step`.
    """
    step: Any = type(optimizer).step
    if getattr(step, "__code__", None) is not frame.f_code:  # not wrapped, or compiled
        return True
    return bool(frame.f_locals.get("func", step.__wrapped__) is step.__wrapped__)


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers put before it."""
    while prefix := next((p for p in _PREFIXES if name.startswith(p)), ""):
        name = name[len(prefix) :]
    return name


def engine_world() -> tuple[int, int] | None:
    """Return rank and number of ranks, as the engine in use knows them; None without one."""
    engine = _engine()
    return None if engine is None else (int(engine[1].rank()), int(engine[1].size()))


def engine_name() -> str:
    """Return which engine averages, as far as it can be seen from here."""
    engine = _engine()
    return "none" if engine is None else engine[0]


def _engine() -> tuple[str, Any] | None:
    """Return the name of the engine in use, and what has its `rank()` and `size()`."""
    for name in ("horovod.torch", "hvdtrain.hvd"):
        hvd = sys.modules.get(name)
        if hvd is not None and hasattr(hvd, "is_initialized") and hvd.is_initialized():
            return name, hvd
    c10d = sys.modules.get("torch.distributed")
    if c10d is not None and c10d.is_available() and c10d.is_initialized():
        return f"torch.distributed, {c10d.get_backend()}", c10d.group.WORLD
    return None


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """Return a hash of dtypes, shapes and bytes, in this order; names differ between scripts."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(f"{t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pieces(t: Tensor) -> Iterator[Tensor]:
    """Yield views of at most PIECE elements that cover `t`, in any memory format."""
    if t.numel() <= PIECE:
        yield t
        return
    longest = max(range(t.dim()), key=t.size)
    for part in t.chunk(-(-t.numel() // PIECE), longest):
        yield from pieces(part)


def norm(tensors: Sequence[Tensor]) -> float:
    """Return the norm of all tensors together, in float64."""
    total = 0.0
    for t in tensors:
        for piece in pieces(t.detach()):
            total += float(piece.double().square().sum())
    return math.sqrt(total)


def stride(tensors: Sequence[Tensor]) -> int:
    """Return the sampling stride. It restarts in each tensor, so that each has a sample."""
    room = max(1, MAX_SAMPLED - len(tensors))
    return max(1, -(-sum(t.numel() for t in tensors) // room))


def sample(tensors: Sequence[Tensor], every: int) -> Any:
    """Return each tensor's elements at the stride `every`, in float64, in one array."""

    def sampled(t: Tensor) -> Any:
        chosen = t.detach().take(torch.arange(0, t.numel(), every, device=t.device))
        return chosen.double().cpu().numpy()

    return np.concatenate([sampled(t) for t in tensors]) if tensors else np.empty(0)


def hash_samples(batch: Any) -> list[str]:
    """Return one hash per sample of a model's input: of its row in the first tensor. What else is
    with it, such as labels, some scripts give to the model and others to the loss. Empty for an
    input without tensors.
    """
    t = next(tensors_in(batch), None)
    if t is None or not t.numel():
        return []
    dense = (t.detach() if t.layout is torch.strided else t.detach().to_dense()).cpu()
    rows = dense.contiguous().reshape(dense.shape[0] if dense.dim() else 1, -1)
    data = rows.view(torch.uint8).numpy()
    return [hashlib.blake2b(row.data, digest_size=8).hexdigest() for row in data]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def settings(group: dict[str, Any]) -> dict[str, str]:
    """Return the hyper-parameters of a group without learning rates."""
    return {
        k: str(group[k]) for k in sorted(group) if k not in _HOW_OPTIONS and not k.endswith("lr")
    }


def dtype_name(t: Tensor) -> str:
    """Return "float32" for torch.float32."""
    return str(t.dtype).removeprefix("torch.")


def start() -> None:
    """Take the steps that the environment asks for. `sitecustomize` calls it."""
    number, what, address = os.environ["HVDTRAIN_PROBE"].split(" ", 2)
    Probe(address, int(number), int(what.strip("-bt"))).hook()
