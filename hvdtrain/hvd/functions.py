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
from hvdtrain.optim.model_sync import with_sparse_gradients
from hvdtrain.system.trees import map_tree, parameters_of


def broadcast_parameters(
    params: Mapping[str, Tensor] | Iterable[Tensor | tuple[str, Tensor]],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the tensors of all ranks with those of rank `root_rank`. Collective.

    `params` is a dict, whose keys are the names and whose order does not matter, or an iterable of
    tensors or (name, tensor) pairs. Any dtype. Blocks until all are received. Raises ValueError for
    anything else.
    """
    named: list[tuple[str | None, Any]]
    if isinstance(params, Mapping):
        named = sorted(params.items())  # the ranks' dicts may have different orders
    elif isinstance(params, Iterable) and not isinstance(params, Tensor | str | bytes):
        named = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"params must be tensors: {name or 'an item'} is a {type(tensor)}")
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


def _pickled(obj: Any) -> tuple[Tensor, Exception | None]:
    """Return a pickle of `[obj]` to send. If that fails: one of `[]`, and the error, which the
    caller raises once it is sent, or peers would block.
    """
    failure = None
    try:
        data = sign([obj], cloudpickle.dumps)
    except Exception as error:
        data, failure = sign([]), error
    return torch.frombuffer(bytearray(data), dtype=torch.uint8), failure


def _unpickled(data: Tensor, what: str) -> Any:
    found = unsign(data.numpy(), what)
    if not found:
        raise RuntimeError(f"{what} cannot be pickled")
    return found[0]


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
    params = parameters_of(optimizer)
    content = optimizer.param_groups, list(optimizer.state.items())
    sent = broadcast_object(_with_placeholders(content, params), root_rank, name, process_set)
    failure = None
    if not is_root:
        try:
            content = _with_own_tensors(sent, optimizer, params)
        except Exception as error:
            failure = error
    # A rank with other parameters reports that first: if it raised alone, its peers would block.
    fits = allgather_object(failure is None, f"{name}.fits", process_set)
    if failure is not None:
        raise failure
    if not all(fits):
        bad = fits.index(False)
        raise ValueError(
            f"rank {bad} of the process set has an optimizer that differs from rank {root_rank}'s"
        )
    tensors: list[Tensor] = []
    map_tree(tensors.append, Tensor, content)
    skipped = set(params)
    separate = [t for t in tensors if t.layout == torch.strided and t not in skipped]
    named = [(f"{name}.{i}", t.detach()) for i, t in enumerate(separate)]
    _broadcast_all(named, root_rank, process_set)
    if not is_root:
        groups, state = content
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        optimizer.state.clear()
        optimizer.state.update(state)


def _leave_zeros(optimizer: Optimizer, model: torch.nn.Module | None) -> None:
    """Set missing gradients to zeros; in exact mode all gradients, as Horovod does."""
    sparse = set() if model is None else {*with_sparse_gradients(model)}
    for p in parameters_of(optimizer):
        if p.requires_grad and (p.grad is None or basics.is_exact):
            is_sparse = p in sparse or isinstance(optimizer, torch.optim.SparseAdam)
            p.grad = torch.zeros_like(p).to_sparse(1) if is_sparse else torch.zeros_like(p)


# Groups of parameters with their options, and pairs of a key, which mostly is a parameter, and its
# state.
_Content = tuple[list[dict[str, Any]], list[tuple[Any, Any]]]


class _Placeholder(NamedTuple):
    """Placeholder for a tensor that is sent separately, or for a parameter, which has no `dtype`.

    `device`: a device, or the index of a parameter that is on it.
    """

    shape: torch.Size
    dtype: torch.dtype | None
    device: torch.device | int


def _with_placeholders(content: _Content, params: list[Tensor]) -> Any:
    """Return a content without tensors except sparse ones, which are rare."""
    index = {p: i for i, p in enumerate(params)}
    homes = {p.device: i for p, i in index.items()}

    def replace(tensor: Tensor) -> object:
        if tensor in index:
            return _Placeholder(tensor.shape, None, index[tensor])
        if tensor.layout != torch.strided:
            return tensor.detach().cpu()
        return _Placeholder(tensor.shape, tensor.dtype, homes.get(tensor.device, tensor.device))

    return map_tree(replace, Tensor, content, keep_dict_types=True)


def _with_own_tensors(sent: Any, optimizer: Optimizer, params: list[Tensor]) -> _Content:
    """Return the content with tensors of this rank for the placeholders, for the broadcast to fill.

    Raises ValueError if this rank's parameters differ from the root's.
    """
    both = sent[0], optimizer.param_groups
    on_root, here = ([len(group["params"]) for group in groups] for groups in both)
    if on_root != here:
        raise ValueError(
            f"the optimizers have different numbers of parameters per group: {on_root} on the "
            f"root, {here} on this rank"
        )

    def fill(blank: _Placeholder) -> Tensor:
        shape, dtype, device = blank
        p = params[device] if isinstance(device, int) else None
        if p is None or dtype is not None:
            return torch.empty(shape, dtype=dtype, device=device if p is None else p.device)
        if p.shape != shape:
            raise ValueError(
                f"parameter {device} of the optimizer is {tuple(shape)} on the root, "
                f"{tuple(p.shape)} on this rank"
            )
        return p

    groups, state = map_tree(fill, _Placeholder, sent, keep_dict_types=True)
    for values, group in zip(groups, optimizer.param_groups, strict=True):
        _keep_own(values, group)
    for key, values in state:
        _keep_own(values, optimizer.state.get(key))
    return groups, state


def _keep_own(values: Any, own: Any) -> None:
    """Write in place where possible: scripts may hold references to tensors of the state."""
    if isinstance(values, dict) and isinstance(own, dict):
        for key, value in values.items():
            if (kind := _kind(value)) is not None and kind == _kind(own.get(key)):
                values[key] = own[key]


def _kind(value: Any) -> tuple[object, ...] | None:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    return value.shape, value.dtype, value.device
