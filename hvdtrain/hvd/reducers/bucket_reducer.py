"""BucketReducer: gradients in agreed buckets, the hot path of training.

Used by `DistributedOptimizer`. After the first step all ranks send the same buckets in the same
order, so nothing needs to be matched by name:

    step 1    hooks send every gradient by name, as Horovod does; each rank proposes a plan,
              and rank 0 merges them: buckets in the order of its own ready gradients
    step 2    every rank receives the plan and builds the buckets
    step 2+   hooks copy gradients in; a complete bucket is sent once those before it are sent
              synchronize: send the rest, wait, make the results the gradients (see `bucket`)

In a ring all-reduce, such as Gloo's, the order of additions depends on an element's place in the
buffer: with three ranks or more the first step of a resumed run, by name, would differ from the
same step of an uninterrupted run. With `buckets_from_first_step` the first step waits for the plan
in `synchronize`, and uses the buckets. Not every script can wait there: one rank may step two
optimizers in another order than its peers, or call another collective before.

Based on DDP's reducer (Li et al., VLDB 2020) and Horovod's semantics: a parameter without a
gradient is averaged as zeros, and nothing is complete before `synchronize`.
"""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.compression import wire_dtype
from hvdtrain.hvd.engine.bucket_channel import BUILT
from hvdtrain.hvd.engine.bucket_plan import BUCKET_BYTES, DENSE, FROZEN, SPARSE, BucketPlan
from hvdtrain.hvd.engine.engine import Engine
from hvdtrain.hvd.engine.operation import Operation
from hvdtrain.hvd.engine.request import dtype_name, dtype_of
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.hvd.reducers.bucket import Bucket
from hvdtrain.hvd.reducers.named import NamedAllreduces
from hvdtrain.hvd.reducers.reducer import AveragingSpec, Reducer
from hvdtrain.transports.malloc import keep_freed_memory


@dataclass
class _Step:
    """The state of one step, which begins with the first gradient, or at `synchronize`."""

    by_name: bool = False  # gradients are sent by name
    plan_missing: bool = False  # buckets will be used, but there is no plan yet
    announced: bool = False  # the step has been reported to rank 0
    changed: bool = False  # this rank's parameters changed: it needs a new plan
    next_bucket: int = 0  # the next one to send


class BucketReducer(Reducer):
    """Averages gradients in buckets: see the module."""

    def __init__(self, spec: AveragingSpec) -> None:
        super().__init__(spec)
        self.buckets_from_first_step = False  # must be the same on all ranks
        self.buckets: list[Bucket] = []
        # The bucket of each parameter, if it is in one.
        self._bucket_of: list[Bucket | None] = [None] * len(spec.params)
        # Its index in the bucket, if its hook copies the gradient.
        self._early_copy_index: list[int | None] = [None] * len(spec.params)
        self._ready_order: list[
            int
        ] = []  # parameters in no bucket, as their gradients became ready
        self._step: _Step | None = None
        # Which parameters had gradients when the plan was received, and have them in this step.
        self._wanted: list[bool] = []
        self._wanted_now: list[bool] = []
        self._memory: list[tuple[torch.dtype, torch.device]] = []  # of each parameter
        self._kinds: dict[str, str] = {}  # of the plan in use; the channel may hold a newer one
        self._plan_lacks_gradient = False  # whether the plan omits a gradient of this rank
        self._any_frozen = False
        self._version = 0
        self._plan_request: Operation | None = None  # the pending request for a plan
        self._next_plan_request: Operation | None = None  # see `_request_next_plan`
        self._requested_early = False  # whether `_plan_request` was sent during backward
        self._engine: Engine | None = None
        self._built = next(BUILT)
        self._named = NamedAllreduces(spec)
        keep_freed_memory()

    def add(self, name: str, param: Tensor) -> None:
        """Add a parameter that the optimizer received later; the next step requests a new plan."""
        super().add(name, param)
        self._bucket_of.append(None)
        self._early_copy_index.append(None)

    def reset(self) -> None:
        """Discard the backward passes since the last step.

        Buckets of a step that has begun are completed first, since peers send them too; not after
        the job has failed, as when elastic training restores a commit.
        """
        announced = self._step is not None and self._step.announced
        if announced and self._engine is not None and self._engine.shutdown_reason is None:
            try:
                self.synchronize()
            except HorovodInternalError:
                if self._engine.shutdown_reason is None:
                    raise
        self._named.clear()
        self._end_step()

    # During backward

    def _handle_ready(self, i: int) -> None:
        bucket = self._bucket_of[i]
        if bucket is None:
            self._handle_unbucketed(i)
            return
        if self._early_copy_index[i] is not None:
            self._copy_large(i)
        left = bucket.pending = bucket.pending - 1
        if not left:
            self._advance()

    def _copy_large(self, i: int) -> None:
        """Copy a large gradient in while it is in the CPU cache, and free its memory for the next
        gradient: the first use of fresh memory costs as much as the copy.
        """
        step = self._step or self._begin_step()
        if step.by_name or step.plan_missing or self._plan_request is not None:
            return
        bucket, index = self._bucket_of[i], self._early_copy_index[i]
        if bucket is not None and index is not None:
            self._announce(step)
            with torch.no_grad():
                bucket.copy_early(index, self.spec.factors(bucket.layout.dtype).prescale)

    def _handle_unbucketed(self, i: int) -> None:
        """Handle a gradient that is in no bucket: send it by name, or request a plan."""
        self._ready_order.append(i)
        step = self._step or self._begin_step()
        if step.by_name:
            if i not in self._named.sent:
                self._named.send(i)
            if len(self._named.sent) == len(self.spec.params):
                self._plan_request, self._requested_early = self._request_plan(), True
        elif step.plan_missing:
            if self._plan_request is None and len(self._ready_order) == len(self.spec.params):
                self._plan_request, self._requested_early = self._request_plan(), True
        elif self._plan_request is None and self._bucket_of[i] is None:
            # Sparse, or not in the plan: `_finish_buckets` sends it by name on the other ranks too.
            kind = self._kinds.get(self.spec.names[i])
            self._named.send(i, sparse=kind == SPARSE)
            self._advance()

    def _begin_step(self) -> _Step:
        """Choose how gradients are sent in this step."""
        self._bind()
        step = self._step = _Step()
        if self._plan_request is not None:
            # Waiting cannot deadlock after an early request: all gradients of that step were sent,
            # so the peers' requests do not depend on this rank. Buckets then overlap with backward.
            if self._requested_early or self._channel.is_ready(self._plan_request):
                self._await_plan()
            return step
        if self._channel.plan is not None and self._channel.version != self._version:
            self._channel.await_connection()
            self._build()  # the peers agreed while this rank was in `join`
        memory = [(p.dtype, p.device) for p in self.spec.params]
        if self._channel.plan is None or memory != self._memory:
            step.plan_missing = self.buckets_from_first_step
            step.by_name = not step.plan_missing
            self._forget_buckets()
            ready = [i for i in range(len(self._delays)) if self._is_ready(i)]
            self._ready_order.extend(i for i in ready if i not in self._ready_order)
            for i in ready if step.by_name else ():
                self._named.send(i)
        return step

    def _advance(self, everything: bool = False) -> _Step:
        """Send the complete buckets, in order; with `everything` all of them, complete or not."""
        step = self._step or self._begin_step()
        if step.by_name:
            return step
        if step.plan_missing or self._plan_request is not None:
            if not everything:
                return step  # a hook must not block on other ranks
            self._plan_request = self._plan_request or self._request_plan()
            self._await_plan()
            step.plan_missing = False
        self._announce(step)
        if step.changed:
            self._request_next_plan()
        with torch.no_grad():
            for bucket in self.buckets[step.next_bucket :]:
                if bucket.pending > 0 and not everything:
                    return step
                step.next_bucket += 1
                flat = bucket.fill(self.spec.factors(bucket.layout.dtype).prescale, step.changed)
                bucket.work = self._channel.send(bucket.layout, flat)
        self._channel.last_sent_step = self._channel.step
        return step

    def _announce(self, step: _Step) -> None:
        """Report this step to rank 0, and check whether the plan still fits. Twice is safe."""
        if not step.announced:
            step.announced = True
            self._wanted_now = self._find_wanted()
            step.changed = self._wanted_now != self._wanted or self._plan_lacks_gradient
            self._channel.begin_step()

    # At the end of a step

    def synchronize(self) -> None:
        """Average all gradients. Collective."""
        self.register_hooks()
        self.flush()
        step = self._advance(everything=True)
        changed = self._finish_by_name() if step.by_name else self._finish_buckets()
        if self._any_frozen:
            self.fill_frozen()
        self._end_step()
        self._check_unchanged(changed)

    def _finish_by_name(self) -> list[str]:
        if self._plan_request is None:
            self._plan_request = self._request_plan()
        if len(self._named.sent) < len(self.spec.params) or self._channel.follows:
            # Another rank may have gradients, or sparse ones, where this rank has none, or may
            # have taken another optimizer with equal parameters.
            self._await_plan()
            self._send_by_name(set(self._kinds))
        return self._named.finish()

    def _finish_buckets(self) -> list[str]:
        sparse = {name for name, kind in self._kinds.items() if kind == SPARSE}
        if sparse:
            self._send_by_name(sparse)
        new_plans = 0.0
        changed = []
        for bucket in self.buckets:
            self._channel.wait(bucket.layout, bucket.work, bucket.flat)
            with torch.no_grad():
                if bucket.layout.flag:  # the last element counts the ranks that need a new plan
                    new_plans += float(bucket.flat[-1])
                changed += bucket.find_changed()
                factor = self.spec.factors(bucket.layout.dtype).postscale
                bucket.install(factor, self.spec.sparse_as_dense)
            bucket.work = None
        if new_plans:
            # Some rank has frozen, unfrozen or added parameters: all ranks agree on a new plan, and
            # average by name what the old plan did not contain.
            before = {n for n, kind in self._kinds.items() if kind != FROZEN}
            self._plan_request = self._next_plan_request or self._request_plan()
            self._next_plan_request = None
            self._await_plan()
            self._send_by_name(set(self._kinds) - before)
        return changed + self._named.finish()

    def _send_by_name(self, names: set[str]) -> None:
        """Send the named gradients that some rank has and that this rank has not sent yet."""
        kinds = self._kinds
        for i, name in enumerate(self.spec.names):
            if name in names and kinds[name] != FROZEN and i not in self._named.sent:
                self._named.send(i, sparse=kinds[name] == SPARSE)

    def _end_step(self) -> None:
        super().reset()
        self._step = None
        self._ready_order.clear()
        for bucket in self.buckets:
            bucket.reset()

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
        set_id = self.spec.set_id
        named = zip(self.spec.names, self.spec.params, strict=True)
        about = "\n".join(sorted(f"{name}:{list(p.shape)}" for name, p in named))
        digest = hashlib.sha256(about.encode()).hexdigest()[:8]
        kind = f"{self.spec.label}.{digest}.{set_id}"
        self._channel = engine.claim_channel(kind, set_id, self._built)
        name, self._engine, self._version = self._channel.name, engine, 0
        self._plan_request = self._next_plan_request = None
        self._named = NamedAllreduces(self.spec, f"@{name}", divides_first=True)
        weakref.finalize(self, _drop_channel, weakref.ref(engine), name, set_id).atexit = False

    def _request_plan(self) -> Operation:
        """Propose a plan to the other ranks. Does not block."""
        return self._channel.request_plan(self._proposal(basics.engine))

    def _proposal(self, engine: Engine) -> BucketPlan:
        """Return the plan that this rank proposes; rank 0 merges the proposals."""
        spec = self.spec
        fusion_bytes = engine.settings.fusion_threshold
        # Backward reaches the last parameters first, so the unknown rest follows in reverse.
        order = dict.fromkeys([*self._ready_order, *reversed(range(len(spec.params)))])
        kinds, strides = {}, {}
        for name, p, wanted in zip(spec.names, spec.params, self._find_wanted(), strict=True):
            sparse = p.grad is not None and p.grad.is_sparse and not spec.sparse_as_dense
            kinds[name] = SPARSE if sparse else DENSE if wanted else FROZEN
            if not p.is_contiguous() and _is_channels_last(p):
                strides[name] = list(p.stride())
        named = list(zip(spec.names, spec.params, strict=True))
        on_gpu = {name: p.device.index for name, p in named if p.is_cuda}
        self._channel.gpus = gpus = list(dict.fromkeys(on_gpu.values()))
        options = [
            spec.op,
            wire_dtype(spec.compression) or None,
            BUCKET_BYTES if fusion_bytes is None else fusion_bytes,
            spec.groups,
            # Whether large gradients are reduced in place on the CPU. On shm, a copy pays.
            engine.process_groups.transport != "shm",
        ]
        shapes = {name: list(p.shape) for name, p in named}
        dtypes = {name: dtype_name(p.dtype) for name, p in named}
        names = [spec.names[i] for i in order]
        at = {name: gpus.index(gpu) for name, gpu in on_gpu.items()}
        follows = self._channel.follows
        return BucketPlan(names, shapes, dtypes, kinds, strides, at, options, follows)

    def _request_next_plan(self) -> None:
        """Request the next plan once all gradients are ready, so that peers that wait for it do not
        also wait for this rank's `synchronize`.
        """
        pairs = zip(self._delays, self._wanted_now, strict=True)
        if self._next_plan_request is None and all(d <= 0 for d, wanted in pairs if wanted):
            self._next_plan_request = self._request_plan()

    def _await_plan(self) -> None:
        """Wait for the plan, and build the buckets. Raises HorovodInternalError if the ranks'
        proposals mismatch.
        """
        request, self._plan_request, self._requested_early = self._plan_request, None, False
        assert request is not None
        self._channel.await_plan(request)
        self._build()

    def _build(self) -> None:
        """Build the buckets of the channel's plan, and index them by parameter."""
        spec, plan = self.spec, self._channel.plan
        assert plan is not None
        index = {name: i for i, name in enumerate(spec.names)}
        self._forget_buckets()
        self.buckets = []
        for layout in self._channel.layouts:
            params = [spec.params[index[name]] for name in layout.names]
            strides = [plan.strides.get(name) for name in layout.names]
            bucket = Bucket(layout, params, strides, self._channel)
            self.buckets.append(bucket)
            for at, name in enumerate(layout.names):
                self._bucket_of[index[name]] = bucket
                is_early = bucket.copies_early(at)
                self._early_copy_index[index[name]] = at if is_early else None
                self._counted[index[name]] = None if is_early else bucket
                # Less the gradients that were ready before the bucket existed.
                bucket.pending -= self._is_ready(index[name])
        self._version = self._channel.version
        self._kinds = plan.kinds
        self._wanted = self._find_wanted()
        pairs = zip(spec.names, spec.params, strict=True)
        self._memory = [(dtype_of(plan.dtypes[name]), p.device) for name, p in pairs]
        named = zip(self._wanted, spec.names, strict=True)
        self._plan_lacks_gradient = any(w and plan.kinds[name] == FROZEN for w, name in named)

    def _forget_buckets(self) -> None:
        """Make hooks treat every parameter as in no bucket."""
        self._bucket_of[:] = [None] * len(self._bucket_of)
        self._early_copy_index[:] = [None] * len(self._early_copy_index)
        self._counted[:] = [None] * len(self._counted)

    def _find_wanted(self) -> list[bool]:
        """Return which parameters to average: those that require a gradient, or hold one."""
        wanted = [p.requires_grad for p in self.spec.params]
        self._any_frozen = not all(wanted)
        if self._any_frozen:
            pairs = zip(wanted, self.spec.params, strict=True)
            wanted = [want or p.grad is not None for want, p in pairs]
        return wanted


def _drop_channel(engine_ref: weakref.ref[Engine], name: str, set_id: int) -> None:
    # The optimizer outlives its engine in elastic training, and must not keep it alive.
    if (engine := engine_ref()) is not None:
        engine.drop_channel(name, set_id)


def _is_channels_last(p: Tensor) -> bool:
    if p.dim() == 4:
        return p.is_contiguous(memory_format=torch.channels_last)
    return p.dim() == 5 and p.is_contiguous(memory_format=torch.channels_last_3d)
