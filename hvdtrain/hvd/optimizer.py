"""DistributedOptimizer: any torch optimizer, stepping on gradients averaged over all ranks.

For scripts and the compat backend. It subclasses the optimizer's class at run time, as Horovod
does, so that schedulers accept it; a reducer of `hvd.gradients` averages the gradients. Adasum
(Maleki et al., MLSys 2021) combines the ranks' updates instead, in a class of its own.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvdtrain._torch.step_mark import (
    inner_step,
    mark_as_stepped,
    with_step_hooks,
    without_step_hooks,
)
from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.compression import Compression
from hvdtrain.hvd.engine.operation import ADASUM, AVERAGE, SUM
from hvdtrain.hvd.functions import allgather_object
from hvdtrain.hvd.gradients.pass_counter import AveragingSpec, PassCounter
from hvdtrain.hvd.gradients.reducer import Reducer
from hvdtrain.hvd.ops.differentiable import allreduce, grouped_allreduce
from hvdtrain.hvd.ops.handles import check_adasum, check_op
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
    "the closure of optimizer.step(closure) computed gradients that were not averaged, so the "
    "ranks' models would diverge: call optimizer.synchronize() in the closure, after backward, and "
    "optimizer.step(closure) inside `with optimizer.skip_synchronize():`"
)
_ZERO_GRAD_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition. If they come "
    "from another model's loss, such as a GAN's generator step for the discriminator, call "
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
    check_op(op)
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
    names, exact = _names(optimizer, named_parameters), basics.is_exact
    if shard:
        _shard(optimizer, op, process_set, names)
    template = _DistributedOptimizer
    if op == ADASUM and basics.size() > 1:
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum does not support non-global process sets yet.")
        check_adasum()
        template, groups = _DistributedAdasumOptimizer, None
    wrapped = _wrap(optimizer, template)
    # An elastic job may begin with one rank and grow.
    many = basics.size() > 1 or basics.engine.settings.elastic
    is_averaged = bool(process_set.included() and many)
    # Horovod never averages one unfrozen later.
    averaged = [p for p in parameters_of(optimizer) if p.requires_grad or not exact]
    predivide = 1.0 if exact and groups else gradient_predivide_factor  # as Horovod's groups do
    wrapped._spec = AveragingSpec(
        {p: names[p] for p in averaged if is_averaged}, type(optimizer).__name__, compression,
        backward_passes_per_step, op, predivide, _groups(groups, names), sparse_as_dense,
        process_set,
    )  # fmt: skip
    wrapped._predivide = gradient_predivide_factor
    wrapped._parameter_names, wrapped._groups, wrapped._is_averaged = names, groups, is_averaged
    kind = PassCounter
    if template is _DistributedAdasumOptimizer:
        for p in averaged:
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)  # as Horovod does
    elif is_averaged:
        kind = Reducer
    wrapped._reducer = kind(wrapped._spec)
    wrapped._reducer.register_hooks()
    return wrapped


def _wrap(optimizer: Optimizer, template: type[_DistributedOptimizer]) -> Any:
    """Return an optimizer with the same groups, of a subclass that has the template's methods: its
    own class is the next one, as `super(type(optimizer), optimizer).step()` of scripts expects.
    """
    methods = {**vars(_DistributedOptimizer), **vars(template)}
    cls = type(type(optimizer).__name__, (type(optimizer),), methods)
    wrapped: Any = object.__new__(cls)
    if basics.is_exact:
        wrapped.__init__(optimizer.param_groups)
    else:
        # The constructor would need arguments that are stored nowhere, and would drop the state.
        # torch's schedulers put a `step` into the instance, which would hide the wrapper's.
        own = {key: value for key, value in vars(optimizer).items() if key != "step"}
        vars(wrapped).update(own, _wrapped=weakref.ref(optimizer))
    return wrapped


def _shard(
    optimizer: Optimizer, op: int, process_set: ProcessSet, names: dict[Tensor, str]
) -> None:
    """Let the ranks share the parameters of an optimizer that is not wrapped yet. Collective.

    Raises ValueError where not all ranks step at the same time, on equal parameters.
    """
    refused = {
        "op=Adasum combines updates that differ between ranks": op == ADASUM,
        "the ranks of a process set step without the others": process_set is not global_process_set,
        "the ranks of an elastic job change": basics.engine.settings.elastic,
        "Horovod's own optimizer has no such argument": basics.is_exact,
    }
    if why := [reason for reason, holds in refused.items() if holds]:
        raise ValueError(f"shard=True is not possible: {why[0]}; remove it")
    group = Group(
        basics.rank(),
        basics.size(),
        lambda value: allgather_object(value, "hvdtrain.shard"),
        lambda flags: allreduce(flags, name="hvdtrain.shard.flags", op=SUM),
    )
    sharded_optimizer.shard(optimizer, group, names)


def _inner(optimizer: Optimizer) -> Any:
    """Return a `super()` proxy to the methods of the class that was wrapped."""
    wrapping = [cls for cls in type(optimizer).__mro__ if "_wrapped" in vars(cls)]
    return super(wrapping[-1], optimizer)


class _DistributedOptimizer(Optimizer):
    """Template: DistributedOptimizer copies these attributes into a subclass of the optimizer's."""

    _synchronized = False
    _should_synchronize = True
    _wrapped: Callable[[], Optimizer | None] = staticmethod(lambda: None)
    # Scripts replace it by an empty set, as Horovod's issue 1099 advises: then a parameter whose
    # gradient is zero on all ranks is left without one.
    _requires_update: Container[Tensor] | None = None
    _spec: AveragingSpec
    _reducer: PassCounter
    _parameter_names: dict[Tensor, str]
    _groups: Any
    _predivide: float
    _is_averaged: bool

    # Attributes of Horovod's optimizer that scripts read; assigning one raises AttributeError.

    gradient_predivide_factor = property(attrgetter("_predivide"))
    backward_passes_per_step = property(attrgetter("_spec.passes"))
    op = property(attrgetter("_spec.op"))
    sparse_as_dense = property(attrgetter("_spec.sparse_as_dense"))
    process_set = property(attrgetter("_spec.process_set"))
    _compression = property(attrgetter("_spec.compression"))

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

        `p.grad` stays the same tensor, except a large one without other references: its average
        may be another tensor (see `gradients.bucket`). A parameter without a gradient contributes
        zeros. Raises HorovodInternalError if a peer is lost.
        """
        self._reducer.synchronize()
        if (needed := self._requires_update) is not None:
            for p in self._spec.names:
                # By the average, which is equal on all ranks.
                if p not in needed and p.grad is not None and not p.grad.any():
                    p.grad = None
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
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(_SYNCHRONIZED_TWICE, stacklevel=2)
            self.synchronize()
        self._synchronized = False
        if (wrapped := self._wrapped()) is not None:
            mark_as_stepped(wrapped)  # for a scheduler that was made before wrapping
        if closure is None:
            return _inner(self).step()

        def checked() -> Any:
            result = closure()
            if self._reducer.active:
                if not basics.is_exact:
                    raise RuntimeError(_BACKWARD_IN_CLOSURE)
                warnings.warn(_BACKWARD_IN_CLOSURE, stacklevel=2)
            return result

        return _inner(self).step(checked)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients. Raises AssertionError while some are computed but not averaged."""
        if self._reducer.active:
            raise AssertionError(_ZERO_GRAD_TOO_EARLY)
        _inner(self).zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, the same on all ranks. The next step averages them too."""
        _inner(self).add_param_group(param_group)
        if basics.is_exact:
            return  # as Horovod never averages later parameters
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

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "hvd.DistributedOptimizer has hooks on this process's parameters, so it cannot be "
            "copied or pickled: copy or save its state_dict()"
        )


class _DistributedAdasumOptimizer(_DistributedOptimizer):
    """The methods of `op=Adasum`: it combines the ranks' updates, not their gradients."""

    def synchronize(self) -> None:
        """Do nothing: gradients stay this rank's own."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raise AssertionError: a step without combining would make the ranks' models diverge."""
        raise AssertionError(
            "Skipping synchronization is not supported when using Adasum optimizer."
        )
        yield  # unreachable, but makes this a generator, as contextmanager requires

    @with_step_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank's own gradients, then combine all ranks' updates. Collective.

        A closure runs once, and makes as many backward passes as a step, with those before it.
        """
        names = self._spec.names
        # By name, so that ranks with another order of parameters send the same list.
        params = sorted((p for p in names if p.requires_grad), key=lambda p: names[p])
        begin = [p.detach().clone() for p in params]
        inner: Any = inner_step(type(self).__bases__[0])
        loss = inner(self) if closure is None else inner(self, closure)
        with torch.no_grad():
            combined = grouped_allreduce(
                [p.detach() - before for p, before in zip(params, begin, strict=True)],
                name=f"adasum.{type(self).__name__}",
                compression=self._compression,
                op=ADASUM,
            )
            for p, before, update in zip(params, begin, combined, strict=True):
                p.copy_(before + update)
        self._reducer.synchronize()
        return loss


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
