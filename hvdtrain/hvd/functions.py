"""Making all ranks equal to one: parameters, optimizer state, any object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.mpi_ops import (
    ProcessSet,
    allgather,
    broadcast_,
    broadcast_async_,
    global_process_set,
    rank,
    synchronize,
)

_UNPICKLABLE = -1


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Make the tensors of all ranks equal to those of the rank `root_rank`. Collective, in place.

    `params` is a dict, whose keys are the names and whose order does not matter, or an iterable of
    tensors or (name, tensor) pairs. Any dtype. Returns when all have arrived. Raises ValueError
    for anything else, and for a name given twice.
    """
    named: list[tuple[str | None, Any]]
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, Tensor | str | bytes):
        named = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    taken = set()
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"params must be tensors: {name or 'one'} is a {type(tensor)}")
        if name is not None and name in taken:
            raise ValueError(f"two of params have the same name: {name}")
        taken.add(name)
    _broadcast_all(named, root_rank, process_set)


def _broadcast_all(
    named: Sequence[tuple[str | None, Tensor]], root_rank: int, process_set: ProcessSet
) -> None:
    """Broadcast all at once. Nothing is written to any more when this returns or raises."""
    handles = []
    try:
        for name, tensor in named:
            handles.append(broadcast_async_(tensor, root_rank, name, process_set))
    finally:
        failure: Exception | None = None
        for handle in handles:
            try:
                synchronize(handle)
            except Exception as error:
                failure = failure or error
    if failure is not None:
        raise failure


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of the rank `root_rank`, by cloudpickle. Collective.

    The others' `obj` is ignored. The root gets its own object back, the others a copy. The name
    does not depend on the object, so that ranks may pass different types, or None. Raises on every
    rank where the root's object cannot be pickled.
    """
    payload, failure = _pickled(obj) if rank() == root_rank else (None, None)
    payload = _broadcast_bytes(payload, failure, root_rank, name or "broadcast_object", process_set)
    return obj if rank() == root_rank else cloudpickle.loads(payload)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks, in rank order, by cloudpickle. Collective.

    Raises on every rank where one rank's object cannot be pickled.
    """
    name = name or "allgather_object"
    payload, failure = _pickled(obj)
    num_bytes = torch.tensor([_UNPICKLABLE if payload is None else payload.numel()])
    sizes = allgather(num_bytes, name + ".sz", process_set).tolist()
    if failure is not None:
        raise failure
    if _UNPICKLABLE in sizes:
        bad = sizes.index(_UNPICKLABLE)
        raise RuntimeError(f"{name}: the object of rank {bad} of the set cannot be pickled")
    assert payload is not None
    gathered = allgather(payload, name + ".t", process_set)
    return [cloudpickle.loads(part.numpy()) for part in torch.split(gathered, sizes)]


def _pickled(obj: Any) -> tuple[Tensor | None, Exception | None]:
    """An object's bytes, or why it has none: raising at once would leave the others waiting."""
    try:
        return torch.frombuffer(bytearray(cloudpickle.dumps(obj)), dtype=torch.uint8), None
    except Exception as error:
        return None, error


def _broadcast_bytes(
    payload: Tensor | None,
    failure: Exception | None,
    root_rank: int,
    name: str,
    process_set: ProcessSet,
) -> Any:
    """Return the root's bytes, or raise where it has none."""
    size = torch.tensor([_UNPICKLABLE if payload is None else payload.numel()])
    num_bytes = int(broadcast_(size, root_rank, name + ".sz", process_set).item())
    if failure is not None:
        raise failure
    if num_bytes == _UNPICKLABLE:
        raise RuntimeError(f"{name}: the object of rank {root_rank} cannot be pickled")
    if payload is None:
        payload = torch.empty(num_bytes, dtype=torch.uint8)
    return broadcast_(payload, root_rank, name + ".t", process_set).numpy()


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Make the state and the options of all ranks equal to those of `root_rank`. Collective.

    No step is made: a rank without state gets the root's, and a rank with state loses it where the
    root has none. A rank without state finds zeros in the place of missing gradients afterwards, as
    scripts expect of Horovod. Options (the learning rate) are sent in any case, and keep their
    types. Tensors of the same shape, dtype and device are written in place. A wrapped optimizer
    does as well as a plain one. `model` tells which gradients are sparse.

    With HVDTRAIN_EXACT_HOROVOD=1 a rank without state steps on zero gradients, which moves weights
    and counts, and no options are sent where that makes no state.

    Raises ValueError for LBFGS, and on every rank where the parameters do not fit.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state:
        _leave_zeros(optimizer, model)
        if basics.is_exact:
            wrapped = hasattr(optimizer, "skip_synchronize")  # whose own step is collective
            alone: Any = super(type(optimizer), optimizer) if wrapped else optimizer
            alone.step()
            if not optimizer.state:
                return
    name = "broadcast_optimizer_state"
    is_root = rank() == root_rank
    tensors: _Tensors = {}
    payload, failure = _pickled(_plan(optimizer, tensors)) if is_root else (None, None)
    data = _broadcast_bytes(payload, failure, root_rank, name, process_set)
    if not is_root:
        try:
            plan = _prepared(optimizer, cloudpickle.loads(data), tensors)
        except Exception as error:
            failure = error
    # A rank that the state does not fit must not leave the others waiting for it.
    fits = allgather(torch.tensor([int(failure is None)]), name + ".fits", process_set).tolist()
    if failure is not None:
        raise failure
    if not all(fits):
        bad = fits.index(0)
        raise ValueError(f"the optimizer of rank {bad} of the set does not fit that of {root_rank}")
    named = [(f"{name}.{i}", tensor.detach()) for i, tensor in sorted(tensors.items())]
    _broadcast_all(named, root_rank, process_set)
    if not is_root:
        _install(optimizer, plan)


def _leave_zeros(optimizer: Optimizer, model: torch.nn.Module | None) -> None:
    """Make the gradients zeros that are missing; all of them in exact mode, as Horovod does."""
    modules = (
        model.modules() if model is not None and isinstance(optimizer, torch.optim.SGD) else ()
    )
    sparse = {m.weight for m in modules if isinstance(m, torch.nn.Embedding) and m.sparse}
    for p in _parameters(optimizer):
        if p.requires_grad and (p.grad is None or basics.is_exact):
            is_sparse = p in sparse or isinstance(optimizer, torch.optim.SparseAdam)
            p.grad = torch.zeros_like(p).to_sparse(1) if is_sparse else torch.zeros_like(p)


@dataclass(frozen=True)
class _Blank:
    """Stands for a tensor that travels by itself; `device` is None beside its parameter."""

    index: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device | None


_Tensors = dict[int, Tensor]  # by the index of their blanks


@dataclass(frozen=True)
class _Plan:
    """What an optimizer holds, with blanks for its tensors.

    `options` by group, `state` by the index of the parameter, `other` what state has besides.
    """

    layout: list[list[torch.Size]]
    options: list[dict[str, Any]]
    state: dict[int, dict[Any, Any]]
    other: dict[Any, Any]


def _layout(optimizer: Optimizer) -> list[list[torch.Size]]:
    return [[p.shape for p in group["params"]] for group in optimizer.param_groups]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _plan(optimizer: Optimizer, tensors: _Tensors) -> _Plan:
    """Describe an optimizer, and put its tensors into `tensors`."""

    def blanked(values: Any, beside: Sequence[Tensor]) -> Any:
        def blank(tensor: Tensor) -> object:
            if tensor.layout != torch.strided:
                return tensor.detach().cpu()  # by value: such state is rare
            index = len(tensors)
            tensors[index] = tensor
            home = beside[0].device if beside else None
            device = None if tensor.device == home else tensor.device
            return _Blank(index, tensor.shape, tensor.dtype, device)

        return tree_map_only(Tensor, blank, values)

    params = _parameters(optimizer)
    return _Plan(
        _layout(optimizer),
        [
            blanked({k: v for k, v in group.items() if k != "params"}, group["params"])
            for group in optimizer.param_groups
        ],
        {
            i: blanked(dict(optimizer.state[p]), [p])
            for i, p in enumerate(params)
            if p in optimizer.state
        },
        {k: blanked(v, []) for k, v in optimizer.state.items() if not isinstance(k, Tensor)},
    )


def _prepared(optimizer: Optimizer, plan: _Plan, tensors: _Tensors) -> _Plan:
    """Put tensors of this rank in the place of the blanks, and into `tensors`, to be filled.

    Raises ValueError where this rank has other parameters than the root.
    """
    _check_layout(plan.layout, _layout(optimizer))

    def filled(values: Any, present: Mapping[Any, Any], beside: Sequence[Tensor]) -> Any:
        home = beside[0].device if beside else torch.device("cpu")

        def fill(blank: _Blank, own: object = None) -> Tensor:
            tensor = torch.empty(blank.shape, dtype=blank.dtype, device=blank.device or home)
            if isinstance(own, Tensor) and _alike(own, tensor):
                tensor = own
            tensors[blank.index] = tensor
            return tensor

        if isinstance(values, dict):
            values = {
                key: fill(value, present.get(key)) if isinstance(value, _Blank) else value
                for key, value in values.items()
            }
        return tree_map_only(_Blank, fill, values)

    params = _parameters(optimizer)
    groups = optimizer.param_groups
    return _Plan(
        plan.layout,
        [filled(v, g, g["params"]) for v, g in zip(plan.options, groups, strict=True)],
        {
            i: filled(values, optimizer.state.get(params[i], {}), [params[i]])
            for i, values in plan.state.items()
        },
        {key: filled(value, {}, []) for key, value in plan.other.items()},
    )


def _alike(a: Tensor, b: Tensor) -> bool:
    mine, other = ((t.layout, t.shape, t.dtype, t.device) for t in (a, b))
    return mine == other


def _check_layout(theirs: list[list[torch.Size]], own: list[list[torch.Size]]) -> None:
    counts = [[len(group) for group in groups] for groups in (theirs, own)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"the optimizers differ in their numbers of parameters by group: {counts[0]} on the "
            f"root, {counts[1]} on this rank"
        )
    pairs = zip(
        (shape for group in theirs for shape in group),
        (shape for group in own for shape in group),
        strict=True,
    )
    for i, (on_root, here) in enumerate(pairs):
        if on_root != here:
            raise ValueError(
                f"parameter {i} of the optimizer is {tuple(on_root)} on the root, {tuple(here)} on "
                "this rank"
            )


def _install(optimizer: Optimizer, plan: _Plan) -> None:
    """Make the optimizer hold what the plan, by now with values, says."""
    for group, options in zip(optimizer.param_groups, plan.options, strict=True):
        group.update(options)
    state: dict[Any, Any] = {
        **{p: plan.state[i] for i, p in enumerate(_parameters(optimizer)) if i in plan.state},
        **plan.other,
    }
    optimizer.state.clear()
    optimizer.state.update(state)
