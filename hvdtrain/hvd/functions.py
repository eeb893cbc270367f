"""Broadcast parameters, optimizer state and objects from one rank; all-gather objects.

Used by scripts, the compat backend and `elastic`. A rank that fails says so instead of sending its
data, before it raises, so that every rank raises and none blocks. An optimizer's state is sent so:

    root                              other ranks
    object: content             --->  check it against this rank's parameters
    all-gather "fits"          <--->  all-gather "fits"; all raise unless it fits everywhere
    tensor i = 0, 1, ...        --->  received in place, or into new tensors
                                      install options and state
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.hvd.basics import basics
from hvdtrain.hvd.mpi_ops import (
    ProcessSet,
    broadcast_,
    broadcast_async_,
    global_process_set,
    grouped_allgather,
    rank,
    synchronize,
)
from hvdtrain.job.job_secret import sign, unsign
from hvdtrain.system.trees import map_tree, parameters_of


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the tensors of all ranks with those of rank `root_rank`. Collective.

    `params` is a dict, whose keys are the names and whose order does not matter, or an iterable of
    tensors or (name, tensor) pairs. Any dtype. Blocks until all are received. Raises ValueError for
    anything else, and for a name given twice.
    """
    named: list[tuple[str | None, Any]]
    if isinstance(params, Mapping):
        named = sorted(params.items())  # the ranks' dicts may have different orders
    elif isinstance(params, Iterable) and not isinstance(params, Tensor | str | bytes):
        named = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    names = set()
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"params must be tensors: {name or 'an item'} is a {type(tensor)}")
        if name is not None and name in names:
            raise ValueError(f"two of params have the same name: {name}")
        names.add(name)
    _broadcast_all(named, root_rank, process_set)


def _broadcast_all(
    named: Iterable[tuple[str | None, Tensor]], root_rank: int, process_set: ProcessSet
) -> None:
    """Broadcast all tensors concurrently. None is written to after this returns or raises."""
    with ExitStack() as pending:  # which waits for all, even after an error
        for name, tensor in named:
            handle = broadcast_async_(tensor, root_rank, name, process_set)
            pending.callback(synchronize, handle)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of rank `root_rank`, sent with cloudpickle and signed. Collective.

    The root gets `obj` itself, other ranks a copy; their own `obj` is ignored. The default name
    does not depend on the object, so ranks may pass different types, or None. Raises on every rank
    if the root's object cannot be pickled.
    """
    name, is_root = name or "broadcast_object", rank() == root_rank
    payload, failure = _pickled(obj if is_root else None)
    num_bytes = torch.tensor([payload.numel()], device="cpu")
    broadcast_(num_bytes, root_rank, f"{name}.sz", process_set)
    if not is_root:
        payload = torch.empty(int(num_bytes), dtype=torch.uint8, device="cpu")
    broadcast_(payload, root_rank, f"{name}.t", process_set)
    if failure is not None:
        raise failure
    return obj if is_root else _unpickled(payload, f"{name}: the object of rank {root_rank}")


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks in rank order, sent with cloudpickle and signed. Collective.

    Raises on every rank if one rank's object cannot be pickled.
    """
    name = name or "allgather_object"
    payload, failure = _pickled(obj)
    num_bytes = torch.tensor([payload.numel()], device="cpu")
    sizes, gathered = grouped_allgather([num_bytes, payload], name, process_set)
    if failure is not None:
        raise failure
    parts = enumerate(torch.split(gathered, sizes.tolist()))
    return [_unpickled(part, f"{name}: the object of rank {i} of the set") for i, part in parts]


class _Unpicklable:
    """Sent in place of an object that cannot be pickled."""


def _pickled(obj: Any) -> tuple[Tensor, Exception | None]:
    """Return an object's pickle to send, and the error: if the caller raised at once, peers would
    block.
    """
    failure = None
    try:
        data = sign(obj, cloudpickle.dumps)
    except Exception as error:
        data, failure = sign(_Unpicklable()), error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), failure


def _unpickled(data: Tensor, what: str) -> Any:
    obj = unsign(data.numpy(), what)
    if isinstance(obj, _Unpicklable):
        raise RuntimeError(f"{what} cannot be pickled")
    return obj


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the state and options of all ranks with those of rank `root_rank`. Collective.

    No step is made: a rank without state gets the root's, and a rank with state loses it if the
    root has none. On a rank without state, missing gradients become zeros, as scripts expect of
    Horovod. Options (the learning rate) are always sent, and keep their types. Tensors of the same
    shape, dtype and device are written in place. The optimizer may be wrapped or plain. `model`
    shows which gradients are sparse.

    With HVDTRAIN_EXACT_HOROVOD=1 a rank without state steps on zero gradients, which changes
    weights and step counts, and no options are sent if that step creates no state.

    Raises ValueError for LBFGS, and on every rank if one rank's parameters differ from the root's.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    if not optimizer.state:
        _leave_zeros(optimizer, model)
        if basics.is_exact:
            wrapped = hasattr(optimizer, "skip_synchronize")  # its own step is collective
            alone: Any = super(type(optimizer), optimizer) if wrapped else optimizer
            alone.step()
            if not optimizer.state:
                return
    name, is_root = "broadcast_optimizer_state", rank() == root_rank
    tensors: list[Tensor] = []
    content = _content_of(optimizer, tensors) if is_root else None
    content = broadcast_object(content, root_rank, name, process_set)
    failure = None
    if not is_root:
        try:
            content = _with_own_tensors(optimizer, content, tensors)
        except Exception as error:
            failure = error
    # A rank with other parameters reports that first: if it raised alone, its peers would block.
    fits = allgather_object(failure is None, f"{name}.fits", process_set)
    if failure is not None:
        raise failure
    if not all(fits):
        bad = fits.index(False)
        raise ValueError(f"the optimizer of rank {bad} of the set does not fit that of {root_rank}")
    named = [(f"{name}.{i}", tensor.detach()) for i, tensor in enumerate(tensors)]
    _broadcast_all(named, root_rank, process_set)
    if not is_root:
        for group, options in zip(optimizer.param_groups, content.options, strict=True):
            group.update(options)
        states = zip(parameters_of(optimizer), content.states, strict=True)
        optimizer.state.clear()
        optimizer.state.update({p: state for p, state in states if state is not None})
        optimizer.state.update(content.other)


def _leave_zeros(optimizer: Optimizer, model: torch.nn.Module | None) -> None:
    """Set missing gradients to zeros; in exact mode all gradients, as Horovod does."""
    modules = (
        model.modules() if model is not None and isinstance(optimizer, torch.optim.SGD) else ()
    )
    sparse = {m.weight for m in modules if isinstance(m, torch.nn.Embedding) and m.sparse}
    for p in parameters_of(optimizer):
        if p.requires_grad and (p.grad is None or basics.is_exact):
            is_sparse = p in sparse or isinstance(optimizer, torch.optim.SparseAdam)
            p.grad = torch.zeros_like(p).to_sparse(1) if is_sparse else torch.zeros_like(p)


class _Placeholder(NamedTuple):
    """Placeholder for a tensor that is sent separately. `device` None: that of its parameter."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device | None


class _Content(NamedTuple):
    """The content of an optimizer, with placeholders for its tensors.

    `layout`: the parameters' shapes by group. `options`: by group. `states`: by parameter, None if
    it has no state. `other`: entries of the state whose key is no parameter.
    """

    layout: list[list[torch.Size]]
    options: list[dict[str, Any]]
    states: list[dict[Any, Any] | None]
    other: dict[Any, Any]


def _layout(optimizer: Optimizer) -> list[list[torch.Size]]:
    return [[p.shape for p in group["params"]] for group in optimizer.param_groups]


def _homes(optimizer: Optimizer) -> list[torch.device | None]:
    """Return the device of each group's parameters."""
    groups = [group["params"] for group in optimizer.param_groups]
    return [params[0].device if params else None for params in groups]


def _content_of(optimizer: Optimizer, tensors: list[Tensor]) -> _Content:
    """Return the content of an optimizer, and add its tensors to `tensors`."""

    def replaced(values: Mapping[Any, Any], home: torch.device | None) -> Any:
        def replace(tensor: Tensor) -> object:
            if tensor.layout != torch.strided:
                return tensor.detach().cpu()  # pickled by value, as such state is rare
            tensors.append(tensor)
            device = None if tensor.device == home else tensor.device
            return _Placeholder(tensor.shape, tensor.dtype, device)

        return map_tree(replace, Tensor, dict(values), keep_dict_types=True)

    groups, state = optimizer.param_groups, optimizer.state
    options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
    return _Content(
        _layout(optimizer),
        [replaced(*both) for both in zip(options, _homes(optimizer), strict=True)],
        [replaced(state[p], p.device) if p in state else None for p in parameters_of(optimizer)],
        replaced({k: v for k, v in state.items() if not isinstance(k, Tensor)}, None),
    )


def _with_own_tensors(optimizer: Optimizer, content: _Content, tensors: list[Tensor]) -> _Content:
    """Return the content with tensors of this rank for the placeholders, also added to `tensors`,
    in the root's order.

    The broadcast then fills them. Raises ValueError if this rank's parameters differ from the
    root's.
    """
    _check_layout(content.layout, _layout(optimizer))

    def received(
        values: dict[Any, Any], present: Mapping[Any, Any], home: torch.device | None
    ) -> dict[Any, Any]:
        def fill(own: Any, blank: _Placeholder) -> Tensor:
            tensor = torch.empty(blank.shape, dtype=blank.dtype, device=blank.device or home)
            # Write in place where possible: scripts may hold references to the state's tensors.
            if isinstance(own, Tensor) and _kind(own) == _kind(tensor):
                tensor = own
            tensors.append(tensor)
            return tensor

        return {
            key: map_tree(
                partial(fill, present.get(key)), _Placeholder, value, keep_dict_types=True
            )
            for key, value in values.items()
        }

    groups, state = optimizer.param_groups, optimizer.state
    options = zip(content.options, groups, _homes(optimizer), strict=True)
    states = zip(content.states, parameters_of(optimizer), strict=True)
    return content._replace(
        options=[received(*row) for row in options],
        states=[values and received(values, state.get(p, {}), p.device) for values, p in states],
        other=received(content.other, {}, None),
    )


def _kind(t: Tensor) -> tuple[object, ...]:
    return t.layout, t.shape, t.dtype, t.device


def _check_layout(theirs: list[list[torch.Size]], own: list[list[torch.Size]]) -> None:
    on_root, here = ([len(group) for group in groups] for groups in (theirs, own))
    if on_root != here:
        raise ValueError(
            f"the optimizers differ in their numbers of parameters by group: {on_root} on the "
            f"root, {here} on this rank"
        )
    shapes = zip(sum(theirs, []), sum(own, []), strict=True)
    for i, (root_shape, shape) in enumerate(shapes):
        if root_shape != shape:
            raise ValueError(
                f"parameter {i} of the optimizer is {tuple(root_shape)} on the root, "
                f"{tuple(shape)} on this rank"
            )
