"""Two marks on optimizers that torch reads. Used by `training.precision`, `hvd` and
`sharded_optimizer`.

Relies on `Optimizer._opt_called`, which torch.optim.lr_scheduler reads. Without it torch warns of a
scheduler before its optimizer if an fp16 run skips its first step.

Relies on the attribute `hooked` of a `step` method: torch does not wrap such a method. Without it
the step hooks of an optimizer that wraps another one run twice. A method that torch has wrapped
has the mark, and the plain one as `__wrapped__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.optim import Optimizer

StepT = TypeVar("StepT", bound=Callable[..., Any])


def mark_as_stepped(optimizer: Optimizer) -> None:
    """Let a scheduler advance without a warning, although the step may be skipped."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def without_step_hooks(step: StepT) -> StepT:
    """Mark `step` so that torch runs no step hooks for it: the inner `step` runs them."""
    step.hooked = True  # type: ignore[attr-defined]
    return step


def with_step_hooks(step: StepT) -> StepT:
    """Return `step` as torch wraps it: the optimizer's step hooks run before and after it."""
    wrapped = cast("StepT", Optimizer.profile_hook_step(step))
    wrapped.hooked = True  # type: ignore[attr-defined]
    return wrapped


def inner_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return the `step` of a class without the step hooks."""
    step: Any = kind.step
    is_wrapped = getattr(step, "hooked", False)
    return cast("Callable[[Optimizer], Any]", step.__wrapped__ if is_wrapped else step)
