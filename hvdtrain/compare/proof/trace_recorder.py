"""Recorder of work traces: hooks around the first steps of an arm, inside its ranks.

`worker` runs it for the call `trace`. It removes all hooks at the end, so that the timed steps run
without them. The trace itself is a RankTrace of `work_trace`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.backends.base import Backend
from hvdtrain.compare.compare_options import EXACT_METHODS, METHOD_OPTIONS
from hvdtrain.compare.proof import work_trace
from hvdtrain.compare.proof.work_trace import Array, ElementSample, RankTrace, StepTrace
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.meter import StepTaken
from hvdtrain.training.metrics import fingerprint
from hvdtrain.training.precision import Precision
from hvdtrain.trees import map_tree

# Elements processed at once: few, so that peak memory is that of training, not of the recorder.
PIECE = 1 << 18
# Options that change how a step is computed, not what it computes; arms may differ in them.
_HOW_OPTIONS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}


class Loop(Protocol):
    """The loop to record: a Trainer after `set_up`, or a hand-written loop with the same parts."""

    backend: Backend
    config: TrainConfig
    precision: Precision
    model: nn.Module
    optimizer: Optimizer
    on_batch: Callable[[Any], None] | None


def record_trace(loop: Loop, steps: Iterator[StepTaken], num_steps: int) -> RankTrace:
    """Take `num_steps` of `loop`'s `steps`, and return the trace of their work. Collective.

    The trace is shorter if the run ends earlier.
    """
    recorder = TraceRecorder(loop)
    with recorder.recording():
        for _ in range(num_steps):
            recorder.trace.steps.append(StepTrace())
            step = next(steps, None)
            if step is None:
                recorder.trace.steps.pop()
                break
            recorder.trace.steps[-1].loss = float(step.loss)
    recorder.finish()
    return recorder.trace


class TraceRecorder:
    """Fills in a trace while steps are taken."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._depth = 0
        config, model, optimizer = loop.config, loop.model, loop.optimizer
        self._stride = _stride(list(model.parameters()))
        counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
        self.trace = RankTrace(
            rank=loop.backend.world.rank,
            world_size=loop.backend.world.size,
            precision=config.precision,
            accumulate=config.accumulate,
            clip_norm=config.clip_norm,
            buffers_policy=loop.backend.options.buffers,
            parameters=_dtypes(model),
            optimizer=type(optimizer).__name__,
            settings=[_settings(group) for group in optimizer.param_groups],
            state_step=max(counts, default=0),
            initial_sha256=fingerprint(dict(model.named_parameters())),
            initial_buffers_sha256=fingerprint(dict(model.named_buffers())),
            method={
                name: getattr(config, name) for name in METHOD_OPTIONS if name not in EXACT_METHODS
            },
            elements=ElementSample(
                [(name, -(-p.numel() // self._stride)) for name, p in model.named_parameters()],
                self._sample(list(model.parameters())),
            ),
        )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Install the hooks, and remove them on exit."""
        loop = self._loop
        with ExitStack() as undo:
            loop.on_batch = self._on_batch
            undo.callback(setattr, loop, "on_batch", None)
            undo.callback(self._wrap_averaging())
            for handle in (
                loop.optimizer.register_step_pre_hook(self._before_step),
                loop.optimizer.register_step_post_hook(self._after_step),
            ):
                undo.callback(handle.remove)
            yield

    def finish(self) -> None:
        """Record the state after the last step."""
        trace, model = self.trace, self._loop.model
        trace.final_sha256 = fingerprint(dict(model.named_parameters()))
        trace.final_buffers_sha256 = fingerprint(dict(model.named_buffers()))
        trace.elements.final = self._sample(list(model.parameters()))
        named = {n: b for n, b in model.named_buffers() if b.is_floating_point()}
        floating = list(named.values())
        means = [torch.full_like(b, n.endswith("running_mean")) for n, b in named.items()]
        trace.elements.buffers = _sample(floating, _stride(floating))
        trace.elements.means = _sample(means, _stride(floating))

    def _wrap_averaging(self) -> Callable[[], None]:
        """Wrap the backend's `average_gradients`, and return a function that unwraps it."""
        backend, original = self._loop.backend, self._loop.backend.average_gradients

        def recorded(optimizer: Optimizer) -> None:
            original(optimizer)
            backend.synchronize(optimizer, "gradients")
            self._after_finish()

        backend.average_gradients = recorded  # type: ignore[method-assign]
        return lambda: vars(backend).pop("average_gradients")

    # Hooks, in the order in which a step runs them

    def _on_batch(self, batch: Any) -> None:
        step = self.trace.steps[-1]
        if not step.micro_batches:
            step.parameter_norm = self._norm(list(self._loop.model.parameters()))
        elif len(self.trace.steps) == 1:
            # Overwritten by each further micro-batch: the gradient before the last one stays.
            self.trace.elements.before_last = self._sample_gradient()
        step.micro_batches += 1
        step.samples += hash_samples(batch)

    def _after_finish(self) -> None:
        # fp16 scales the loss by a power of two, so the division is exact.
        scale = self._loop.precision.scaler.get_scale()
        self.trace.steps[-1].gradient_norm = self._norm(self._gradients()) / scale
        if len(self.trace.steps) == 1:
            self.trace.elements.gradient = self._sample_gradient() / scale
            if self.trace.elements.before_last is not None:
                self.trace.elements.before_last /= scale

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # Horovod's optimizer is a subclass whose step calls its parent's, so torch runs this hook
        # twice. The inner call is last, after all that the outer step does to the gradients.
        self._depth += 1
        step = self.trace.steps[-1]
        grads = self._gradients()
        step.lr = [float(group["lr"]) for group in optimizer.param_groups]
        step.used_norm = self._norm(grads)
        step.gradient_bytes = sum(g.numel() * g.element_size() for g in grads if g is not None)
        step.gradient_dtypes = sorted({_dtype(g) for g in grads if g is not None})
        elements, gradient = self.trace.elements, self._sample_gradient()
        if len(self.trace.steps) == 1:
            elements.used = gradient
        before = 0.0 if elements.largest is None else elements.largest
        elements.largest = np.maximum(before, np.abs(gradient))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        self.trace.optimizer_steps += self._depth == 0  # nested steps count once

    def _gradients(self) -> list[Tensor | None]:
        return [
            None if p.grad is None else p.grad.to_dense() if p.grad.is_sparse else p.grad
            for p in self._loop.model.parameters()
        ]

    def _norm(self, tensors: Sequence[Tensor | None]) -> float:
        """Return the norm of all tensors together, in float64."""
        device = self._loop.backend.device
        buffer = torch.empty(PIECE, dtype=torch.float64, device=device)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for t in tensors:
            for piece in () if t is None else pieces(t.detach()):
                total += buffer[: piece.numel()].view(piece.shape).copy_(piece).square_().sum()
        return float(total.sqrt())

    def _sample_gradient(self) -> Array:
        """Return the sampled gradient. A missing gradient counts as zeros."""
        pairs = zip(self._gradients(), self._loop.model.parameters(), strict=True)
        zero = torch.zeros(())
        return self._sample([zero.expand(p.shape) if g is None else g for g, p in pairs])

    def _sample(self, tensors: list[Tensor]) -> Array:
        return _sample(tensors, self._stride)


def pieces(t: Tensor) -> Iterator[Tensor]:
    """Yield views of at most PIECE elements that cover `t`, in any memory format."""
    if t.numel() <= PIECE:
        yield t
        return
    longest = max(range(t.dim()), key=t.size)
    for part in t.chunk(-(-t.numel() // PIECE), longest):
        yield from pieces(part)


def _stride(tensors: list[Tensor]) -> int:
    """Return the sampling stride. It restarts in each tensor, so that each has a sample."""
    room = max(1, work_trace.MAX_SAMPLED - len(tensors))
    return max(1, -(-sum(t.numel() for t in tensors) // room))


def _sample(tensors: list[Tensor], stride: int) -> Array:
    def sampled(t: Tensor) -> Array:
        # Not `reshape(-1)[::stride]`, which copies the whole tensor if it is not contiguous.
        chosen = t.detach().take(torch.arange(0, t.numel(), stride, device=t.device))
        return chosen.double().cpu().numpy()

    return np.concatenate([sampled(t) for t in tensors]) if tensors else np.empty(0)


def hash_samples(batch: Any) -> list[str]:
    """Return one hash per sample of a batch: of its row in every tensor that has rows.

    The first tensor defines the number of samples. A tensor with fewer dimensions or another length
    counts as part of every sample. Empty for a batch without tensors.
    """
    tensors: list[Tensor] = []

    map_tree(lambda t: tensors.append(t.detach().cpu().contiguous()), Tensor, batch)
    count = (tensors[0].shape[0] if tensors[0].dim() else 1) if tensors else 0
    if not count:
        return []
    # The hash of the shared tensors is computed once, and copied for each sample.
    shared, rows = hashlib.blake2b(digest_size=8), []
    for t in tensors:
        data = t.reshape(-1).view(torch.uint8).numpy()
        if t.dim() and t.shape[0] == count:
            rows.append(data.reshape(count, -1))
        else:
            shared.update(data.data)
    hashes = []
    for i in range(count):
        digest = shared.copy()
        for row in rows:
            digest.update(row[i].data)
        hashes.append(digest.hexdigest())
    return hashes


def _dtype(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _dtypes(model: nn.Module) -> dict[str, int]:
    counts: dict[str, int] = {}
    for p in model.parameters():
        counts[_dtype(p)] = counts.get(_dtype(p), 0) + p.numel()
    return counts


def _settings(group: dict[str, Any]) -> dict[str, str]:
    return {
        k: str(group[k]) for k in sorted(group) if k not in _HOW_OPTIONS and not k.endswith("lr")
    }
