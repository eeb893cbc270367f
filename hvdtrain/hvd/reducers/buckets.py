"""BucketReducer: gradients in agreed buckets, the hot path of training.

Used by `DistributedOptimizer`. After the first step all ranks send the same buckets in the same
order, so nothing needs to be matched by name:

    step 1    hooks send every gradient by name, as Horovod does; each rank proposes a plan,
              and rank 0 merges them: buckets in the order of its own ready gradients
    step 2    every rank receives the plan and builds the buckets
    step 2+   hooks copy gradients in; a complete bucket is sent once those before it are sent
              synchronize: send the rest, wait, install views of the buckets as gradients

In a ring all-reduce, such as Gloo's, the order of additions depends on an element's place in the
buffer: with three ranks or more the first step of a resumed run, by name, would differ from the
same step of an uninterrupted run. With `agrees_first` the first step waits for the plan in
`synchronize`, and uses the buckets. Not every script can wait there: one rank may step two
optimizers in another order than its peers, or call another collective before.

Based on DDP's reducer (Li et al., VLDB 2020) and Horovod's semantics: a parameter without a
gradient is averaged as zeros, and nothing is complete before `synchronize`.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.engine.engine import Engine
from hvdtrain.hvd.engine.plan import FROZEN, SPARSE
from hvdtrain.hvd.engine.request import dtype_of
from hvdtrain.hvd.engine.work import Work
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.hvd.reducers.base import TOO_MANY, Recipe, Reducer
from hvdtrain.hvd.reducers.bucket import Bucket
from hvdtrain.hvd.reducers.byname import ByName
from hvdtrain.hvd.reducers.describe import describe, digest
from hvdtrain.transports.malloc import keep_freed_memory


class BucketReducer(Reducer):
    """Averages gradients in buckets: see the module.

    A step begins with the first gradient, or at `synchronize`.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.buckets: list[Bucket] = []
        # The bucket of each parameter, if it is in one.
        self._owner: list[Bucket | None] = [None] * len(recipe.params)
        # Its index in the bucket, if its hook copies the gradient.
        self._large: list[int | None] = [None] * len(recipe.params)
        self._order: list[int] = []  # parameters in no bucket, as their gradients became ready
        self.agrees_first = False  # buckets from the first step on; the same on all ranks
        self._in_step = False
        self._named = False  # whether this step sends gradients by name
        self._unagreed = False  # whether this step uses buckets but has no plan yet
        self._begun = False  # whether this step was announced to rank 0
        self._next = 0  # the next bucket to send
        self._changed = False  # whether this rank needs another plan
        self._wanted: list[bool] = []  # which parameters had gradients when the plan was received
        self._wanted_now: list[bool] = []  # and in this step
        self._dtypes: list[torch.dtype] = []
        self._kinds: dict[str, str] = {}  # of the plan in use; the lane may hold a newer one
        self._unknown = False  # whether the plan omits a gradient of this rank
        self._any_frozen = False
        self._version = 0
        self._asked: Work | None = None  # the pending request for a plan
        self._next_asked: Work | None = None  # the one after it: see `_ask_early`
        self._asked_early = False  # whether `_asked` was sent during backward
        self._engine: Engine | None = None
        keep_freed_memory()
        self._bind()

    def add(self, name: str, param: Tensor) -> None:
        """Add a parameter that the optimizer received later; the next step requests a new plan."""
        super().add(name, param)
        self._owner.append(None)
        self._large.append(None)

    def reset(self) -> None:
        """Discard the backward passes since the last step.

        Buckets of a step that has begun are completed first, since peers send them too; not after
        the job has failed, as when elastic training restores a commit.
        """
        if self._begun and self._engine is not None and self._engine.failure is None:
            try:
                self.synchronize()
            except HorovodInternalError:
                if self._engine.failure is None:
                    raise
        self._by_name.sent.clear()
        self._end_step()

    # During backward

    def _hook(self, i: int) -> Any:
        delays, owner, large = self._delays, self._owner, self._large
        own = weakref.ref(self)  # the parameter owns the hook, which must not own the optimizer

        # Runs for every parameter in every backward pass, so it mostly only counts.
        def hook(p: Tensor) -> None:
            left = delays[i] = delays[i] - 1
            if left:
                if left < 0:
                    delays[i] = 0
                    raise AssertionError(TOO_MANY)
                return
            bucket = owner[i]
            if bucket is None:
                if (self := own()) is not None:
                    self._take_loose(i)
                return
            if large[i] is not None and (self := own()) is not None:
                self._take(i)
            left = bucket.pending = bucket.pending - 1
            if not left and (self := own()) is not None:
                self._advance()

        return hook

    def _take(self, i: int) -> None:
        """Copy a large gradient in while it is in the CPU cache, and free its memory for the next
        gradient: the first use of fresh memory costs as much as the copy.
        """
        if not self._in_step:
            self._begin_step()
        if self._named or self._unagreed or self._asked is not None:
            return
        bucket, place = self._owner[i], self._large[i]
        if bucket is not None and place is not None:
            self._begin_buckets()
            with torch.no_grad():
                bucket.take(place, self.recipe.factors(bucket.layout.dtype)[0])

    def _take_loose(self, i: int) -> None:
        """Handle a gradient that is in no bucket: send it by name, or request a plan."""
        self._order.append(i)
        if not self._in_step:
            self._begin_step()
        if self._named:
            if i not in self._by_name.sent:
                self._by_name.send(i)
            if len(self._by_name.sent) == len(self.recipe.params):
                self._asked, self._asked_early = self._ask(), True
        elif self._unagreed:
            if self._asked is None and len(self._order) == len(self.recipe.params):
                self._asked, self._asked_early = self._ask(), True
        elif self._asked is None and self._owner[i] is None:
            # Sparse, or not in the plan: `_finish_buckets` sends it by name on the other ranks too.
            kind = self._kinds.get(self.recipe.names[i])
            self._by_name.send(i, sparse=kind == SPARSE)
            self._advance()

    def _begin_step(self) -> None:
        """Choose how gradients are sent in this step."""
        self._bind()
        self._in_step = True
        if self._asked is not None:
            # Waiting cannot deadlock after an early request: all gradients of that step were sent,
            # so the peers' requests do not depend on this rank. Buckets then overlap with backward.
            if self._asked_early or self._lane.has_settled(self._asked):
                self._settle()
        else:
            if self._lane.plan is not None and self._lane.version != self._version:
                self._lane.await_connection()
                self._build()  # the peers agreed while this rank was in `join`
            if self._lane.plan is None or [p.dtype for p in self.recipe.params] != self._dtypes:
                self._unagreed, self._named = self.agrees_first, not self.agrees_first
                self._owner[:] = [None] * len(self._owner)
                self._large[:] = [None] * len(self._large)
                ready = [i for i, delay in enumerate(self._delays) if delay <= 0]
                self._order.extend(i for i in ready if i not in self._order)
                for i in ready if self._named else ():
                    self._by_name.send(i)

    def _advance(self, everything: bool = False) -> None:
        """Send the complete buckets, in order; with `everything` all of them, complete or not."""
        if not self._in_step:
            self._begin_step()
        if self._named:
            return
        if self._unagreed or self._asked is not None:
            if not everything:
                return  # a hook must not block on other ranks
            self._asked = self._asked or self._ask()
            self._settle()
            self._unagreed = False
        self._begin_buckets()
        if self._changed:
            self._ask_early()
        with torch.no_grad():
            while self._next < len(self.buckets):
                bucket = self.buckets[self._next]
                if bucket.pending > 0 and not everything:
                    return
                self._next += 1
                flat = bucket.fill(self.recipe.factors(bucket.layout.dtype)[0], self._changed)
                bucket.work = self._lane.send(bucket.layout, flat)
        self._lane.launched = self._lane.step

    def _begin_buckets(self) -> None:
        """Announce this step to rank 0, and check whether the plan still fits. Twice is safe."""
        if not self._begun:
            self._begun = True
            self._wanted_now = self._want()
            self._changed = self._wanted_now != self._wanted or self._unknown
            self._lane.begin()

    # At the end of a step

    def synchronize(self) -> None:
        """Average all gradients. Collective."""
        self.watch()
        self._advance(everything=True)
        if self._named:
            self._finish_by_name()
        else:
            self._finish_buckets()
        if self._any_frozen:
            self.fill_frozen()
        self._end_step()

    def _finish_by_name(self) -> None:
        if self._asked is None:
            self._asked = self._ask()
        if len(self._by_name.sent) < len(self.recipe.params):
            # Another rank may have gradients, or sparse ones, where this rank has none.
            self._settle()
            self._send_by_name(set(self._kinds))
        self._by_name.finish()

    def _finish_buckets(self) -> None:
        sparse = {name for name, kind in self._kinds.items() if kind == SPARSE}
        if sparse:
            self._send_by_name(sparse)
        changed = 0.0
        for bucket in self.buckets:
            self._lane.wait(bucket.layout, bucket.work)
            with torch.no_grad():
                if bucket.layout.flag:
                    changed += float(bucket.flat[-1])
                bucket.install(
                    self.recipe.factors(bucket.layout.dtype)[1], self.recipe.sparse_as_dense
                )
            bucket.work = None
        if changed:
            # Some rank has frozen, unfrozen or added parameters: all ranks agree on a new plan, and
            # average by name what the old plan did not contain.
            before = {n for n, kind in self._kinds.items() if kind != FROZEN}
            self._asked, self._next_asked = self._next_asked or self._ask(), None
            self._settle()
            self._send_by_name(set(self._kinds) - before)
        if self._by_name.sent:
            self._by_name.finish()

    def _send_by_name(self, names: set[str]) -> None:
        """Send the named gradients that some rank has and that this rank has not sent yet."""
        kinds = self._kinds
        for i, name in enumerate(self.recipe.names):
            if name in names and kinds[name] != FROZEN and i not in self._by_name.sent:
                self._by_name.send(i, sparse=kinds[name] == SPARSE)

    def _end_step(self) -> None:
        super().reset()
        self._in_step = self._named = self._unagreed = self._begun = False
        self._next = 0
        self._order.clear()
        for bucket in self.buckets:
            bucket.rearm()

    # Agreement on a plan

    def _bind(self) -> None:
        """Get a lane of the current engine. Its name has a hash of the parameters, and a number
        that distinguishes optimizers with equal parameters.
        """
        engine = basics.engine
        if engine is self._engine:
            return
        set_id = self.recipe.set_id
        about = (digest(self.recipe), set_id)
        number = engine.lane_numbers[about] = engine.lane_numbers.get(about, 0) + 1
        name = f"{self.recipe.label}.{about[0]}.{set_id}.{number}"
        self._engine, self._lane, self._version = engine, engine.lane(name, set_id), 0
        self._asked, self._next_asked, self._begun = None, None, False
        self._by_name = ByName(self.recipe, f"@{name}", divides_first=True)
        weakref.finalize(self, Engine.drop_lane, engine, name, set_id).atexit = False

    def _ask(self) -> Work:
        """Propose a plan to the other ranks. Does not block."""
        return self._lane.ask(describe(self.recipe, self._order, self._want(), basics.engine))

    def _ask_early(self) -> None:
        """Request the next plan once all gradients are ready, so that peers that wait for it do not
        also wait for this rank's `synchronize`.
        """
        pairs = zip(self._delays, self._wanted_now, strict=True)
        if self._next_asked is None and all(d <= 0 for d, wanted in pairs if wanted):
            self._next_asked = self._ask()

    def _settle(self) -> None:
        """Wait for the plan, and build the buckets. Raises HorovodInternalError if the ranks'
        proposals mismatch.
        """
        work, self._asked, self._asked_early = self._asked, None, False
        assert work is not None
        self._lane.settle(work)
        self._build()

    def _build(self) -> None:
        """Build the buckets of the lane's plan, and index them by parameter."""
        plan = self._lane.plan
        assert plan is not None
        place = {name: i for i, name in enumerate(self.recipe.names)}
        self._owner[:] = [None] * len(self.recipe.params)
        self._large[:] = [None] * len(self.recipe.params)
        self.buckets = []
        for layout in self._lane.layouts:
            params = [self.recipe.params[place[name]] for name in layout.names]
            strides = [plan.strides.get(name) for name in layout.names]
            bucket = Bucket(layout, params, strides, self._lane)
            self.buckets.append(bucket)
            for at, name in enumerate(layout.names):
                self._owner[place[name]] = bucket
                self._large[place[name]] = at if bucket.takes(at) else None
                # Less the gradients that were ready before the bucket existed.
                bucket.pending -= self._delays[place[name]] <= 0
        self._version = self._lane.version
        self._kinds = plan.kinds
        self._wanted = self._want()
        self._dtypes = [dtype_of(plan.dtypes[name]) for name in self.recipe.names]
        named = zip(self._wanted, self.recipe.names, strict=True)
        self._unknown = any(w and plan.kinds[name] == FROZEN for w, name in named)

    def _want(self) -> list[bool]:
        """Return which parameters to average: those that require a gradient, or hold one."""
        wanted = [p.requires_grad for p in self.recipe.params]
        self._any_frozen = not all(wanted)
        if self._any_frozen:
            pairs = zip(wanted, self.recipe.params, strict=True)
            wanted = [want or p.grad is not None for want, p in pairs]
        return wanted
