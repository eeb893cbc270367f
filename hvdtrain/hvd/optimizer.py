"""DistributedOptimizer: any torch optimizer, stepping on gradients averaged over all ranks.

For scripts and the compat backend. It subclasses the optimizer's class at run time, as Horovod
does, so that schedulers accept it; a reducer of `hvd.gradients` averages the gradients.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from hvdtrain._torch.step_mark import mark_as_stepped, without_step_hooks
from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.compression import Compression, wire_dtype
from hvdtrain.hvd.engine.operation import ADASUM, AVERAGE, SUM
from hvdtrain.hvd.functions import allgather_object
from hvdtrain.hvd.gradients.adasum_optimizer import ADASUM_METHODS
from hvdtrain.hvd.gradients.bucket_reducer import BucketReducer
from hvdtrain.hvd.gradients.reducer import AveragingSpec, PassCounter, Reducer
from hvdtrain.hvd.ops.differentiable import allreduce
from hvdtrain.hvd.ops.handles import check_adasum
from hvdtrain.hvd.process_sets import ProcessSet, global_process_set
from hvdtrain.optim import sharded_optimizer
from hvdtrain.optim.shared_tensors import Group
from hvdtrain.system.trees import parameters_of

_SYNCHRONIZED_TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after "
    "optimizer.synchronize(). This can cause training slowdown. You may want to consider using "
    "optimizer.skip_synchronize() context if you use optimizer.synchronize() in your code."
)
_BACKWARD_IN_CLOSURE = (
    "the closure of optimizer.step(closure) computed gradients that nobody averages, so the ranks' "
    "models would diverge: call optimizer.synchronize() in the closure, after backward, and "
    "optimizer.step(closure) inside `with optimizer.skip_synchronize():`"
)
_ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition. If they are "
    "those of another model's loss, as of a GAN's discriminator in the generator's step, call "
    "discriminator.requires_grad_(False) before that backward, and (True) after it."
)


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    shard: bool = False,
) -> Any:
    """Return an optimizer of the same class, with the same parameter groups, state and defaults,
    whose `step` averages the gradients over all ranks first.

    Not collective: the first `step` raises if the ranks' parameters differ. Gradients of
    `backward_passes_per_step` passes are summed before they are averaged. Ranks match gradients by
    the names in `named_parameters`; `groups` are sent together. `op=Adasum` combines the updates
    instead of the gradients. Raises ValueError for invalid arguments.

    An extension: with `shard` the ranks of a host share one copy of parameters and state, and
    each steps its share (see `hvdtrain.optim.sharded_optimizer`); this call is then collective.
    """
    if gradient_predivide_factor != 1.0 and op != AVERAGE:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if shard:
        if named_parameters is not None:
            named_parameters = list(named_parameters)  # it is read again
        _shard(optimizer, op, process_set, _names(optimizer, named_parameters))
    methods = dict(_DistributedOptimizer.__dict__)
    if op == ADASUM and basics.size() > 1:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        check_adasum()
        methods |= ADASUM_METHODS
        groups = None
    cls = type(type(optimizer).__name__, (type(optimizer),), methods)
    how = (
        named_parameters, compression, backward_passes_per_step, op, gradient_predivide_factor,
        groups, sparse_as_dense, process_set,
    )  # fmt: skip
    if basics.is_exact:
        return cls(optimizer.param_groups, *how)
    wrapped: Any = object.__new__(cls)
    # The constructor would need arguments that are stored nowhere, and would drop the state.
    # torch's schedulers put a `step` into the instance, which would hide the wrapper's.
    own = {key: value for key, value in vars(optimizer).items() if key != "step"}
    vars(wrapped).update(own)
    wrapped._begin(*how)
    wrapped._wrapped = weakref.ref(optimizer)
    return wrapped


def _shard(
    optimizer: Optimizer, op: int, process_set: ProcessSet, names: dict[Tensor, str]
) -> None:
    """Let the ranks share the parameters of an optimizer that is not wrapped yet. Collective.

    Raises ValueError where not all ranks step at the same time, on equal parameters.
    """
    refused = {
        "op=Adasum combines updates that differ between ranks": op == ADASUM,
        "the ranks of a process set step alone": process_set is not global_process_set,
        "the ranks of an elastic job change": basics.engine.settings.elastic,
        "Horovod's own optimizer has no such argument": basics.is_exact,
    }
    if why := [reason for reason, holds in refused.items() if holds]:
        raise ValueError(f"shard=True: {why[0]}; leave it out")
    group = Group(
        basics.rank(),
        basics.size(),
        lambda value: allgather_object(value, "hvdtrain.shard"),
        lambda flags: allreduce(flags, name="hvdtrain.shard.flags", op=SUM),
    )
    sharded_optimizer.shard(optimizer, group, names)


# Methods that Horovod's class calls and ours does not: overriding one would have no effect.
_NOT_CALLED = (
    "_allreduce_grad_async",
    "_grouped_allreduce_grad_async",
    "_sparse_allreduce_grad_async",
    "_make_hook",
    "_register_hooks",
)


def _refuse(self: Optimizer, names: str = "_register_hooks") -> NoReturn:
    """Raise TypeError: a subclass relies on methods that only Horovod's class has."""
    raise TypeError(
        f"{type(self).__name__} overrides or calls {names} of Horovod's optimizer, which "
        "hvdtrain's does not have; give DistributedOptimizer a `compression`, or use real Horovod"
    )


def _inner(optimizer: Optimizer) -> Any:
    """Return a `super()` proxy to the methods of the class that was wrapped."""
    wrapping = [cls for cls in type(optimizer).__mro__ if "_begin" in vars(cls)]
    return super(wrapping[-1], optimizer)


class _DistributedOptimizer(Optimizer):
    """Template: DistributedOptimizer copies these attributes into a subclass of the optimizer's."""

    def __init__(self, params: Any, *how: Any, **options: Any) -> None:
        """Construct as Horovod does, for scripts that make such a class themselves:
        `type(name, (torch.optim.SGD,), dict(_DistributedOptimizer.__dict__))(params, ...)`.

        The further arguments are `DistributedOptimizer`'s, without `num_groups` and `shard`.
        Raises TypeError if the class wraps no optimizer, or has overrides without effect.
        """
        own = type(self)
        ignored = [name for name in _NOT_CALLED if getattr(own, name, _refuse) is not _refuse]
        if ignored:
            _refuse(self, ", ".join(ignored))
        if _inner(self).step.__func__ is Optimizer.step:
            raise TypeError(
                f"{own.__name__} has no optimizer to wrap: make the class as Horovod does, by "
                "type(name, (torch.optim.SGD,), dict(_DistributedOptimizer.__dict__))"
            )
        _inner(self).__init__(params)
        self._begin(*how, **options)

    def _begin(
        self,
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        compression: Any,
        backward_passes_per_step: int = 1,
        op: int = AVERAGE,
        gradient_predivide_factor: float = 1.0,
        groups: int | Sequence[Sequence[Tensor]] | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        """Set up the averaging: the spec, the reducer and its hooks."""
        names, exact = _names(self, named_parameters), basics.is_exact
        # Horovod's groups ignore it.
        predivide = 1.0 if exact and groups else gradient_predivide_factor
        self._parameter_names = names
        self._groups = groups
        self._predivide = gradient_predivide_factor
        self._synchronized = False
        self._should_synchronize = True
        self._wrapped: Callable[[], Optimizer | None] = lambda: None
        self._spec = AveragingSpec(
            {}, type(self).__name__, compression, backward_passes_per_step, op, predivide,
            _groups(groups, names), sparse_as_dense, process_set,
        )  # fmt: skip
        # An elastic job may begin with one rank and grow.
        many = basics.size() > 1 or basics.engine.settings.elastic
        self._is_averaged = bool(process_set.included() and many)
        if self._is_averaged:
            for p in parameters_of(self):
                if p.requires_grad or not exact:  # Horovod never averages one unfrozen later
                    self._spec.names[p] = names[p]
        self._reducer = _make_reducer(self._spec)
        self._reducer.register_hooks()

    # Attributes of Horovod's optimizer that scripts read. Read-only: a new value has no effect.

    backward_passes_per_step = property(attrgetter("_spec.passes"))
    gradient_predivide_factor = property(attrgetter("_predivide"))
    op = property(attrgetter("_spec.op"))
    sparse_as_dense = property(attrgetter("_spec.sparse_as_dense"))
    process_set = property(attrgetter("_spec.process_set"))
    _compression = property(attrgetter("_spec.compression"))

    @property
    def _requires_update(self) -> set[Tensor]:
        return {g.param for g in self._reducer.gradients if g.hook is not None}

    @property
    def _allreduce_delay(self) -> Mapping[Tensor, int]:
        """Each parameter's remaining backward passes before it is averaged: Horovod's attribute."""
        left = dict.fromkeys(self._parameter_names, self._spec.passes)
        return MappingProxyType(left | self._reducer.delays())

    @property
    def _handles(self) -> Mapping[Tensor, tuple[None, None]]:
        """The parameters whose gradients are not averaged yet. A bucket has no handle."""
        left = self._reducer.delays().items()
        waiting = (p for p, passes in left if passes != self._spec.passes)
        return MappingProxyType(dict.fromkeys(waiting, (None, None)))

    _register_hooks = _refuse  # called by subclasses that copy Horovod's constructor

    @staticmethod
    def find_duplicates(lst: Iterable[Any]) -> set[Any]:
        """Return the items that occur more than once."""
        return {item for item, count in Counter(lst).items() if count > 1}

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes per step, from this step on."""
        self._spec.passes = passes
        self._reducer.restart_passes()

    def synchronize(self) -> None:
        """Average the gradients. Collective.

        `p.grad` stays the same tensor, but for a large one that nobody else refers to: its average
        may be another tensor (see `gradients.bucket`). A parameter without a gradient contributes
        zeros. Raises HorovodInternalError if a peer is lost.
        """
        self._reducer.synchronize()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` inside the block not average, because `synchronize` was called already."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    @without_step_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, unless inside `skip_synchronize`, and step. Collective.

        A closure runs after the averaging. Raises RuntimeError if it computes gradients and does
        not call `synchronize` itself; in exact mode, where the step goes on as in Horovod, warns.
        """
        inner = _inner(self).step
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(_SYNCHRONIZED_TWICE, stacklevel=2)
            self.synchronize()
        self._synchronized = False
        if (wrapped := self._wrapped()) is not None:
            mark_as_stepped(wrapped)  # for a scheduler that was made before wrapping
        if closure is None:
            return inner()

        def checked() -> Any:
            result = closure()
            if self._reducer.active:
                if not basics.is_exact:
                    raise RuntimeError(_BACKWARD_IN_CLOSURE)
                warnings.warn(_BACKWARD_IN_CLOSURE, stacklevel=2)
            return result

        return inner(checked)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients. Raises AssertionError while some are computed but not averaged."""
        if self._reducer.active:
            raise AssertionError(_ZERO_GRAD_TOO_EARLY)
        _inner(self).zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, the same on all ranks. The next step averages them too."""
        _inner(self).add_param_group(param_group)
        if "_spec" not in vars(self) or basics.is_exact:
            return  # inside the constructor; or exact, as Horovod never averages later parameters
        for p in self.param_groups[-1]["params"]:
            if p not in self._spec.names:
                number = len(self._parameter_names)
                name = self._parameter_names.setdefault(p, f"allreduce.noname.added.{number}")
                if self._is_averaged:
                    self._spec.names[p] = name
                    self._reducer.add(name, p)
        self._reducer.register_hooks()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state, and discard this step's backward passes."""
        self._reducer.reset()
        self._synchronized = False
        self._should_synchronize = True
        _inner(self).load_state_dict(state_dict)

    def __reduce__(self) -> tuple[Any, ...]:
        spec = self._spec
        named = [(name, p) for p, name in self._parameter_names.items()]
        how = (
            named, spec.compression, spec.passes, spec.op, self._predivide, 0, self._groups,
            spec.sparse_as_dense, spec.process_set,
        )  # fmt: skip
        # A copy of a sharded optimizer shares nothing.
        plain = sharded_optimizer.plain_class(type(self).__mro__[1])
        return _restore, (plain, Optimizer.__getstate__(self), how)


def _restore(cls: type[Optimizer], state: dict[str, Any], how: tuple[Any, ...]) -> Any:
    """Undo `__reduce__`: wrap the optimizer again if hvd is initialised, else return it plain."""
    optimizer = cls.__new__(cls)
    optimizer.__setstate__(state)
    if not basics.is_initialized():
        return optimizer
    wrapped = DistributedOptimizer(optimizer, *how)
    wrapped.state = optimizer.state
    return wrapped


def _make_reducer(spec: AveragingSpec) -> Reducer:
    """Return the reducer for a spec: buckets, if the compressor is one of Horovod's or bf16."""
    if not spec.names:
        return Reducer(spec)
    if spec.op == ADASUM and basics.size() > 1:
        return PassCounter(spec)
    return Reducer(spec) if wire_dtype(spec.compression) is None else BucketReducer(spec)


def _names(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Return the name of every parameter. Raises ValueError if one is missing or repeated."""
    mine = [
        (f"allreduce.noname.{i}.{j}", p)
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
    ]
    if named_parameters is None:
        return {p: name for name, p in mine}
    named = list(named_parameters)
    if any(not isinstance(item, tuple) for item in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    repeated = _DistributedOptimizer.find_duplicates(name for name, _ in named)
    if repeated:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(sorted(repeated))}"
        )
    names = {p: name for name, p in named}
    unnamed = [str(id(p)) for _, p in mine if p not in names]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"Python object ids: {', '.join(unnamed)}"
        )
    return names


def _groups(groups: Any, names: dict[Tensor, str]) -> int | list[list[str]]:
    """Return the number of groups, or their parameters' names. Raises ValueError."""
    if groups is None:
        return []
    if isinstance(groups, int) and groups > 0:
        return groups
    if not isinstance(groups, list):
        raise ValueError(
            "groups should be a non-negative integer or a list of list of torch.Tensor."
        )
    listed = [p for group in groups for p in group]
    if not all(isinstance(p, Tensor) for p in listed):
        raise ValueError("groups must consist of torch.Tensor.")
    if len(set(listed)) < len(listed):
        raise ValueError("A parameter can only appear once in groups.")
    return [[names[p] for p in group if p in names] for group in groups]
