"""`--shard-optimizer`: the ranks of a host share one copy of the parameters, and divide the step.

Used by the backends `ddp` and `compat`, and by `hvd.DistributedOptimizer(shard=True)`. Ranks on
CPUs hold equal parameters and repeat the same optimizer step. With sharding, parameters and
optimizer state are in memory that the ranks map, and each rank updates its share of the elements:

    every rank    backward; p.grad is the mean of all ranks
    all-reduce    of flags of what has changed: afterwards no rank reads the old parameters
    rank r        steps the elements of its share, with their part of the optimizer's state
    all-reduce    of a flag, as the first step makes state: afterwards all parameters are new
    new state     is moved into shared memory, by all ranks

The optimizers in `ELEMENTWISE` update each element by itself, so that the bits are those of a step
on one rank. Shares are cut at multiples of 64 elements of a parameter: the last elements of a loop
with vector instructions may be rounded differently. Most parameters belong to one rank as a whole;
only those at the borders are stepped through 1-D views.

Parameters move at the first step, so that weights can be loaded before it, as always. The state of
the optimizer is whole on every rank: `state_dict` is that of the plain optimizer, and not
collective.

With several hosts, each host has its own copy of parameters and state, and its ranks divide the
whole step among themselves: gradients are the mean of all ranks already, so that no parameters are
sent. The flags are summed over the ranks of all hosts, which therefore take the same way. Shared
memory is in `shared_tensors`.
"""

from __future__ import annotations

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from hvdtrain._torch.step_mark import inner_step, with_step_hooks
from hvdtrain._torch.versions import version_of
from hvdtrain.errors import WorldError, WorldMismatch
from hvdtrain.optim.shared_tensors import (
    Group,
    HostMemory,
    Samples,
    bits,
    flat,
    refuse,
)
from hvdtrain.system.trees import parameters_of
from hvdtrain.transports.malloc import return_freed_memory

ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in ("SGD Adam AdamW Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop".split())
)
"""The optimizers whose update of an element depends on it alone. A subclass may differ."""

_CUT = 64  # elements: a multiple of every vector's width


def shard(optimizer: Optimizer, group: Group, names: Mapping[Tensor, str]) -> list[int]:
    """Make each rank step its share of the parameters, in memory that the ranks share. Collective.

    The optimizer stays the same object, of a subclass of its class; its `step` is collective.
    Returns the number of ranks on each host; with one on each, it changes nothing. Raises
    InputError, on all ranks, if the optimizer cannot be sharded.
    """
    if group.size == 1:
        return [1]
    kind = type(optimizer)
    if kind not in ELEMENTWISE:
        known = ", ".join(cls.__name__ for cls in ELEMENTWISE)
        refuse(f"{kind.__name__} may read other elements than the one it updates; use {known}")
    if any(option.get("differentiable") for option in optimizer.param_groups):
        refuse("a differentiable step keeps the old parameters; set differentiable=False")
    devices = {p.device for p in parameters_of(optimizer)} - {torch.device("cpu")}
    if devices:
        refuse(f"the ranks share CPU memory, but parameters are on {devices.pop()}")
    host = HostMemory(group)
    if set(host.sizes) == {1}:
        return host.sizes
    # Hooks run before and after the whole step, where they see the whole optimizer.
    step = with_step_hooks(ShardedOptimizer.step)
    optimizer.__class__ = type(kind.__name__, (ShardedOptimizer, kind), {"step": step})
    cast("ShardedOptimizer", optimizer)._sharding = _Sharding(group, host, names)
    return host.sizes


class ShardedOptimizer:
    """The methods that `shard` puts before those of an optimizer's class."""

    _sharding: _Sharding

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update this rank's share, and wait for the others'. Collective.

        Raises InputError, on all ranks, for parameters that were changed outside `step`.
        """
        if closure is not None:
            refuse("a closure would read parameters that other ranks are changing; call step()")
        inner = inner_step(plain_class(type(self)))
        self._sharding.step(cast("Optimizer", self), inner)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as the plain optimizer does. Not collective.

        Raises WorldError after a step that did not end, e.g. as a rank has died.
        """
        self._sharding.check_complete()
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        return state

    def unshare_parameters(self) -> None:
        """Give this rank parameters and state of its own, which it may change. Every rank calls it
        between the same two steps; the next step shares them again, if they are still equal.
        """
        self._sharding.unshare(cast("Optimizer", self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the plain optimizer: a copy shares nothing."""
        state = cast("Optimizer", self).__getstate__()
        return object.__new__, (plain_class(type(self)),), state


def plain_class(kind: type) -> type[Optimizer]:
    """Return the class that `shard` has made a subclass of; any other class as it is."""
    if issubclass(kind, ShardedOptimizer):
        kind = next(cls for cls in kind.__mro__ if cls in ELEMENTWISE)
    return kind


class _Sharding:
    """The shared memory and the share of one rank, for one optimizer."""

    def __init__(self, group: Group, host: HostMemory, names: Mapping[Tensor, str]) -> None:
        self._group, self._host, self._names = group, host, names
        self._is_complete = True
        self._forget()

    def _forget(self) -> None:
        """Begin again, without shared memory."""
        self._homes: dict[Tensor, Tensor] = {}
        """The memory of each parameter, in the same order on all ranks."""
        self._pieces: dict[Tensor, tuple[Tensor, int, int]] = {}
        """What this rank steps: the parameter itself, or elements [begin, end) of its memory."""
        self._versions: list[tuple[Tensor, Tensor, int]] = []
        """A parameter, it or a tensor of its state, and the version of that after the last step."""
        self._samples: list[Samples] = []
        """Of the parameters, after the last step."""
        self._own_state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        """What the optimizer's own `step` sees, keyed by piece."""
        self._own_known: dict[Tensor, dict[str, Any]] = {}
        """That part of `_own_state` that is in shared memory, or needs not be."""
        self._known: dict[Tensor, dict[str, Any]] = {}
        """What `optimizer.state` held after the last step, keyed by parameter."""

    # A step

    def step(self, optimizer: Optimizer, inner: Callable[[Optimizer], Any]) -> None:
        """Step this rank's share by `inner`. Collective."""
        self.check_complete()
        parameters = parameters_of(optimizer)
        problem = self._find_problem(parameters)
        new = [p for p in parameters if p not in self._homes]
        has_problem, is_new, is_other = self._sum_flags(
            problem is not None, bool(new), not self._knows_state(optimizer)
        )
        if has_problem:
            refuse(next(filter(None, self._group.all_gather_object(problem))))
        if is_new:
            self._check_all("new parameters", is_new)
            self._share(new)
        if is_other:
            self._check_all("another state of the optimizer", is_other)
            self._divide_state(optimizer)
        self._is_complete = False
        with torch.no_grad():
            self._step_pieces(optimizer, inner)
            (makes_state,) = self._sum_flags(bool(self._new_state()))
            if makes_state:
                self._share_state(optimizer)
                self._sum_flags()
        self._is_complete = True
        if is_new or makes_state:
            return_freed_memory()  # what each rank had for itself before
        increment_version([p for p in parameters if p.grad is not None])
        self._remember(optimizer)

    def check_complete(self) -> None:
        """Raise WorldError if a step did not end. Not collective."""
        if not self._is_complete:
            raise WorldError(
                "a sharded step did not end on all ranks, so that some parameters are old and some "
                "new; resume from the last checkpoint"
            )

    def _sum_flags(self, *flags: bool) -> list[int]:
        """Wait for all ranks; return on how many each flag is set."""
        mine = torch.tensor([*flags, True], dtype=torch.int64)
        sums: list[int] = self._group.all_sum(mine).tolist()
        return sums[:-1]

    def _check_all(self, what: str, num: int) -> None:
        if num < self._group.size:
            raise WorldMismatch(
                f"--shard-optimizer: {num} of {self._group.size} ranks have {what}; add "
                "parameters, load state and call unshare_parameters() on every rank",
                on_all_ranks=True,
            )

    def _step_pieces(self, optimizer: Optimizer, inner: Callable[[Optimizer], Any]) -> None:
        """Call `inner` while the optimizer's groups and state hold this rank's pieces alone."""
        for p, (piece, begin, end) in self._pieces.items():
            if piece is not p:
                piece.grad = None if p.grad is None else self._flat_like(p, p.grad)[begin:end]
        groups, state = optimizer.param_groups, optimizer.state
        lists = [options["params"] for options in groups]
        try:
            optimizer.state = self._own_state
            for options, every in zip(groups, lists, strict=True):
                options["params"] = [self._pieces[p][0] for p in every if p in self._pieces]
            inner(optimizer)
        finally:
            optimizer.state = state
            for options, every in zip(groups, lists, strict=True):
                options["params"] = every

    # Changes outside `step`

    def _find_problem(self, parameters: Iterable[Tensor]) -> str | None:
        """Return why this rank cannot step, if it cannot."""
        fix = (
            "outside step(), while all ranks share it; call optimizer.unshare_parameters() on "
            "every rank before you change it"
        )
        for p, t, version in self._versions:
            if version_of(t) != version:
                what = "" if t is p else "the optimizer's state of "
                return f"{what}{self._name(p)} was changed {fix}"
        for p, home in self._homes.items():
            if p.data_ptr() != home.data_ptr():
                return f"{self._name(p)} was given other memory {fix}"
        for samples in self._samples:
            if (changed := samples.changed()) is not None:  # through `p.data`, which has no version
                return f"{self._name(changed)} was changed {fix}"
        for p in parameters:
            if p.grad is not None and p.grad.is_sparse:
                return f"the gradient of {self._name(p)} is sparse; set sparse=False"
        return None

    def _remember(self, optimizer: Optimizer) -> None:
        """Remember the state, and versions and samples of the parameters, after a step."""
        self._known = {p: dict(entry) for p, entry in optimizer.state.items()}
        self._versions = [
            (p, t, version_of(t))
            for p in self._homes
            for t in (p, *self._known.get(p, {}).values())
            if t is not None
        ]
        for samples in self._samples:
            samples.take()

    def _knows_state(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer.state` is what the last step has left there."""
        now, before = (
            {p: {key: id(value) for key, value in entry.items()} for p, entry in state.items()}
            for state in (optimizer.state, self._known)
        )
        return now == before

    def _name(self, p: Tensor) -> str:
        return self._names.get(p, f"a parameter of shape {tuple(p.shape)}")

    # Parameters in shared memory

    def _share(self, parameters: list[Tensor]) -> None:
        """Move parameters into shared memory, and give each rank its share. Collective.

        They must be equal on all ranks.
        """
        homes, words, places = self._host.allocate(parameters)
        storages = [p.untyped_storage().data_ptr() for p in parameters if p.numel()]
        problem = ""
        if len(set(storages)) < len(storages):
            problem = "two parameters are views of one tensor; give each its own memory"
        if self._host.rank == 0:
            for p, home in zip(parameters, homes, strict=True):
                home.copy_(p.detach())
        mine = [hashlib.blake2b(bits(p).numpy().data).digest() for p in parameters]
        everyone = self._group.all_gather_object((problem, mine))
        for rank, (found, digests) in enumerate(everyone):
            if found:
                refuse(found)
            for p, digest, first in zip(parameters, digests, everyone[0][1], strict=True):
                if digest != first:
                    refuse(
                        f"{self._name(p)} differs between rank 0 and rank {rank}; broadcast the "
                        "parameters before the first step"
                    )
        for p, home in zip(parameters, homes, strict=True):
            p.data = home
            self._homes[p] = home
        self._samples.append(Samples(words, places, parameters))
        self._add_pieces(parameters)

    def _add_pieces(self, parameters: list[Tensor]) -> None:
        """Find this rank's share of its host: equal numbers of chunks of 64 elements, in a row."""
        chunks = [max(1, -(-p.numel() // _CUT)) for p in parameters]
        rank, size = self._host.rank, self._host.size
        low, high = (sum(chunks) * k // size for k in (rank, rank + 1))
        first = 0
        for p, num in zip(parameters, chunks, strict=True):
            begin = max(low - first, 0) * _CUT
            end = min((high - first) * _CUT, p.numel())
            if low <= first and first + num <= high:
                self._pieces[p] = p, 0, p.numel()
            elif begin < end:
                self._pieces[p] = flat(self._homes[p])[begin:end], begin, end
            first += num

    # The optimizer's state in shared memory

    def _divide_state(self, optimizer: Optimizer) -> None:
        """Take this rank's part of the state that was loaded, or made by the constructor."""
        self._own_state, self._own_known = defaultdict(dict), {}
        for p, entry in optimizer.state.items():
            if p in self._pieces:
                piece, begin, end = self._pieces[p]
                for key, value in entry.items():
                    if isinstance(value, Tensor) and piece is not p:
                        is_by_element = value.shape == p.shape
                        value = self._flat_like(p, value)[begin:end] if is_by_element else value
                        value = value.clone()
                    self._own_state[piece][key] = value

    def _flat_like(self, p: Tensor, value: Tensor) -> Tensor:
        """Return the elements of `value` in the order in which the parameter's lie in memory."""
        home = self._homes[p]
        if value.stride() != home.stride():
            value = torch.empty_like(home).copy_(value)
        return flat(value.detach())

    def _new_state(self) -> dict[tuple[int, str], Tensor]:
        """Return meta tensors, of the whole parameter, for this rank's state that is not in shared
        memory, by the number of the parameter and the name.
        """
        found = {}
        for number, p in enumerate(self._homes):
            if p not in self._pieces or (piece := self._pieces[p][0]) not in self._own_state:
                continue
            known = self._own_known.get(piece, {})
            for key, value in self._own_state[piece].items():
                if value is not known.get(key):
                    if not isinstance(value, Tensor):
                        kind = type(value).__name__
                        refuse(f"the state {key!r} is not a tensor but of type {kind}")
                    is_part = piece is not p and value.shape == piece.shape
                    like = self._homes[p] if is_part else value
                    found[number, key] = torch.empty_like(like, dtype=value.dtype, device="meta")
        return found

    def _share_state(self, optimizer: Optimizer) -> None:
        """Move new state into shared memory, and show all of it to the host's ranks. Collective."""
        gathered = self._group.all_gather_object(self._new_state())
        everyone = [gathered[rank] for rank in self._host.ranks]
        owners: dict[tuple[int, str], int] = {}
        for rank, found in enumerate(everyone):
            for which in found:
                owners.setdefault(which, rank)
        order = sorted(owners, key=lambda which: which[0])  # stable: names in the order of `step`
        homes, _, _ = self._host.allocate([everyone[owners[which]][which] for which in order])
        parameters = list(self._homes)
        for which, home in zip(order, homes, strict=True):
            # One object for each name, as in the plain state: torch.save writes the same bytes.
            p, key = parameters[which[0]], sys.intern(which[1])
            optimizer.state[p][key] = home
            if which in everyone[self._host.rank]:
                self._move(p, key, home, owners[which] == self._host.rank)

    def _move(self, p: Tensor, key: str, home: Tensor, is_first: bool) -> None:
        """Move one tensor of this rank's state. A number, such as the count of steps, is shown by
        the first rank that has a piece of the parameter; the others keep their own.
        """
        piece, begin, end = self._pieces[p]
        value = self._own_state[piece][key]
        if value.shape == piece.shape:
            target = home if piece is p else flat(home)[begin:end]
        else:
            target = home if is_first else value
        if target is not value:
            target.copy_(value)
        self._own_state[piece][key] = target
        self._own_known.setdefault(piece, {})[key] = target

    def unshare(self, optimizer: Optimizer) -> None:
        """Copy parameters and state to this rank's own memory. Not collective."""
        self.check_complete()
        for p, home in self._homes.items():
            if p.data_ptr() == home.data_ptr():
                p.data = home.clone()
        for p, entry in optimizer.state.items():
            for key, value in entry.items():
                if p in self._homes and isinstance(value, Tensor):
                    entry[key] = value.clone()
        self._forget()
