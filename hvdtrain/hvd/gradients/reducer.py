"""Reducer: gradients in agreed buckets, the hot path of training.

Used by `DistributedOptimizer`. All ranks send the same buckets in the same order, so nothing needs
to be matched by name:

    step 1    hooks note the order in which gradients become ready; in `synchronize` the ranks
              exchange it, merge the same plan (`plan`), and send the buckets
    step 2+   hooks copy gradients in; a complete bucket is sent once those before it are sent
              synchronize: send the rest, wait, make the results the gradients (see `bucket`)

A gradient that is sparse, or that the user's own compressor turns into any tensor, is in no bucket:
it is sent by name.

A rank whose parameters have changed (frozen, unfrozen, added) says so in an element of a bucket:
all ranks then agree on a new plan at the end of that step, and average by name what the old plan
did not contain.

Based on DDP's reducer (Li et al., VLDB 2020) and Horovod's semantics: a parameter without a
gradient is averaged as zeros, and nothing is complete before `synchronize`.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.compression import wire_dtype
from hvdtrain.hvd.engine.engine import Engine
from hvdtrain.hvd.engine.operation import AVERAGE, dtype_name, dtype_of
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.hvd.gradients.bucket import Bucket
from hvdtrain.hvd.gradients.channel import BUILT
from hvdtrain.hvd.gradients.gradient import (
    Gradient,
    dense,
    overlaps_itself,
    write_gradients,
)
from hvdtrain.hvd.gradients.pass_counter import AveragingSpec, PassCounter
from hvdtrain.hvd.gradients.plan import (
    BUCKET_BYTES,
    DENSE,
    FROZEN,
    NAMED,
    SPARSE,
    BucketPlan,
    PlannedGradient,
)
from hvdtrain.hvd.ops import handles
from hvdtrain.hvd.ops.allreduce import allreduce_async_, sparse_allreduce_async
from hvdtrain.transports.malloc import keep_freed_memory

_CHANGED = (
    "the gradient of {names} was changed after it was sent to the other ranks, so the "
    "ranks' models would diverge: change it in a hook on its own parameter, or after "
    "optimizer.synchronize(), and step inside `with optimizer.skip_synchronize():`"
)


class Reducer(PassCounter):
    """Averages gradients in buckets: see the module."""

    def __init__(self, spec: AveragingSpec) -> None:
        super().__init__(spec)
        self._buckets: list[Bucket] = []
        self._plan: BucketPlan | None = None  # of these buckets; the channel may hold a newer one
        self._ready_order: list[Gradient] = []  # those in no bucket, as they became ready
        # The step begins with the first gradient, or in `synchronize`.
        self._has_begun = False
        self._next_bucket = 0  # to send
        self._engine: Engine | None = None
        self._built = next(BUILT)
        # What was sent by name, and what waits for the average.
        self._sent: dict[Gradient, Callable[[], Tensor]] = {}
        keep_freed_memory()

    def reset(self) -> None:
        """Discard the backward passes since the last step.

        Buckets of a step that has begun are completed first, since peers send them too; not after
        the job has failed, as when elastic training restores a commit.
        """
        engine = self._engine
        if engine is not None and engine.shutdown_reason is None and self._is_under_way:
            try:
                self.synchronize()
            except HorovodInternalError:
                if engine.shutdown_reason is None:
                    raise
        self._end_step()

    # During backward

    def _handle_ready(self, g: Gradient) -> None:
        if g.bucket is None:
            self._ready_order.append(g)
        else:
            g.bucket.pending -= 1
            if g.bucket.pending and not g.is_large:
                return
        if not self._begin_step():
            return  # a hook must not block on other ranks: `synchronize` agrees on a plan
        if g.bucket is None:
            # The other ranks send it by name, too, or do in `_send_rest`.
            self._send(g)
        elif g.is_large:
            # While it is in the CPU cache; and its memory is free for the next gradient: the first
            # use of fresh memory costs as much as the copy.
            with torch.no_grad():
                g.bucket.copy(g)
        self._advance()

    @property
    def _is_under_way(self) -> bool:
        """Whether rank 0 knows of this step, so that all ranks send its buckets."""
        return self._has_begun and self._plan is not None

    def _begin_step(self) -> bool:
        """Begin the step, unless it has begun. Return whether there is a plan for it."""
        if not self._has_begun:
            self._bind()
            self._has_begun = True
            if self._channel.plan is not self._plan:
                self._channel.await_connection()
                self._build()  # the peers agreed while this rank was in `join`
            if any(g.memory != (g.param.dtype, g.param.device) for g in self.gradients):
                self._forget_plan()
            if self._plan is not None:
                self._channel.begin_step()
        return self._is_under_way

    def _advance(self, everything: bool = False) -> None:
        """Send the complete buckets, in order; with `everything` all of them, complete or not."""
        with torch.no_grad():
            for bucket in self._buckets[self._next_bucket :]:
                if bucket.pending > 0 and not everything:
                    return
                self._next_bucket += 1
                # The flag: this rank's parameters are not those of the plan any more.
                changed = bucket.layout.flag and any(
                    g.is_wanted != g.was_wanted for g in self.gradients
                )
                flat = bucket.fill(changed)
                bucket.sent = self._channel.send(bucket.layout, flat)
        self._channel.last_sent_step = self._channel.step

    # At the end of a step

    def synchronize(self) -> None:
        """Average all gradients, zeros where there are none. Collective.

        Raises RuntimeError if gradients were changed after they were sent.
        """
        self.register_hooks()
        self.flush()
        self._send_rest()
        changed = [g.name for g in self.gradients if g.has_changed]
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
        if not self._begin_step():
            self._agree()
            self._channel.begin_step()
        self._advance(everything=True)
        self._send_wanted(self._left())

    def _install(self) -> None:
        """Wait for the averages, and write them into the gradients."""
        new_plans = 0.0
        for bucket in self._buckets:
            self._channel.wait(bucket.sent)
            with torch.no_grad():
                if bucket.layout.flag:  # the last element counts the ranks that need a new plan
                    new_plans += float(bucket.flat[-1])
                bucket.install()
            bucket.sent = None
        if new_plans:
            # Some rank has frozen, unfrozen or added parameters: all ranks agree on a new plan, and
            # average by name what the old plan did not contain.
            left = self._left()
            self._agree()
            self._send_wanted(left)
        averages = [wait() for wait in self._sent.values()]
        with torch.no_grad():
            write_gradients([g.param for g in self._sent], averages)

    def _left(self) -> list[Gradient]:
        """Return the gradients that are in no bucket, and were not sent by name."""
        return [g for g in self.gradients if g.bucket is None and g not in self._sent]

    def _send_wanted(self, gradients: list[Gradient]) -> None:
        """Send by name those of some gradients that a rank has."""
        for g in gradients:
            if g.kind != FROZEN:
                self._send(g)

    def _end_step(self) -> None:
        self.restart_passes()
        for g in self.gradients:
            g.taken = None
        self._sent = {}
        self._has_begun = False
        self._next_bucket = 0
        self._ready_order.clear()
        for bucket in self._buckets:
            bucket.pending = len(bucket.gradients)

    # Single gradients

    def _send(self, g: Gradient) -> None:
        """Start to average a gradient by name, or zeros if there is none."""
        spec, p, name = self.spec, g.param, f"{g.name}@{self._channel.name}"
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        # Where another rank's gradient is sparse, this rank must send rows too.
        if g.kind == SPARSE or (grad.is_sparse and not spec.sparse_as_dense):
            rows = grad if grad.is_sparse else grad.to_sparse(1)
            self._sent[g] = sparse_allreduce_async(rows, name, spec.op, spec.process_set)
            g.take()
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
            result: Tensor = spec.compression.decompress(handles.synchronize(handle), ctx)
            return result

        self._sent[g] = average
        g.take()

    # Agreement on a plan

    def _bind(self) -> None:
        """Get a channel of the current engine, named by a hash of the parameters' names and shapes,
        equal on all ranks, and a number that distinguishes optimizers with equal parameters.

        They are numbered as they are first used, not as they are built: a copy that one rank
        alone has takes no number.
        """
        engine = basics.engine
        if engine is self._engine:
            return
        set_id = handles.set_id("allreduce", self.spec.process_set)
        about = "\n".join(sorted(f"{g.name}:{list(g.param.shape)}" for g in self.gradients))
        digest = hashlib.sha256(about.encode()).hexdigest()[:8]
        kind = f"{self.spec.label}.{digest}.{set_id}"
        self._channel = engine.channels.claim(kind, set_id, self._built)
        self._forget_plan()
        name, self._engine = self._channel.name, engine
        weakref.finalize(self, _drop_channel, weakref.ref(engine), name, set_id).atexit = False

    def _agree(self) -> None:
        """Agree on a plan, and build its buckets. Collective. Raises HorovodInternalError if the
        ranks' proposals mismatch.
        """
        self._channel.agree(self._proposal())
        self._build()

    def _proposal(self) -> BucketPlan:
        """Return the plan that this rank proposes."""
        spec, fusion_bytes = self.spec, basics.engine.settings.fusion_threshold
        wire = wire_dtype(spec.compression)
        on_gpu = dict.fromkeys(g.param.device.index for g in self.gradients if g.param.is_cuda)
        self._channel.gpus = gpus = list(on_gpu)
        gradients = {}
        # Backward reaches the last parameters first, so the unknown rest follows in reverse.
        for g in dict.fromkeys([*self._ready_order, *reversed(self.gradients)]):
            p, grad = g.param, g.param.grad
            kind = FROZEN if not g.is_wanted else NAMED if wire is None else DENSE
            if grad is not None and grad.is_sparse and not spec.sparse_as_dense:
                kind = SPARSE
            gradients[g.name] = PlannedGradient(
                list(p.shape),
                dtype_name(p.dtype),
                gpus.index(p.device.index) if p.is_cuda else None,
                kind,
                list(torch.empty_like(p, device="meta").stride()),  # without gaps
            )
        options = [
            spec.op,
            wire or None,
            BUCKET_BYTES if fusion_bytes is None else fusion_bytes,
            spec.groups,
            # Whether large gradients are reduced in place on the CPU. On shm, a copy pays.
            basics.engine.process_groups.transport != "shm",
        ]
        return BucketPlan(gradients, options, self._channel.follows)

    def _build(self) -> None:
        """Build the buckets of the channel's plan, and index them by parameter."""
        self._forget_plan()
        plan = self._plan = self._channel.plan
        by_name = {g.name: g for g in self.gradients}
        for layout in self._channel.layouts:
            found = [by_name[name] for name in layout.names]
            bucket = Bucket(layout, found, plan, self._channel, self.spec.factors(layout.dtype))
            self._buckets.append(bucket)
            for g in found:  # less those that were ready before the bucket existed
                bucket.pending -= g.passes_left <= 0 and g not in self._latest.values()
        for g in self.gradients:
            planned = plan.gradients[g.name]
            g.kind, g.memory = planned.kind, (dtype_of(planned.dtype), g.param.device)
            g.was_wanted = g.is_wanted and g.kind != FROZEN

    def _forget_plan(self) -> None:
        """Make hooks treat every gradient as in no bucket."""
        self._plan, self._buckets = None, []
        for g in self.gradients:
            g.bucket = g.view = None


def _drop_channel(engine_ref: weakref.ref[Engine], name: str, set_id: int) -> None:
    # The optimizer outlives its engine in elastic training, and must not keep it alive.
    if (engine := engine_ref()) is not None:
        engine.drop_channel(name, set_id)
