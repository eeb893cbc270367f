"""BucketReducer: gradients in agreed buckets, the hot path of training.

Used by `DistributedOptimizer`. All ranks send the same buckets in the same order, so nothing needs
to be matched by name:

    step 1    hooks note the order in which gradients become ready; in `synchronize` the ranks
              exchange it, merge the same plan (`plan`), and send the buckets
    step 2+   hooks copy gradients in; a complete bucket is sent once those before it are sent
              synchronize: send the rest, wait, make the results the gradients (see `bucket`)

A rank whose parameters have changed (frozen, unfrozen, added) says so in an element of a bucket:
all ranks then agree on a new plan at the end of that step, and average by name what the old plan
did not contain.

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
from hvdtrain.hvd.engine.engine import Engine
from hvdtrain.hvd.engine.operation import dtype_name, dtype_of
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.hvd.gradients.bucket import Bucket
from hvdtrain.hvd.gradients.channel import BUILT
from hvdtrain.hvd.gradients.named import NamedAllreduces
from hvdtrain.hvd.gradients.plan import BUCKET_BYTES, DENSE, FROZEN, SPARSE, BucketPlan
from hvdtrain.hvd.gradients.reducer import AveragingSpec, Reducer
from hvdtrain.transports.malloc import keep_freed_memory


@dataclass
class _Step:
    """The state of one step, which begins with the first gradient, or at `synchronize`."""

    lacks_plan: bool = False  # `synchronize` agrees on one
    announced: bool = False  # the step has been reported to rank 0
    changed: bool = False  # this rank's parameters changed: it needs a new plan
    next_bucket: int = 0  # the next one to send


class BucketReducer(Reducer):
    """Averages gradients in buckets: see the module."""

    def __init__(self, spec: AveragingSpec) -> None:
        super().__init__(spec)
        self.buckets: list[Bucket] = []
        # The bucket of each parameter, if it is in one.
        self._bucket_of: list[Bucket | None] = [None] * len(spec.params)
        # Its index in the bucket, if its hook copies the gradient.
        self._early_copy_index: list[int | None] = [None] * len(spec.params)
        self._ready_order: list[int] = []  # parameters in no bucket, as they became ready
        self._step: _Step | None = None
        self._wanted: list[bool] = []  # which parameters had gradients when the plan was received
        self._memory: list[tuple[torch.dtype, torch.device]] = []  # of each parameter
        self._kinds: dict[str, str] = {}  # of the plan in use; the channel may hold a newer one
        self._plan_lacks_gradient = False  # whether the plan omits a gradient of this rank
        self._any_frozen = False
        self._version = 0
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
        if step.lacks_plan:
            return
        bucket, index = self._bucket_of[i], self._early_copy_index[i]
        if bucket is not None and index is not None:
            self._announce(step)
            with torch.no_grad():
                bucket.copy_early(index, self.spec.factors(bucket.layout.dtype).prescale)

    def _handle_unbucketed(self, i: int) -> None:
        """Handle a gradient that is in no bucket: note it for the plan, or send it by name."""
        self._ready_order.append(i)
        step = self._step or self._begin_step()
        if not step.lacks_plan and self._bucket_of[i] is None:
            # Sparse, or not in the plan: `_finish` sends it by name on the other ranks too.
            self._named.send(i, sparse=self._kinds.get(self.spec.names[i]) == SPARSE)
            self._advance()

    def _begin_step(self) -> _Step:
        """Choose how gradients are sent in this step."""
        self._bind()
        step = self._step = _Step()
        if self._channel.plan is not None and self._channel.version != self._version:
            self._channel.await_connection()
            self._build()  # the peers agreed while this rank was in `join`
        memory = [(p.dtype, p.device) for p in self.spec.params]
        if self._channel.plan is None or memory != self._memory:
            step.lacks_plan = True
            self._forget_buckets()
            ready = [i for i in range(len(self._delays)) if self._is_ready(i)]
            noted = set(self._ready_order)
            self._ready_order.extend(i for i in ready if i not in noted)
        return step

    def _advance(self, everything: bool = False) -> None:
        """Send the complete buckets, in order; with `everything` all of them, complete or not."""
        step = self._step or self._begin_step()
        if step.lacks_plan:
            if not everything:
                return  # a hook must not block on other ranks
            self._agree()
            step.lacks_plan = False
        self._announce(step)
        with torch.no_grad():
            for bucket in self.buckets[step.next_bucket :]:
                if bucket.pending > 0 and not everything:
                    return
                step.next_bucket += 1
                flat = bucket.fill(self.spec.factors(bucket.layout.dtype).prescale, step.changed)
                bucket.work = self._channel.send(bucket.layout, flat)
        self._channel.last_sent_step = self._channel.step

    def _announce(self, step: _Step) -> None:
        """Report this step to rank 0, and check whether the plan still fits. Twice is safe."""
        if not step.announced:
            step.announced = True
            step.changed = self._find_wanted() != self._wanted or self._plan_lacks_gradient
            self._channel.begin_step()

    # At the end of a step

    def synchronize(self) -> None:
        """Average all gradients. Collective."""
        self.register_hooks()
        self.flush()
        self._advance(everything=True)
        changed = self._finish()
        if self._any_frozen:
            self.fill_frozen()
        self._end_step()
        self._check_unchanged(changed)

    def _finish(self) -> list[str]:
        """Wait for what was sent, and write the averages; return the parameters whose gradients
        were changed meanwhile.
        """
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
            self._agree()
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
        self._channel = engine.channels.claim(kind, set_id, self._built)
        name, self._engine, self._version = self._channel.name, engine, 0
        self._named = NamedAllreduces(self.spec, f"@{name}", divides_first=True)
        weakref.finalize(self, _drop_channel, weakref.ref(engine), name, set_id).atexit = False

    def _agree(self) -> None:
        """Agree on a plan, and build its buckets. Collective. Raises HorovodInternalError if the
        ranks' proposals mismatch.
        """
        self._channel.agree(self._proposal(basics.engine))
        self._build()

    def _proposal(self, engine: Engine) -> BucketPlan:
        """Return the plan that this rank proposes."""
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
