"""TorchState: the elastic state of a PyTorch training. For scripts.

Handlers save, restore and broadcast models, optimizers and samplers; other objects are pickled.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from hvdtrain.hvd.elastic.common import ObjectState
from hvdtrain.hvd.elastic.sampler import ElasticSampler
from hvdtrain.hvd.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdtrain.hvd.mpi_ops import rank


class StateHandler:
    """Saves, restores and synchronises one value. Subclass it for a type of your own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Store a copy in this process's memory. Not collective."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore, in place, the copy that was saved last. Not collective."""
        raise NotImplementedError

    def sync(self) -> None:
        """Overwrite every rank's value with rank 0's, in place. Collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle another object from now on, and save it."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """A value with state_dict() and load_state_dict()."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # A copy, because an optimizer adopts the tensors that it loads, and changes them later.
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_StateDictHandler):
    """Handles a torch.nn.Module."""

    def sync(self) -> None:
        """Broadcast parameters and buffers. Collective."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(_StateDictHandler):
    """Handles a torch.optim.Optimizer, distributed or not."""

    def sync(self) -> None:
        """Broadcast state and options. Collective."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(_StateDictHandler):
    """Handles an ElasticSampler."""

    def sync(self) -> None:
        """Broadcast the progress, and divide the rest of the epoch among the ranks. Collective."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict()))


_Registry = list[tuple[type, type[StateHandler]]]

_handler_registry: _Registry = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> _Registry:
    """Return the list of (type, handler class), not a copy; the first matching type applies."""
    return _handler_registry


def set_handler_registry(registry: _Registry) -> None:
    """Replace the list of (type, handler class)."""
    global _handler_registry
    _handler_registry = registry


def _handler_of(value: Any) -> StateHandler | None:
    for kind, handler in _handler_registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """The state of a PyTorch training; every keyword becomes an attribute.

    Modules, optimizers and elastic samplers, under any keyword, are saved, restored and broadcast
    in place. Every other object is pickled as a whole, so recreate a learning rate scheduler in a
    reset callback instead. Assigning another module to an attribute saves it at once.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        handlers = {name: _handler_of(value) for name, value in kwargs.items()}
        self._handlers = {name: found for name, found in handlers.items() if found is not None}
        plain = {name: value for name, value in kwargs.items() if handlers[name] is None}
        # Not by setattr, which would save again what the handlers saved at construction.
        vars(self).update(kwargs)
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **plain)

    def save(self) -> None:
        """Copy the state dicts, and keep references to the other objects. Not collective."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restore what was saved last. Not collective."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Overwrite every rank's state with rank 0's, and save it. Collective.

        Horovod does not save it, so a later restore could return to the state before the sync.
        """
        for handler in self._handlers.values():
            handler.sync()
        super().sync()
        for handler in self._handlers.values():
            handler.save()

    def reset(self) -> None:
        """Divide the samples among the new ranks, since a sync need not follow. Not collective."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        # During construction there is no `_handlers` yet.
        handler = vars(self).get("_handlers", {}).get(name)
        if handler is not None:
            handler.set_value(value)
        super().__setattr__(name, value)
