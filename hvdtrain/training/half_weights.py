"""Half-precision weights: the conversion of a model, and fp32 master copies of its parameters.

`training.precision` uses both for `--opt-level O2` and `O3`. Rounding errors of small updates would
add up in half precision; so at O2 the optimizer steps the masters, whose rounded values are then
written into the model. The optimizer's parameter groups hold, in each phase of a step:

    backward, averaging               the model's parameters, with half gradients
    unscale_, clip, step              the masters, with fp32 gradients    (take_gradients)
    zero_grad, the next step          the model's parameters again        (write_back)
    state_dict, load_state_dict       the masters                         (in_groups)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain.optim.model_sync import uncompiled
from hvdtrain.system.trees import map_tree


def convert_to_half(model: nn.Module, dtype: torch.dtype, keep_batch_norm: bool) -> nn.Module:
    """Return `model` with floating parameters and buffers in `dtype`, converted in place.

    Floating inputs of its forward pass are converted to `dtype`, and outputs to fp32, so that the
    loss is computed in fp32. With `keep_batch_norm`, BatchNorm layers keep their fp32 parameters
    and statistics; their activations are half all the same. Not collective.
    """
    for module in model.modules():
        if keep_batch_norm and isinstance(module, BatchNormBase):
            continue
        # Only `data` changes, as in nn.Module.half: tied parameters stay tied.
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if t.is_floating_point():
                t.data = t.data.to(dtype)

    def convert_inputs(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _to(dtype, (args, kwargs))

    def convert_outputs(_: nn.Module, args: Any, output: Any) -> Any:
        return _to(torch.float32, output)

    model.register_forward_pre_hook(convert_inputs, with_kwargs=True)
    model.register_forward_hook(convert_outputs)
    return model


def _to(dtype: torch.dtype, tree: Any) -> Any:
    """Return a copy of a nested structure with every floating tensor in `dtype`."""
    return map_tree(
        lambda t: t.to(dtype) if t.is_floating_point() else t, Tensor, tree, keep_dict_types=True
    )


class MasterWeights:
    """fp32 copies of an optimizer's half parameters. No method is collective.

    The constructor moves state that the optimizer has already to the masters.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        self._by_name: dict[str, Tensor] = {}
        self._master_of: dict[Tensor, Tensor] = {}
        for name, p in model.named_parameters():
            if p in stepped and p.dtype in (torch.float16, torch.bfloat16):
                master = nn.Parameter(p.detach().float(), requires_grad=p.requires_grad)
                self._by_name[uncompiled(name)] = master
                self._master_of[p] = master
                if p in optimizer.state:
                    optimizer.state[master] = _to(torch.float32, optimizer.state.pop(p))
        self._weight_of = {master: p for p, master in self._master_of.items()}

    @contextmanager
    def in_groups(self, optimizer: Optimizer) -> Iterator[dict[str, Tensor]]:
        """Put the masters into the optimizer's groups, and yield them by name."""
        _replace(optimizer, self._master_of)
        try:
            # Not kept: a sharded optimizer moves the masters into other memory.
            yield {name: master.detach() for name, master in self._by_name.items()}
        finally:
            _replace(optimizer, self._weight_of)

    def take_gradients(self, optimizer: Optimizer) -> None:
        """Give the masters the gradients in fp32, and put them into the optimizer's groups."""
        for p, master in self._master_of.items():
            master.grad = None if p.grad is None else p.grad.float()
        _replace(optimizer, self._master_of)

    @torch.no_grad()
    def write_back(self, optimizer: Optimizer) -> None:
        """Round the masters into the model, and put its parameters back into the groups."""
        for p, master in self._master_of.items():
            p.copy_(master)
            master.grad = None
        _replace(optimizer, self._weight_of)


def _replace(optimizer: Optimizer, other_of: dict[Tensor, Tensor]) -> None:
    for group in optimizer.param_groups:
        group["params"] = [other_of.get(p, p) for p in group["params"]]
