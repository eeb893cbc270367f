"""Gradients in agreed buckets: the hot path of training.

The first step goes by name, as Horovod's do, and lets the ranks agree meanwhile: on buckets, in the
order in which rank 0's gradients became ready. From the second on a bucket is sent as soon as its
gradients are there and the buckets before it have been sent, so the order is the same everywhere
without a word. The gradients then are views of the bucket: they are copied in, and never out.

In a ring all-reduce, such as Gloo's, the order of additions depends on an element's place in the
buffer: with three ranks or more the first step of a resumed run, by name, would differ from the
same step of a run that was left alone. With `agrees_first` the first step waits for the agreement
in `synchronize`, and uses the buckets. Scripts could not all wait there: one rank may step two
optimizers in another order than its peers, or call something else before.

After DDP's reducer (Li et al., VLDB 2020) and Horovod's semantics: a parameter without a gradient
is averaged as zeros, and nothing is complete before `synchronize`.
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
from hvdtrain.transports.memory import keep_freed_memory


class BucketReducer(Reducer):
    """Averages by buckets. See the module.

    A step begins with the first gradient, or at `synchronize`.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.buckets: list[Bucket] = []
        self._owner: list[Bucket | None] = [None] * len(recipe.params)
        self._large: list[int | None] = [None] * len(recipe.params)  # place in the bucket
        self._order: list[int] = []
        self.agrees_first = False  # all ranks must have the same
        self._in_step = False
        self._named = False  # whether this step goes by name
        self._unagreed = False  # whether there is no plan yet for the buckets of this step
        self._begun = False  # whether the others know that this rank sends buckets in this step
        self._next = 0
        self._changed = False  # whether this rank wants something else than was agreed
        self._wanted: list[bool] = []
        self._wanted_now: list[bool] = []
        self._dtypes: list[torch.dtype] = []
        self._kinds: dict[str, str] = {}  # of the plan in use: the lane may have a newer one
        self._unknown = False  # whether the plan lacks something that is wanted here
        self._any_frozen = False
        self._version = 0
        self._asked: Work | None = None  # for the plan of the next step, or of this one
        self._next_asked: Work | None = None
        self._asked_early = False
        self._engine: Engine | None = None
        keep_freed_memory()
        self._bind()

    def add(self, name: str, param: Tensor) -> None:
        """Take a parameter in that the optimizer was given later: the next step asks again."""
        super().add(name, param)
        self._owner.append(None)
        self._large.append(None)

    def reset(self) -> None:
        """Forget the backward passes since the last step. What was sent by bucket is waited for:
        the others have sent it, or will; not once the job is over, as where a commit is restored.
        """
        if self._begun and self._engine is not None and self._engine.failure is None:
            try:
                self.synchronize()
            except HorovodInternalError:
                if self._engine.failure is None:
                    raise
        self._by_name.sent.clear()
        self._end_step()

    # While backward runs

    def _hook(self, i: int) -> Any:
        delays, owner, large = self._delays, self._owner, self._large
        own = weakref.ref(self)  # the hook, which the parameter keeps, must not keep the optimizer

        # Called for every parameter in every backward pass: it does no more than count.
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
        """Copy a large gradient in while it is in the cache, and let its memory be the next one's:
        fresh memory costs as much as the copy.
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
        """Take a gradient that is in no bucket yet."""
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
            # Sparse, or not agreed on yet: the others send it, or learn of it, in this step.
            kind = self._kinds.get(self.recipe.names[i])
            self._by_name.send(i, sparse=kind == SPARSE)
            self._advance()

    def _begin_step(self) -> None:
        """Choose how gradients are sent in this step."""
        self._bind()
        self._in_step = True
        if self._asked is not None:
            # Where all gradients were there during backward, the others have asked by now, or will
            # without this rank's help: so its buckets need not wait for `synchronize`.
            if self._asked_early or self._lane.has_settled(self._asked):
                self._settle()
        else:
            if self._lane.plan is not None and self._lane.version != self._version:
                self._lane.await_connection()
                self._build()  # the others agreed while this rank had joined
            if self._lane.plan is None or [p.dtype for p in self.recipe.params] != self._dtypes:
                self._unagreed, self._named = self.agrees_first, not self.agrees_first
                self._owner[:] = [None] * len(self._owner)
                self._large[:] = [None] * len(self._large)
                ready = [i for i, delay in enumerate(self._delays) if delay <= 0]
                self._order.extend(i for i in ready if i not in self._order)
                for i in ready if self._named else ():
                    self._by_name.send(i)

    def _advance(self, everything: bool = False) -> None:
        """Send the buckets that are complete, in order; all of them, as they are, at the end."""
        if not self._in_step:
            self._begin_step()
        if self._named:
            return
        if self._unagreed or self._asked is not None:
            if not everything:
                return  # a hook must not wait for the other ranks
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
        """Let the others know that this rank sends buckets in this step. Twice is safe."""
        if not self._begun:
            self._begun = True
            self._wanted_now = self._want()
            self._changed = self._wanted_now != self._wanted or self._unknown
            self._lane.begin()

    # At the end of it

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
            # Some rank has frozen, thawed or added parameters: all agree anew, and what the last
            # agreement did not know is averaged by name.
            before = {n for n, kind in self._kinds.items() if kind != FROZEN}
            self._asked, self._next_asked = self._next_asked or self._ask(), None
            self._settle()
            self._send_by_name(set(self._kinds) - before)
        if self._by_name.sent:
            self._by_name.finish()

    def _send_by_name(self, names: set[str]) -> None:
        """Send those that some rank has a gradient for and that were not sent."""
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

    # Agreement

    def _bind(self) -> None:
        """Take a lane of the present engine: by the parameters, and a number among equals."""
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
        """Describe the parameters to the others, and do not wait for them."""
        return self._lane.ask(describe(self.recipe, self._order, self._want(), basics.engine))

    def _ask_early(self) -> None:
        """Ask for the next agreement once all gradients are there, so that others who wait for it
        need not wait for this rank's `synchronize`.
        """
        pairs = zip(self._delays, self._wanted_now, strict=True)
        if self._next_asked is None and all(d <= 0 for d, wanted in pairs if wanted):
            self._next_asked = self._ask()

    def _settle(self) -> None:
        """Wait for the agreement, and make the buckets. Raises HorovodInternalError where there is
        none.
        """
        work, self._asked, self._asked_early = self._asked, None, False
        assert work is not None
        self._lane.settle(work)
        self._build()

    def _build(self) -> None:
        """Make the buckets of the lane's plan."""
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
                bucket.pending -= self._delays[place[name]] <= 0
        self._version = self._lane.version
        self._kinds = plan.kinds
        self._wanted = self._want()
        self._dtypes = [dtype_of(plan.dtypes[name]) for name in self.recipe.names]
        named = zip(self._wanted, self.recipe.names, strict=True)
        self._unknown = any(w and plan.kinds[name] == FROZEN for w, name in named)

    def _want(self) -> list[bool]:
        wanted = [p.requires_grad for p in self.recipe.params]
        self._any_frozen = not all(wanted)
        if self._any_frozen:
            pairs = zip(wanted, self.recipe.params, strict=True)
            wanted = [want or p.grad is not None for want, p in pairs]
        return wanted
