"""Broadcast parameters, optimizer state and objects from one rank; all-gather objects.

Used by scripts, the compat backend and `elastic`. A rank that fails sends a flag instead of its
data before it raises, so that every rank raises and none blocks. An optimizer's state is sent so:

    root                              other ranks
    size, then pickled content  --->  check it against this rank's parameters
    all-gather "fits"          <--->  all-gather "fits"; all raise unless it fits everywhere
    tensor i = 0, 1, ...        --->  received in place, or into new tensors
                                      install options and state
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import Tensor
from torch.optim import Optimizer

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
from hvdtrain.job.job_secret import sign, unsign
from hvdtrain.system.trees import map_tree

_UNPICKLABLE = -1  # sent in place of the size


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
    named: Sequence[tuple[str | None, Tensor]], root_rank: int, process_set: ProcessSet
) -> None:
    """Broadcast all tensors concurrently. None is written to after this returns or raises."""
    handles = []
    try:
        for name, tensor in named:
            handles.append(broadcast_async_(tensor, root_rank, name, process_set))
    finally:
        # Wait for all even after an error: a pending operation would write to its tensor later.
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
    """Return the object of rank `root_rank`, sent with cloudpickle and signed. Collective.

    The root gets `obj` itself, other ranks a copy; their own `obj` is ignored. The default name
    does not depend on the object, so ranks may pass different types, or None. Raises on every rank
    if the root's object cannot be pickled.
    """
    payload, failure = _pickled(obj) if rank() == root_rank else (None, None)
    payload = _broadcast_bytes(payload, failure, root_rank, name or "broadcast_object", process_set)
    return obj if rank() == root_rank else unsign(payload, f"rank {root_rank}")


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return the objects of all ranks in rank order, sent with cloudpickle and signed. Collective.

    Raises on every rank if one rank's object cannot be pickled.
    """
    name = name or "allgather_object"
    payload, failure = _pickled(obj)
    num_bytes = _size_of(payload)
    sizes = allgather(num_bytes, name + ".sz", process_set).tolist()
    if failure is not None:
        raise failure
    if _UNPICKLABLE in sizes:
        bad = sizes.index(_UNPICKLABLE)
        raise RuntimeError(f"{name}: the object of rank {bad} of the set cannot be pickled")
    assert payload is not None
    gathered = allgather(payload, name + ".t", process_set)
    return [unsign(part.numpy()) for part in torch.split(gathered, sizes)]


def _pickled(obj: Any) -> tuple[Tensor | None, Exception | None]:
    """Return an object's pickle, or the error: if the caller raised at once, peers would block."""
    try:
        return torch.frombuffer(bytearray(sign(obj, cloudpickle.dumps)), dtype=torch.uint8), None
    except Exception as error:
        return None, error


def _size_of(payload: Tensor | None) -> Tensor:
    num_bytes = _UNPICKLABLE if payload is None else payload.numel()
    return torch.tensor([num_bytes], device="cpu")


def _broadcast_bytes(
    payload: Tensor | None,
    failure: Exception | None,
    root_rank: int,
    name: str,
    process_set: ProcessSet,
) -> Any:
    """Return the root's bytes. Raises on every rank if the root has none. Collective."""
    num_bytes = int(broadcast_(_size_of(payload), root_rank, name + ".sz", process_set).item())
    if failure is not None:
        raise failure
    if num_bytes == _UNPICKLABLE:
        raise RuntimeError(f"{name}: the object of rank {root_rank} cannot be pickled")
    if payload is None:
        payload = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return broadcast_(payload, root_rank, name + ".t", process_set).numpy()


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
    name = "broadcast_optimizer_state"
    is_root = rank() == root_rank
    tensors: _Tensors = {}
    payload, failure = _pickled(_content_of(optimizer, tensors)) if is_root else (None, None)
    data = _broadcast_bytes(payload, failure, root_rank, name, process_set)
    if not is_root:
        try:
            content = _with_own_tensors(optimizer, unsign(data, f"rank {root_rank}"), tensors)
        except Exception as error:
            failure = error
    # A rank with other parameters reports that first: if it raised alone, its peers would block.
    is_fit = torch.tensor([int(failure is None)], device="cpu")
    fits = allgather(is_fit, name + ".fits", process_set).tolist()
    if failure is not None:
        raise failure
    if not all(fits):
        bad = fits.index(0)
        raise ValueError(f"the optimizer of rank {bad} of the set does not fit that of {root_rank}")
    named = [(f"{name}.{i}", tensor.detach()) for i, tensor in sorted(tensors.items())]
    _broadcast_all(named, root_rank, process_set)
    if not is_root:
        _install(optimizer, content)


def _leave_zeros(optimizer: Optimizer, model: torch.nn.Module | None) -> None:
    """Set missing gradients to zeros; in exact mode all gradients, as Horovod does."""
    modules = (
        model.modules() if model is not None and isinstance(optimizer, torch.optim.SGD) else ()
    )
    sparse = {m.weight for m in modules if isinstance(m, torch.nn.Embedding) and m.sparse}
    for p in _parameters(optimizer):
        if p.requires_grad and (p.grad is None or basics.is_exact):
            is_sparse = p in sparse or isinstance(optimizer, torch.optim.SparseAdam)
            p.grad = torch.zeros_like(p).to_sparse(1) if is_sparse else torch.zeros_like(p)


@dataclass(frozen=True)
class _Placeholder:
    """Placeholder for a tensor that is sent separately. `device` None: that of its parameter."""

    index: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device | None


_Tensors = dict[int, Tensor]  # by the index of their placeholders


@dataclass(frozen=True)
class _Content:
    """The content of an optimizer, with placeholders for its tensors.

    `layout`: the parameters' shapes by group. `options`: by group. `state`: by parameter index.
    `other`: entries of the state whose key is no parameter.
    """

    layout: list[list[torch.Size]]
    options: list[dict[str, Any]]
    state: dict[int, dict[Any, Any]]
    other: dict[Any, Any]


def _layout(optimizer: Optimizer) -> list[list[torch.Size]]:
    return [[p.shape for p in group["params"]] for group in optimizer.param_groups]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _content_of(optimizer: Optimizer, tensors: _Tensors) -> _Content:
    """Return the content of an optimizer, and put its tensors into `tensors`."""

    def replaced(values: Any, params: Sequence[Tensor]) -> Any:
        def replace(tensor: Tensor) -> object:
            if tensor.layout != torch.strided:
                return tensor.detach().cpu()  # pickled by value, as such state is rare
            index = len(tensors)
            tensors[index] = tensor
            home = params[0].device if params else None
            device = None if tensor.device == home else tensor.device
            return _Placeholder(index, tensor.shape, tensor.dtype, device)

        return map_tree(replace, Tensor, values, keep_dict_types=True)

    params = _parameters(optimizer)
    return _Content(
        _layout(optimizer),
        [
            replaced({k: v for k, v in group.items() if k != "params"}, group["params"])
            for group in optimizer.param_groups
        ],
        {
            i: replaced(dict(optimizer.state[p]), [p])
            for i, p in enumerate(params)
            if p in optimizer.state
        },
        {k: replaced(v, []) for k, v in optimizer.state.items() if not isinstance(k, Tensor)},
    )


def _with_own_tensors(optimizer: Optimizer, content: _Content, tensors: _Tensors) -> _Content:
    """Return the content with tensors of this rank for the placeholders, also put into `tensors`.

    The broadcast then fills them. Raises ValueError if this rank's parameters differ from the
    root's.
    """
    _check_layout(content.layout, _layout(optimizer))

    def received(values: Any, present: Mapping[Any, Any], params: Sequence[Tensor]) -> Any:
        home = params[0].device if params else torch.device("cpu")

        def fill(blank: _Placeholder, own: object = None) -> Tensor:
            tensor = torch.empty(blank.shape, dtype=blank.dtype, device=blank.device or home)
            # Write in place where possible: scripts may hold references to the state's tensors.
            if isinstance(own, Tensor) and _alike(own, tensor):
                tensor = own
            tensors[blank.index] = tensor
            return tensor

        if isinstance(values, dict):
            values = {
                key: fill(value, present.get(key)) if isinstance(value, _Placeholder) else value
                for key, value in values.items()
            }
        return map_tree(fill, _Placeholder, values, keep_dict_types=True)

    params = _parameters(optimizer)
    groups = optimizer.param_groups
    return _Content(
        content.layout,
        [received(v, g, g["params"]) for v, g in zip(content.options, groups, strict=True)],
        {
            i: received(values, optimizer.state.get(params[i], {}), [params[i]])
            for i, values in content.state.items()
        },
        {key: received(value, {}, []) for key, value in content.other.items()},
    )


def _alike(a: Tensor, b: Tensor) -> bool:
    one, other = ((t.layout, t.shape, t.dtype, t.device) for t in (a, b))
    return one == other


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


def _install(optimizer: Optimizer, content: _Content) -> None:
    """Set the optimizer's options and state to those of a content whose tensors are received."""
    for group, options in zip(optimizer.param_groups, content.options, strict=True):
        group.update(options)
    state: dict[Any, Any] = {
        **{p: content.state[i] for i, p in enumerate(_parameters(optimizer)) if i in content.state},
        **content.other,
    }
    optimizer.state.clear()
    optimizer.state.update(state)
