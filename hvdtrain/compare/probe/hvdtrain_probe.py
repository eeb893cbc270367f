"""The probe in one process: it takes the steps of the first optimizer that trains there.

    the script                this module                              the comparison
    optimizer.step()   ---->  before: record the first state
                              after: record the gradient, count;
                              the first time connect                ---->  (rank, size, pid, host)
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Connection
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
# Options that change how a step is computed, not what it computes.
_HOW_OPTIONS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_SAMPLED = 1 << 18  # elements of all parameters together; at least one of each
PIECE = 1 << 18  # elements that are processed at once
NO_ENGINE = "none"
MAX_WAITED = 200  # steps of other optimizers, before the one that is asked for takes one

Named = list[tuple[str, Tensor]]


class Probe:
    """The optimizer whose steps are taken, the connection, and the steps that are left."""

    def __init__(self, address: str = "", number: int = 1, comparison: int = 0) -> None:
        """`number`: which optimizer is taken, by the order in which they step first; from 1."""
        self._address, self._number, self._comparison = address, number, comparison
        self._finder = ModelFinder()
        self._recorder: Recorder | None = Recorder(self._finder)
        self._optimizers: list[torch.optim.Optimizer] = []
        """One for each set of parameters, by the order of their first steps that count."""
        self._left = 1
        self._taken = self._waited = 0
        self._connection: Connection | None = None
        self._finish: Callable[[], Any] | None = None
        self._marks: list[Any] = []
        self._input_s: list[float] = []
        self._cpu_s: list[float] = []
        self._parameters: list[Tensor] = []
        self._is_cuda = False
        self._peak_is_of_steps = False
        self._pid = os.getpid()

    def hook(self) -> list[Any]:
        """Register the hooks of every optimizer's steps; return what removes them."""
        return [
            torch_optimizer.register_optimizer_step_pre_hook(untraced(self._before_step)),
            torch_optimizer.register_optimizer_step_post_hook(untraced(self._after_step)),
        ]

    # The hooks of torch.optim

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._recorder is not None and os.getpid() == self._pid:
            self._recorder.before_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Wait for the comparison if no step is left."""
        if os.getpid() != self._pid:
            return
        if optimizer not in self._optimizers and not has_gradient(optimizer):
            if self._recorder is not None:
                self._recorder.forget(optimizer)
            return
        # Not the step of the base class that Horovod's optimizer calls after it has averaged.
        if not is_whole_step(optimizer):
            return
        number = self._number_of(optimizer)
        if self._recorder is not None:
            self._recorder.after_step(optimizer, number, is_taken=number == self._number)
        if number == self._number:
            self.end_step(optimizer)
        elif not self._taken:
            self._waited += 1
            if self._waited == MAX_WAITED:
                raise RuntimeError(
                    f"hvdtrain compare --optimizer {self._number}: number of optimizers in the "
                    f"first {MAX_WAITED} steps: {len(self._optimizers)}"
                )

    def end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step. Waits for the comparison if no step is left."""
        self._taken += 1
        self._left -= 1
        if self._taken == 1:
            self._is_cuda = any(p.is_cuda for p in parameters_of(optimizer))
            if (model := self._finder.end()) is not None:
                model.register_forward_pre_hook(self._before_forward)
            atexit.register(self._ended)
        if self._marks:
            self._mark()
        if self._left <= 0:
            self._serve()

    def _number_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the place of an optimizer by the order of first steps, from 1. One that has all
        parameters of an earlier one, because it is wrapped since or made anew, takes its place.
        """
        if optimizer in self._optimizers:
            return self._optimizers.index(optimizer) + 1
        own = {id(p) for p in parameters_of(optimizer)}
        for i, known in enumerate(self._optimizers):
            if {id(p) for p in parameters_of(known)} <= own:
                self._optimizers[i] = optimizer
                return i + 1
        self._optimizers.append(optimizer)
        return len(self._optimizers)

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        """Note how long the script took from the end of the step before to its model."""
        if torch.compiler.is_compiling():
            return
        if self._marks and len(self._input_s) < len(self._marks) and not self._is_cuda:
            self._input_s.append(time.perf_counter() - self._marks[-1])

    def _mark(self) -> None:
        self._cpu_s.append(time.process_time())
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    # The comparison

    def _connect(self) -> Connection:
        """Connect to the comparison's socket; on another host, to one that ssh forwards there,
        whose name ends with the number of the host. Tells who connects, after whose step.
        """
        # A rank without a launcher is killed with the comparison: stopped, it would handle no other
        # signal.
        if os.getppid() == self._comparison:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        optimizer = self._optimizers[self._number - 1]
        numbers = sum(p.numel() for p in parameters_of(optimizer))
        about = f"{type(optimizer).__name__} of {numbers} parameters"
        for path in [self._address, *sorted(glob.glob(f"{self._address}-*"))]:
            with contextlib.suppress(OSError):
                connection = Client(path, "AF_UNIX")
                place = path.removeprefix(self._address)
                connection.send((*self._world(), os.getpid(), place, about))
                return connection
        raise OSError(f"no socket of the comparison at {self._address}")

    def _serve(self) -> None:
        """Answer the call that has its steps, and then others until one wants steps."""
        if self._connection is None:
            self._connection = self._connect()
        while not self._left > 0:
            finish, self._finish = self._finish, None
            if finish is not None:
                self._answer(finish)
                continue
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
        except Exception as error:
            reply = (False, f"rank {self._world()[0]}: {type(error).__name__}: {error}")
        if self._finish is None:
            self._connection.send(reply)

    def _ended(self) -> None:
        """Tell the comparison that the script has come to its end. An error, of which Python has
        set `sys.last_value`, it reads in the log.
        """
        has_failed = hasattr(sys, "last_value")
        if self._connection is not None and os.getpid() == self._pid and not has_failed:
            text = f"the script ended after {self._taken} steps; let it train longer"
            with contextlib.suppress(OSError):
                self._connection.send((False, text))
                self._connection.close()

    def _world(self) -> tuple[int, int]:
        """Return rank and number of ranks, as the engine knows them. An engine that knows of one
        alone, or none, may not know the launcher: then as that tells them.
        """
        _, rank, size = engine()
        for names in _WORLD if size == 1 else ():
            if all(name in os.environ for name in names):
                return int(os.environ[names[0]]), int(os.environ[names[1]])
        return rank, size

    # Calls

    def call_open(self) -> dict[str, Any]:
        """Return the settings in force, and the size of a step."""
        assert self._recorder is not None
        if type(self._optimizers[self._number - 1]).__name__ == "LBFGS":
            raise ValueError("LBFGS computes several gradients in a step; use another optimizer")
        step = self._recorder.steps[0]
        return {
            "samples": len(step["samples"]) * self._world()[1],
            "threads": torch.get_num_threads(),
            "affinity": sorted(os.sched_getaffinity(0)),
            "describe": {
                "engine": engine()[0],
                "torch": str(torch.__version__),
                "parameters": sum(p.numel() for p in self._recorder.parameters),
                "gradient_bytes": step["gradient_bytes"],
                "lr": step["lr"],
            },
        }

    def call_trace(self, steps: int) -> None:
        """Take those of the first `steps` steps that are left; return what is recorded of all."""
        rank, size = self._world()
        name, _, world = engine()
        world = size if name == NO_ENGINE else world

        def finish() -> dict[str, Any]:
            return {**self._recorded(), "rank": rank, "world_size": world}

        self._left, self._finish = steps - self._taken, finish

    def _recorded(self) -> dict[str, Any]:
        """Return the trace, and record no more."""
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        if self._finder.recording is not None:
            self._finder.recording.remove()
        self._parameters = recorder.parameters
        return recorder.trace()

    def call_time_steps(self, steps: int, skip: int) -> None:
        """Take `skip` untimed steps, then time `steps`; return milliseconds and CPU seconds."""
        if self._recorder is not None:
            self._recorded()
        if not self._peak_is_of_steps:
            self._peak_is_of_steps = True
            self._reset_peak()
        self._marks, self._input_s, self._cpu_s = [], [], []
        self._mark()
        self._left = steps + skip

        def finish() -> dict[str, Any]:
            marks, self._marks = self._marks, []
            if self._is_cuda:
                torch.cuda.synchronize()
                pairs = zip(marks, marks[1:], strict=False)
                step_ms = [float(before.elapsed_time(after)) for before, after in pairs]
            else:
                step_ms = [1000 * (b - a) for a, b in zip(marks, marks[1:], strict=False)]
            return {
                "step_ms": step_ms[skip:],
                "input_ms": [1000 * s for s in self._input_s[skip : skip + steps]],
                "cpu_s": self._cpu_s[-1] - self._cpu_s[skip],
            }

        self._finish = finish

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
        self.precision = "float32"
        self.samples: list[str] = []
        self.micro_batches = 0
        self.local: dict[int, Tensor] = {}
        """The gradients that this rank has computed, by the id of the parameter."""
        self.recording: Any = None
        """Of samples: `remove` ends it. None before a model was found."""
        self._watched: list[Any] = []
        self._original = nn.Module.__call__
        finder, original = self, self._original

        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and finder.root is None:
                finder.find(module)
            return original(module, *args, **kwargs)

        nn.Module.__call__ = called  # type: ignore[method-assign]

    def find(self, module: nn.Module) -> None:
        """Take a module that is called as the model, if it trains."""
        parameters = [p for p in module.parameters() if p.requires_grad]
        is_training = torch.is_grad_enabled() and module.training and parameters
        if not is_training or os.getpid() != self._pid:
            return
        self.root = module
        nn.Module.__call__ = self._original  # type: ignore[method-assign]
        self.recording = module.register_forward_pre_hook(self._record, with_kwargs=True)
        self._watched = [self._watch(p) for p in parameters]

    def end(self) -> nn.Module | None:
        """Stop watching, and return the model; None if no module was called."""
        nn.Module.__call__ = self._original  # type: ignore[method-assign]
        for handle in self._watched:
            handle.remove()
        return self.root

    def _record(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        self.micro_batches += 1
        self.samples += hash_samples((args, kwargs))
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            self.precision = dtype_name(torch.get_autocast_dtype(device))

    def _watch(self, p: Tensor) -> Any:
        """Hook a parameter so that its gradient is kept as backward computes it."""

        def keep(grad: Tensor) -> None:
            self.local[id(p)] = self.local.get(id(p), 0) + grad.detach().to_dense()

        return p.register_hook(keep)  # type: ignore[no-untyped-call]


class Part:
    """The parameters that the steps of one optimizer move, and what is recorded of them."""

    def __init__(self, optimizer: torch.optim.Optimizer, named: Named, every: int) -> None:
        """Record the state before the first step."""
        self.parameters, self._stride = [p for _, p in named], every
        self.layout = [(name, -(-p.numel() // every)) for name, p in named]
        initial = sample(self.parameters, every)
        self.arrays = {"initial": initial, "local": np.full_like(initial, np.nan)}
        """The initial parameters; the gradient of the first step; the largest absolute one of all
        steps; and this rank's own of the first step (local).
        """
        self.sha256 = fingerprint(self.parameters)
        states = (s for s in optimizer.state.values() if isinstance(s, dict))
        self.state_step = max((int(s["step"]) for s in states if "step" in s), default=0)
        self.settings = [
            {k: str(group[k]) for k in sorted(group.keys() - _HOW_OPTIONS) if not k.endswith("lr")}
            for group in optimizer.param_groups
        ]
        """Hyper-parameters of each group, without learning rates."""
        self.kind = type(optimizer).__name__
        self.groups = optimizer.param_groups

    def gradients(self) -> list[Tensor | None]:
        """Return the present gradients, dense."""
        return [None if p.grad is None else p.grad.to_dense() for p in self.parameters]

    def sample(self, tensors: Sequence[Tensor | None]) -> Any:
        """Return a sample of one tensor for each parameter; zeros for None."""
        zero = torch.zeros(())
        pairs = zip(tensors, self.parameters, strict=True)
        return sample([zero.expand(p.shape) if t is None else t for t, p in pairs], self._stride)

    def record_gradient(self) -> None:
        """Record the gradient of a step that has ended."""
        found = self.sample(self.gradients())
        self.arrays.setdefault("gradient", found)
        self.arrays["largest"] = np.maximum(self.arrays.get("largest", 0.0), np.abs(found))

    def record_local(self, finder: ModelFinder) -> float:
        """Record this rank's own gradient of the first step; return its norm, 0 if it was not seen:
        with a loss scale, which it still has, or if the model has other parameters.
        """
        known = all(p.grad is None or id(p) in finder.local for p in self.parameters)
        if not finder.local or not known or finder.precision == "float16":
            return 0.0
        self.arrays["local"] = self.sample([finder.local.get(id(p)) for p in self.parameters])
        return norm(list(finder.local.values()))


class Recorder:
    """Records the first steps of one optimizer, and what others set and move meanwhile."""

    def __init__(self, finder: ModelFinder) -> None:
        self.parameters: list[Tensor] = []
        self._finder = finder
        self._stride = 1
        self._begun: dict[torch.optim.Optimizer, Part] = {}
        """Those whose first step has begun; `forget` takes back one that does not count."""
        self._parts: list[Part] = []
        """By the number of the optimizer, in the order of their first steps."""
        self.steps: list[dict[str, Any]] = []
        self._local_norm = 0.0

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the state before the first step of an optimizer."""
        if optimizer not in self._begun:
            named = self._named_parameters(optimizer)
            if not self._parts:
                self._stride = stride([p for _, p in named])
            self._begun[optimizer] = Part(optimizer, named, self._stride)

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Forget a first step that does not count."""
        self._begun.pop(optimizer, None)

    def after_step(self, optimizer: torch.optim.Optimizer, number: int, is_taken: bool) -> None:
        """Record a step that has ended."""
        if number > len(self._parts):
            self._parts.append(self._begun[optimizer])
            self.parameters += self._parts[-1].parameters
        part, finder = self._parts[number - 1], self._finder
        part.groups = optimizer.param_groups
        part.record_gradient()
        if not is_taken:
            return
        if not self.steps:
            self._local_norm = part.record_local(finder)
            finder.local = {}
        grads = [g for g in part.gradients() if g is not None]
        rates = [group.get("lr") for one in self._parts for group in one.groups]
        step = {
            "lr": [float(rate) for rate in rates if rate is not None],
            "parameter_norm": norm(part.parameters),
            "gradient_norm": norm(grads),
            "gradient_bytes": sum(g.numel() * g.element_size() for g in grads),
            "gradient_dtypes": sorted({dtype_name(g.dtype) for g in grads}),
            "samples": finder.samples,
            "micro_batches": finder.micro_batches,
        }
        self.steps.append(step)
        finder.samples, finder.micro_batches = [], 0

    def _named_parameters(self, optimizer: torch.optim.Optimizer) -> Named:
        """Return the parameters of the model, or the optimizer's if the model that was found lacks
        some of them; of further optimizers those that are not there yet.
        """
        own, root = parameters_of(optimizer), self._finder.root
        named: Named = [] if root is None else list(root.named_parameters())
        if not self._parts and {id(p) for p in own} <= {id(p) for _, p in named}:
            return named
        known = {id(p) for p in self.parameters}
        return [(f"parameter {i}", p) for i, p in enumerate(own, len(known)) if id(p) not in known]

    def trace(self) -> dict[str, Any]:
        """Return what has been recorded."""
        parts, root = self._parts, self._finder.root
        elements: dict[str, Any] = {"layout": [item for part in parts for item in part.layout]}
        for name in ("initial", "gradient", "largest", "local"):
            elements[name] = np.concatenate([part.arrays[name] for part in parts])
        elements["final"] = sample(self.parameters, self._stride)
        dtypes: Counter[str] = Counter()
        for p in self.parameters:
            dtypes[dtype_name(p.dtype)] += p.numel()
        buffers = {} if root is None else dict(root.named_buffers())
        floating = {name: b for name, b in buffers.items() if b.is_floating_point()}
        means = [torch.full_like(b, n.endswith("running_mean")) for n, b in floating.items()]
        for name, tensors in (("buffers", list(floating.values())), ("means", means)):
            elements[name] = sample(tensors, stride(tensors))
        return {
            "parameters": dict(dtypes),
            "optimizer": ", ".join(part.kind for part in parts),
            "settings": [group for part in parts for group in part.settings],
            "state_step": max(part.state_step for part in parts),
            "initial_sha256": " ".join(part.sha256 for part in parts),
            "precision": self._finder.precision,
            "elements": elements,
            "steps": self.steps,
            "local_norm": self._local_norm,
            "final_sha256": fingerprint(self.parameters),
            "final_buffers_sha256": fingerprint(list(buffers.values())),
        }


def untraced(hook: Any) -> Any:
    """Return a hook that torch.compile does not trace. To call what `disable` returns costs more
    than all else here.
    """

    def called(*arguments: Any) -> None:
        compiler: Any = torch.compiler  # which torch has not yet when the probe is loaded
        (compiler.disable(hook) if compiler.is_compiling() else hook)(*arguments)

    return called


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether any gradient is not zero: a step on zeros does not train."""
    grads = (p.grad for p in parameters_of(optimizer) if p.grad is not None)
    return any(bool(g.to_dense().any()) for g in grads)


def is_whole_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether this is the step that the script has called: not one within another, nor that
    of a base class, which Horovod's Adasum calls in backward for each parameter apart.
    """
    step: Any = type(optimizer).step
    found, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code is step.__code__:  # torch's wrapper around each step, if it has one
            found.append(frame.f_locals.get("func"))
        frame = frame.f_back  # type: ignore[assignment]
    # None of a step that is not wrapped, or compiled.
    return found in ([], [None], [getattr(step, "__wrapped__", None)])


def engine() -> tuple[str, int, int]:
    """Return the engine in use, and rank and number of ranks, as it knows them."""
    for name in ("horovod.torch", "hvdtrain.hvd"):
        hvd = sys.modules.get(name)
        if getattr(hvd, "is_initialized", bool)():
            return name, int(hvd.rank()), int(hvd.size())  # type: ignore[union-attr]
    c10d = sys.modules.get("torch.distributed")
    if c10d is not None and c10d.is_available() and c10d.is_initialized():
        return f"torch.distributed, {c10d.get_backend()}", c10d.get_rank(), c10d.get_world_size()
    return NO_ENGINE, 0, 1


def fingerprint(tensors: Sequence[Tensor]) -> str:
    """Return a hash of dtypes, shapes and bytes, in this order; names differ between scripts."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(f"{t.dtype} {tuple(t.shape)}".encode())
        digest.update(t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def norm(tensors: Sequence[Tensor]) -> float:
    """Return the norm of all tensors together, in float64; of pieces, which are views."""
    total = 0.0
    for t in map(torch.atleast_1d, tensors):
        count = max(1, -(-t.numel() // PIECE))
        for piece in t.detach().chunk(count, max(range(t.dim()), key=t.size)):
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

    return np.concatenate([np.empty(0), *map(sampled, tensors)])


def hash_samples(batch: Any) -> list[str]:
    """Return one hash per sample of a model's input: of its row in the first tensor. What else is
    with it, such as labels, some scripts give to the model and others to the loss. Empty for an
    input without tensors.
    """
    t = next(tensors_in(batch), None)
    if t is None or not t.numel():
        return []
    dense = t.detach().to_dense().cpu().contiguous()
    rows = dense.reshape(dense.shape[0] if dense.dim() else 1, -1)
    data = rows.view(torch.uint8).numpy()
    return [hashlib.blake2b(row.data, digest_size=8).hexdigest() for row in data]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def start() -> None:
    """Take the steps that the environment asks for. `sitecustomize` calls it."""
    number, what, _port, address = os.environ["HVDTRAIN_PROBE"].split(" ", 3)
    Probe(address, int(number), int(what.strip("-bt"))).hook()
