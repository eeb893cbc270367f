"""What kind of object a wrapped optimizer is; see optimizer_table.py."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tests.hvd.behaviour import Hvd, raises
from tests.hvd.optimizer_table import (
    adamw,
    batch,
    by_hand,
    case,
    close,
    equal_everywhere,
    loss,
    net,
    sgd,
    shard,
    side_by_side,
    train,
    update,
    wrap,
)


@case()
def keeps_class_and_name(hvd: Hvd) -> None:
    for make, kind in ((sgd, torch.optim.SGD), (adamw, torch.optim.AdamW)):
        optimizer = wrap(hvd, net(), make)
        assert isinstance(optimizer, kind)
        assert type(optimizer) is not kind
        assert type(optimizer).__name__ == kind.__name__
        assert repr(optimizer).startswith(f"{kind.__name__} (")
        # Scripts and libraries read from it that an optimizer is wrapped.
        assert optimizer.__module__ == hvd.DistributedOptimizer.__module__
        assert optimizer.__module__ == f"{hvd.__name__}.optimizer"


@case(real="the defaults are those of the class")
def defaults_are_lost(hvd: Hvd) -> None:
    assert wrap(hvd, net()).defaults["lr"] == 0.001


@case(real="the state of the original is dropped")
def state_is_lost(hvd: Hvd) -> None:
    model = net()
    original = sgd(model.parameters())
    update(model, original, batch(0))
    assert original.state
    assert not hvd.DistributedOptimizer(original, model.named_parameters()).state


@case(stronger="the original's defaults and state are kept")
def defaults_and_state_are_kept(hvd: Hvd) -> None:
    for make in (sgd, adamw):
        model = net()
        original = make(model.parameters())
        update(model, original, batch(0))
        optimizer = hvd.DistributedOptimizer(original, model.named_parameters())
        assert optimizer.defaults == original.defaults
        train(hvd, model, optimizer, range(1, 4))
        close(model, by_hand(4, make))


@case()
def state_dict_has_the_plain_form(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model)
    train(hvd, model, optimizer, range(1))
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups"}
    unwrapped = sgd(net().parameters())
    unwrapped.load_state_dict(state)
    assert unwrapped.state_dict()["param_groups"] == state["param_groups"]


@case(stronger="step hooks run once a step, those of the original too")
def step_hooks_run_once(hvd: Hvd) -> None:
    calls: list[str] = []
    model = net()
    original = sgd(model.parameters())
    original.register_step_post_hook(lambda *_: calls.append("post of the original"))
    optimizer = hvd.DistributedOptimizer(original, model.named_parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(hvd, model, optimizer, range(2))
    assert calls == ["pre", "post of the original", "post"] * 2


@case(stronger="optimizers can be pickled and copied, also those of Adasum")
def can_be_pickled_and_copied(hvd: Hvd) -> None:
    """The model travels along: an optimizer knows its parameters as objects."""
    copies = (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both)))
    for op in (hvd.Average, hvd.Adasum)[: 1 + (hvd.size() == 2)]:
        expected = net()
        train(hvd, expected, wrap(hvd, expected, op=op), range(4))
        for again in copies:
            first = net()
            wrapped = wrap(hvd, first, op=op)
            train(hvd, first, wrapped, range(2))
            second, copied = again((first, wrapped))  # type: ignore[no-untyped-call]
            assert isinstance(copied, torch.optim.SGD)
            assert copied.defaults == wrapped.defaults
            train(hvd, second, copied, range(2, 4))
            close(second, expected)
            equal_everywhere(hvd, second)
            train(hvd, first, wrapped, range(2, 4))
            close(first, expected)


class Demanding(torch.optim.SGD):
    """Of a constructor that wants more than parameters, and with an option outside the groups."""

    def __init__(self, params: Any, lr: float, *, factor: float) -> None:
        super().__init__(params, lr=lr)
        self.factor = factor

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(self.factor)
        return super().step(closure)


@case(stronger="a constructor may want more than parameters")
def constructors_may_want_more(hvd: Hvd) -> None:
    def demanding(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Demanding(parameters, 0.1, factor=0.5)

    for _, model, optimizer, data in side_by_side(hvd, demanding):
        assert isinstance(optimizer, Demanding)
        update(model, optimizer, data)


@case()
def schedulers_act_through_either(hvd: Hvd) -> None:
    for on_original in (True, False):
        model, expected = net(), net()
        original, by_itself = sgd(model.parameters()), sgd(expected.parameters())
        optimizer = hvd.DistributedOptimizer(original, model.named_parameters())
        schedulers = [
            torch.optim.lr_scheduler.StepLR(attached, step_size=1, gamma=0.5)
            for attached in (original if on_original else optimizer, by_itself)
        ]
        for step in range(3):
            update(model, optimizer, shard(hvd, step))
            update(expected, by_itself, batch(step))
            for scheduler in schedulers:
                scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.1 / 8
        close(model, expected)


@case(stronger="a model can be wrapped again: hooks go with their optimizer")
def may_be_wrapped_anew(hvd: Hvd) -> None:
    """As scripts do for every epoch, or in every test: nothing is left of the one before."""
    model, expected = net(), net()
    for step in range(3):
        optimizer = wrap(hvd, model)
        train(hvd, model, optimizer, [step])
        del optimizer
        update(expected, sgd(expected.parameters()), batch(step))
    close(model, expected)


@case()
def attributes_that_scripts_read(hvd: Hvd) -> None:
    model = net()
    model[2].bias.requires_grad_(False)
    optimizer = wrap(hvd, model, backward_passes_per_step=2, gradient_predivide_factor=2.0)
    assert optimizer.op == hvd.Average
    assert optimizer.gradient_predivide_factor == 2.0
    assert optimizer.backward_passes_per_step == 2
    assert optimizer.process_set is hvd.global_process_set
    assert optimizer.sparse_as_dense is False
    assert optimizer._compression is hvd.Compression.none
    assert optimizer._groups is None
    assert not optimizer._handles
    trained = {p for p in model.parameters() if p.requires_grad}
    assert optimizer._requires_update == (trained if hvd.size() > 1 else set())
    assert dict(optimizer._allreduce_delay) == dict.fromkeys(model.parameters(), 2)
    loss(model, batch(0)).backward()
    left = 1 if hvd.size() > 1 else 2
    assert all(optimizer._allreduce_delay[p] == left for p in trained)
    assert set(optimizer._handles) == (trained if hvd.size() > 1 else set())
    optimizer.step()
    assert not optimizer._handles
    assert type(optimizer).find_duplicates("abcb") == {"b"}


def made_by_hand(hvd: Hvd, model: Any, **overrides: Any) -> Any:
    """Make a wrapped optimizer as Horovod and the libraries on it (GRACE, ElasticDL) do."""
    body = {**vars(importlib.import_module(f"{hvd.__name__}.optimizer")._DistributedOptimizer)}
    cls = type("SGD", (torch.optim.SGD,), {**body, **overrides})
    named = list(model.named_parameters())
    return cls(sgd(model.parameters()).param_groups, named, hvd.Compression.none)


@case()
def a_class_that_is_made_as_horovod_makes_it(hvd: Hvd) -> None:
    steps = []

    def step(self: Any, closure: Any = None) -> Any:
        self.synchronize()
        steps.append(closure)
        with self.skip_synchronize():
            return body.step(self, closure)

    body = importlib.import_module(f"{hvd.__name__}.optimizer")._DistributedOptimizer
    model = net()
    optimizer = made_by_hand(hvd, model, step=step)
    train(hvd, model, optimizer, range(3))
    close(model, by_hand(3))
    assert len(steps) == 3


@case(different="what the class of Horovod has inside, and ours has not, is refused", sizes=(2,))
def a_class_that_overrides_what_is_not_here(hvd: Hvd) -> None:
    for name in ("_allreduce_grad_async", "_make_hook", "_register_hooks"):
        with raises(TypeError, f"SGD overrides or calls {name} of Horovod's optimizer"):
            made_by_hand(hvd, net(), **{name: lambda self, *args: None})
    own = importlib.import_module(f"{hvd.__name__}.optimizer")._DistributedOptimizer
    with raises(TypeError, "has no optimizer to wrap"):
        own(list(net().parameters()), None, hvd.Compression.none)
    with raises(TypeError, "overrides or calls _register_hooks"):
        wrap(hvd, net())._register_hooks()
