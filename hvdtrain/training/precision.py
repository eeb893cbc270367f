"""Precisions and Apex's opt levels behind one interface, so that the loop has no branch for them.

    level      weights                         computed in        loss scale in fp16
    none, O1   fp32                            autocast           dynamic
    O0         fp32                            fp32
    O2         half, BatchNorm and masters     the weights' type  dynamic
               in fp32
    O3         half                            the weights' type  1.0

Half is the type that `--precision` names. bf16 has fp32's range and needs no loss scale.

Rounding errors of small updates would add up in half precision; so at O2 the optimizer steps fp32
masters, whose rounded values are then written into the model. The optimizer's parameter groups
hold, in each phase of a step:

    backward, averaging               the model's parameters, with half gradients
    unscale_, clip, step              the masters, with fp32 gradients
    zero_grad, the next step          the model's parameters again
    state_dict, load_state_dict       the masters                         (masters_in)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain._torch.step_mark import mark_as_stepped
from hvdtrain.optim.model_sync import uncompiled
from hvdtrain.system.trees import map_tree, parameters_of

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_WHOLE = {"fp32": None, "fp64": torch.float64}
"""The dtype that the model is converted to; None leaves it as the task has made it."""


class Precision:
    """Conversion, autocast, loss scaling and masters of one precision; no-ops if it needs none.

    No method is collective: gradients are equal on all ranks when `unscale_` checks them, so that
    all ranks find the same overflow and skip the same step.
    """

    def __init__(self, name: str, device: torch.device, opt_level: str = "none") -> None:
        has_half_weights = opt_level in ("O2", "O3")
        half = None if name in _WHOLE else _HALF[name]
        autocast = None if has_half_weights else half
        self.autocast = partial(
            torch.autocast, device.type, dtype=autocast, enabled=autocast is not None
        )
        """Returns the context manager for the forward pass and the loss."""
        self._half_weights = half if has_half_weights else None
        self._has_masters = self._half_weights is not None and opt_level == "O2"
        self._dtype = _WHOLE.get(name)
        self._masters: dict[str, Tensor] = {}
        """By the names of the weights that they are copies of."""
        self._master_of: dict[Tensor, Tensor] = {}
        self._weight_of: dict[Tensor, Tensor] = {}
        # A disabled scaler passes losses and steps through unchanged.
        self.scaler = torch.amp.GradScaler(
            device.type, enabled=name == "fp16" and opt_level != "O3"
        )

    def convert(self, model: nn.Module) -> nn.Module:
        """Return `model` with its floating parameters and buffers in the dtype of the weights,
        converted in place; in fp64 its complex ones, too.

        Floating inputs of the forward pass of a half model are converted to half, and outputs to
        fp32, so that the loss is computed in fp32. At O2 BatchNorm layers keep their fp32
        parameters and statistics; their activations are half all the same.
        """
        half = self._half_weights
        if half is None and self._dtype is None:
            return model
        # Only `data` changes, as in nn.Module.half: tied parameters stay tied.
        if half is None:
            # Not `model.to`, which drops the imaginary parts.
            for t in (*model.parameters(), *model.buffers()):
                t.data = self.convert_batch(t.data)
            return model
        for module in model.modules():
            if not (self._has_masters and isinstance(module, BatchNormBase)):
                for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    t.data = _to(half, t.data)
        model.register_forward_pre_hook(
            lambda _, args, kwargs: _to(half, (args, kwargs)), with_kwargs=True
        )
        model.register_forward_hook(lambda _, args, output: _to(torch.float32, output))
        return model

    def make_masters(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Make the fp32 masters of a model's half weights, if the level has any, and move state
        that the optimizer has already to them. Call it with what `prepare` returned, before state
        is loaded.
        """
        stepped = set(parameters_of(optimizer)) if self._has_masters else ()
        for name, p in model.named_parameters():
            if p in stepped and p.dtype in _HALF.values():
                master = nn.Parameter(p.detach().float(), requires_grad=p.requires_grad)
                self._masters[uncompiled(name)] = self._master_of[p] = master
                self._weight_of[master] = p
                if p in optimizer.state:
                    optimizer.state[master] = _to(torch.float32, optimizer.state.pop(p))

    @contextmanager
    def masters_in(self, optimizer: Optimizer) -> Iterator[dict[str, Tensor]]:
        """Let the optimizer have the masters in its groups, and yield them by name; an empty dict
        without masters. The optimizer's state dict may be read and loaded inside only.
        """
        _replace(optimizer, self._master_of)
        try:
            # Not kept: a sharded optimizer moves the masters into other memory.
            yield {name: master.detach() for name, master in self._masters.items()}
        finally:
            _replace(optimizer, self._weight_of)

    def convert_batch(self, t: Tensor) -> Tensor:
        """Return `t` in the dtype of the weights, if it is floating or complex."""
        if self._dtype is None or not (t.is_floating_point() or t.is_complex()):
            return t
        return t.to(torch.promote_types(t.dtype, self._dtype))

    def backward(self, loss: Tensor) -> None:
        """Run backward from the scaled loss."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale_(self, optimizer: Optimizer) -> None:
        """Give the masters the gradients in fp32, and divide the gradients by the scale, in place.
        Call it between `average_gradients` and clipping, which then finds the gradients that the
        optimizer will use in its groups.
        """
        for p, master in self._master_of.items():
            master.grad = None if p.grad is None else p.grad.float()
        _replace(optimizer, self._master_of)
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> bool:
        """Step the optimizer, unless a gradient overflowed, adapt the scale, and round the masters
        into the model. Return whether the step was taken.
        """
        before = self.scaler.get_scale()
        if self.scaler.is_enabled():
            # The schedule also advances at a skipped step. Without this flag, torch would warn that
            # it advances before the optimizer.
            mark_as_stepped(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        with torch.no_grad():
            for p, master in self._master_of.items():
                p.copy_(master)
                master.grad = None
        _replace(optimizer, self._weight_of)
        return self.scaler.get_scale() >= before  # it is lowered after an overflow alone


def _to(dtype: torch.dtype, tree: Any) -> Any:
    """Return a copy of a nested structure with every floating tensor in `dtype`."""
    return map_tree(
        lambda t: t.to(dtype) if t.is_floating_point() else t, Tensor, tree, keep_dict_types=True
    )


def _replace(optimizer: Optimizer, other_of: dict[Tensor, Tensor]) -> None:
    """Put other parameters into the optimizer's groups."""
    for group in optimizer.param_groups if other_of else ():
        group["params"] = [other_of.get(p, p) for p in group["params"]]
