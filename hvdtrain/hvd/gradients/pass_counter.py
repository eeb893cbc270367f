"""PassCounter: the parameters of an optimizer, their hooks, and the count of backward passes.

`DistributedOptimizer` uses it alone for Adasum, which leaves gradients alone, and on a rank that
averages with nobody; `Reducer` derives from it.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdtrain._torch.backward import call_after_backward
from hvdtrain._torch.dynamo import untraced
from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.engine.operation import AVERAGE
from hvdtrain.hvd.gradients.gradient import Gradient
from hvdtrain.hvd.ops.handles import set_id
from hvdtrain.hvd.process_sets import ProcessSet

TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). "
    "Increase backward_passes_per_step to accumulate gradients locally. If they come from another "
    "model's loss, such as a GAN's generator step for the discriminator, call "
    "discriminator.requires_grad_(False) before that backward, and (True) after it."
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


class PassCounter:
    """Counts gradients in hooks as they are accumulated."""

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
            g.passes_left = self.spec.passes
        self._latest.clear()

    def reset(self) -> None:
        """Discard the backward passes since the last step."""
        self.restart_passes()

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
