"""Reducer: the parameters of an optimizer, their hooks, and the count of backward passes.

`DistributedOptimizer` uses one of three. `Reducer` itself sends each gradient by name as soon as it
is ready, for the user's own compressors: these may return any tensor, so the ranks cannot agree on
buckets in advance. `BucketReducer` derives from it, and sends by name what is in no bucket.
`PassCounter` averages nothing, for Adasum.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdtrain._torch.backward import call_after_backward
from hvdtrain._torch.dynamo import untraced
from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.engine.operation import AVERAGE
from hvdtrain.hvd.gradients.gradient import (
    Gradient,
    dense,
    has_changed,
    overlaps_itself,
    taken,
    write_gradients,
)
from hvdtrain.hvd.ops.allreduce import allreduce_async_, sparse_allreduce_async
from hvdtrain.hvd.ops.handles import set_id, synchronize
from hvdtrain.hvd.process_sets import ProcessSet

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally. If they are those of "
    "another model's loss, as of a GAN's discriminator in the generator's step, call "
    "discriminator.requires_grad_(False) before that backward, and (True) after it."
)
_CHANGED = (
    "the gradient of {names} was changed after it was sent to the other ranks, so the "
    "ranks' models would diverge: change it in a hook on its own parameter, or after "
    "optimizer.synchronize(), and step inside `with optimizer.skip_synchronize():`"
)


@dataclass
class AveragingSpec:
    """How an optimizer's gradients are averaged. `names`: of the parameters."""

    names: dict[Tensor, str]
    label: str
    compression: Any
    passes: int
    op: int
    predivide: float
    groups: int | list[list[str]]
    sparse_as_dense: bool
    process_set: ProcessSet

    def factors(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the factors that multiply gradients before and after the sum."""
        if self.op != AVERAGE:
            return 1.0, 1.0
        size = len(basics.engine.sets[set_id("allreduce", self.process_set)])
        # Dividing before the sum is free, as part of the copy into the bucket. In half precision
        # that would lose bits of small values, so it divides after the sum.
        if self.predivide == 1.0 and dtype.itemsize >= 4:
            return 1.0 / size, 1.0
        return 1.0 / self.predivide, self.predivide / size


class Reducer:
    """Counts gradients in hooks as they are accumulated, and averages them in `synchronize`."""

    suffix = ""
    """A part of every name."""

    def __init__(self, spec: AveragingSpec) -> None:
        self.spec = spec
        self.gradients: list[Gradient] = []
        for p, name in spec.names.items():
            self.add(name, p)
        # By thread of autograd, which has one for each device: the gradient that is ready, but that
        # hooks may still change.
        self._latest: dict[int, Gradient] = {}
        # Of the counts, and of the order in which buckets are sent. Reentrant: the garbage
        # collector may run hooks' code anywhere.
        self._lock = threading.RLock()
        self._had_too_many = False  # passes: the script knows that they have changed gradients
        # What was sent by name, and what waits for the average.
        self._sent: dict[Gradient, Callable[[], Tensor]] = {}
        # The parameters may outlive the optimizer, and would keep its hooks.
        weakref.finalize(self, _release, self.gradients).atexit = False

    @property
    def active(self) -> bool:
        """Whether backward has computed gradients since the last `synchronize`."""
        return any(g.passes_left != self.spec.passes for g in self.gradients)

    def add(self, name: str, param: Tensor) -> None:
        """Add a parameter; the next step averages it too."""
        self.gradients.append(Gradient(name, param, self.spec.passes))

    def restart_passes(self) -> None:
        """Begin to count the backward passes of a step."""
        for g in self.gradients:
            g.passes_left, g.taken = self.spec.passes, None
        self._latest.clear()

    def reset(self) -> None:
        """Discard the backward passes since the last step, and what they have sent."""
        self._end_step()

    def register_hooks(self) -> None:
        """Hook every parameter that requires a gradient and has no hook yet."""
        for g in self.gradients:
            if g.hook is None and g.param.requires_grad:
                hook = untraced(self._hook(g))
                g.hook = g.param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _hook(self, g: Gradient) -> Any:
        """Return the hook to run after each accumulation of a gradient.

        Torch runs the user's own hooks on this gradient partly after it. So a gradient counts as
        ready when the next one is, or when backward ends.
        """
        latest, lock = self._latest, self._lock
        own = weakref.ref(self)  # the parameter owns the hook, which must not own the optimizer

        # Runs for every parameter in every backward pass, so it mostly only counts.
        def hook(p: Tensor) -> None:
            with lock:
                g.passes_left -= 1
                if g.passes_left > 0 or (self := own()) is None:
                    return
                if g.passes_left < 0:
                    g.passes_left = 0
                    self._had_too_many = True
                    raise AssertionError(TOO_MANY)
                thread = threading.get_ident()
                previous = latest.get(thread)
                latest[thread] = g
                if previous is None:
                    call_after_backward(self.flush)
                else:
                    self._handle_ready(previous)

        return hook

    @untraced
    def flush(self) -> None:
        """Handle the latest gradients: all hooks on them have run."""
        with self._lock:
            ready = list(self._latest.values())
            self._latest.clear()
            for g in ready:
                self._handle_ready(g)

    def _handle_ready(self, g: Gradient) -> None:
        """Handle a gradient that nothing changes any more."""
        self._send(g)

    def synchronize(self) -> None:
        """Average all gradients, zeros where there are none. Collective.

        Raises RuntimeError if gradients were changed after they were sent.
        """
        self.register_hooks()
        self.flush()
        self._send_rest()
        changed = [g.name for g in self.gradients if g.taken and has_changed(g.param.grad, g.taken)]
        self._install()
        for g in self.gradients:  # frozen later: zeros, as in Horovod
            if g.param.grad is None and g.hook is not None and not g.param.requires_grad:
                g.param.grad = torch.zeros_like(g.param)
        self._end_step()
        known, self._had_too_many = self._had_too_many, False
        if changed and not known:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise RuntimeError(_CHANGED.format(names=", ".join(changed[:3]) + more))

    def _send_rest(self) -> None:
        """Send what hooks have not sent."""
        for g in self.gradients:
            if g.hook is not None and g not in self._sent:
                self._send(g)

    def _install(self) -> None:
        """Wait for the averages, and write them into the gradients."""
        averages = [wait() for wait in self._sent.values()]
        with torch.no_grad():
            write_gradients([g.param for g in self._sent], averages)

    def _end_step(self) -> None:
        self.restart_passes()
        self._sent = {}

    # Single gradients

    def _send(self, g: Gradient, sparse: bool = False) -> None:
        """Start to average a gradient by name, or zeros if there is none.

        `sparse`: another rank's gradient is sparse, so this rank must send rows too.
        """
        spec, p, name = self.spec, g.param, g.name + self.suffix
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        if sparse or (grad.is_sparse and not spec.sparse_as_dense):
            rows = grad if grad.is_sparse else grad.to_sparse(1)
            self._sent[g] = sparse_allreduce_async(rows, name, spec.op, spec.process_set)
            g.taken = taken(p.grad)
            return
        if not grad.is_sparse and overlaps_itself(grad):
            grad = grad.contiguous()
        p.grad = grad
        compressed, ctx = spec.compression.compress(dense(grad))
        # The product of both is 1: an average is divided by the number of ranks in addition.
        before = 1.0 / spec.predivide if spec.op == AVERAGE else 1.0
        how = spec.op, before, 1.0 / before, spec.process_set
        # `data`: the reduction in place must not count as a change of the gradient.
        handle = allreduce_async_(compressed.data, None, name, *how)

        def average() -> Tensor:
            result: Tensor = spec.compression.decompress(synchronize(handle), ctx)
            return result

        self._sent[g], g.taken = average, taken(grad)


class PassCounter(Reducer):
    """Counts backward passes, and leaves the gradients alone: Adasum combines updates instead."""

    def __init__(self, spec: AveragingSpec) -> None:
        super().__init__(spec)
        for p in spec.names:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)  # as Horovod does

    def _handle_ready(self, g: Gradient) -> None:
        """Leave the gradient alone."""

    def synchronize(self) -> None:
        """Begin to count the passes of the next step. Not collective."""
        self.register_hooks()
        self.reset()


def _release(gradients: list[Gradient]) -> None:
    """Remove the hooks; and the references to buckets, which refer to the gradients."""
    for g in gradients:
        g.bucket = None
        if g.hook is not None:
            g.hook.remove()
