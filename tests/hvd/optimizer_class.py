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
    train,
    update,
    wrap,
)


@case()
def keeps_class_and_name(hvd: Hvd) -> None:
    for make, kind in ((sgd, torch.optim.SGD), (adamw, torch.optim.AdamW)):
        optimizer = wrap(hvd, net(), make)
        assert isinstance(optimizer, kind)
        assert type(optimizer).__name__ == kind.__name__
        assert type(optimizer) is not kind
        assert type(optimizer).__module__ == hvd.DistributedOptimizer.__module__


@case()
def module_tells_that_it_is_wrapped(hvd: Hvd) -> None:
    optimizer = wrap(hvd, net())
    assert optimizer.__module__ == hvd.DistributedOptimizer.__module__
    assert optimizer.__module__ == f"{hvd.__name__}.optimizer"


@case()
def shares_the_groups(hvd: Hvd) -> None:
    model = net()
    original = sgd(model.parameters())
    optimizer = hvd.DistributedOptimizer(original, model.named_parameters())
    assert optimizer is not original
    for group, shared in zip(original.param_groups, optimizer.param_groups, strict=True):
        assert group is shared
    original.param_groups[0]["lr"] = 0.0
    original.param_groups[0]["weight_decay"] = 0.0
    train(hvd, model, optimizer, range(1))
    close(model, net())


@case()
def keeps_the_groups_options(hvd: Hvd) -> None:
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        first, *others = parameters
        groups: list[dict[str, Any]] = [{"params": [first], "lr": 0.3}, {"params": others}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)

    model = net()
    optimizer = wrap(hvd, model, make)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.1]
    assert all(group["nesterov"] for group in optimizer.param_groups)
    train(hvd, model, optimizer, range(3))
    close(model, by_hand(3, make))


@case(real="the defaults are those of the class")
def defaults_are_lost(hvd: Hvd) -> None:
    assert wrap(hvd, net()).defaults["lr"] == 0.001


@case(stronger="the original's defaults are kept")
def defaults_are_kept(hvd: Hvd) -> None:
    optimizer = wrap(hvd, net())
    assert optimizer.defaults["lr"] == 0.1
    assert optimizer.defaults["momentum"] == 0.9


@case(real="the state of the original is dropped")
def state_is_lost(hvd: Hvd) -> None:
    model = net()
    original = sgd(model.parameters())
    loss(model, batch(0)).backward()
    original.step()
    assert original.state
    assert not hvd.DistributedOptimizer(original, model.named_parameters()).state


@case(stronger="the original's state is kept")
def state_is_kept(hvd: Hvd) -> None:
    for make in (sgd, adamw):
        model = net()
        original = make(model.parameters())
        loss(model, batch(0)).backward()
        original.step()
        optimizer = hvd.DistributedOptimizer(original, model.named_parameters())
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


@case(real="step hooks run twice")
def step_hooks_run_twice(hvd: Hvd) -> None:
    assert _hook_calls(hvd) == (4, 4)


@case(stronger="step hooks run once a step")
def step_hooks_run_once(hvd: Hvd) -> None:
    assert _hook_calls(hvd) == (2, 2)


def _hook_calls(hvd: Hvd) -> tuple[int, int]:
    calls = [0, 0]
    model = net()
    optimizer = wrap(hvd, model)

    def count(which: int) -> None:
        calls[which] += 1

    optimizer.register_step_pre_hook(lambda *_: count(0))
    optimizer.register_step_post_hook(lambda *_: count(1))
    train(hvd, model, optimizer, range(2))
    return calls[0], calls[1]


@case(stronger="step hooks of the original are kept")
def hooks_of_the_original_run(hvd: Hvd) -> None:
    calls = []
    model = net()
    original = sgd(model.parameters())
    original.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer = hvd.DistributedOptimizer(original, model.named_parameters())
    train(hvd, model, optimizer, range(2))
    assert calls == ["post", "post"]


@case(stronger="optimizers can be pickled")
def can_be_pickled(hvd: Hvd) -> None:
    """The model travels along: an optimizer knows its parameters as objects."""
    model = net()
    optimizer = wrap(hvd, model)
    train(hvd, model, optimizer, range(2))
    model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults["lr"] == 0.1
    train(hvd, model, optimizer, range(2, 4))
    close(model, by_hand(4))
    equal_everywhere(hvd, model)


@case(stronger="optimizers can be copied")
def can_be_copied(hvd: Hvd) -> None:
    first = net()
    wrapped = wrap(hvd, first)
    train(hvd, first, wrapped, range(2))
    second, copied = copy.deepcopy((first, wrapped))
    train(hvd, second, copied, range(2, 4))
    close(second, by_hand(4))
    close(first, by_hand(2))
    train(hvd, first, wrapped, range(2, 3))
    close(first, by_hand(3))


@case(stronger="schedulers' state can be pickled, which may hold the optimizer")
def scheduler_state_can_be_pickled(hvd: Hvd) -> None:
    model = net()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(wrap(hvd, model), 0.1, total_steps=10)
    assert pickle.loads(pickle.dumps(scheduler.state_dict()))["total_steps"] == 10
    assert pickle.loads(pickle.dumps(scheduler)).optimizer.defaults["lr"] == 0.1


class Demanding(torch.optim.SGD):
    """Of a constructor that wants more than parameters, and with an option outside the groups."""

    def __init__(self, params: Any, lr: float, *, factor: float) -> None:
        super().__init__(params, lr=lr)
        self.factor = factor

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(self.factor)
        return super().step(closure)


def demanding(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return Demanding(parameters, 0.1, factor=0.5)


@case(real="a constructor is called with parameters only")
def constructors_that_want_more_fail(hvd: Hvd) -> None:
    try:
        wrap(hvd, net(), demanding)
    except TypeError:
        return
    raise AssertionError("no TypeError")


@case(stronger="a constructor may want more than parameters")
def constructors_may_want_more(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model, demanding)
    assert optimizer.factor == 0.5
    assert isinstance(optimizer, Demanding)
    train(hvd, model, optimizer, range(3))
    close(model, by_hand(3, demanding))


@case()
def schedulers_act_through_either(hvd: Hvd) -> None:
    for on_original in (True, False):
        model = net()
        original = sgd(model.parameters())
        optimizer = hvd.DistributedOptimizer(original, model.named_parameters())
        attached = original if on_original else optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(attached, step_size=1, gamma=0.5)
        expected = net()
        by_itself = sgd(expected.parameters())
        other = torch.optim.lr_scheduler.StepLR(by_itself, step_size=1, gamma=0.5)
        for step in range(3):
            train(hvd, model, optimizer, [step])
            scheduler.step()
            update(expected, by_itself, batch(step))
            other.step()
        assert optimizer.param_groups[0]["lr"] == 0.1 / 8
        close(model, expected)


@case()
def representation_is_the_wrapped_ones(hvd: Hvd) -> None:
    assert repr(wrap(hvd, net())).startswith("SGD (")


@case(stronger="a model can be wrapped again: hooks go with their optimizer")
def may_be_wrapped_anew(hvd: Hvd) -> None:
    """As scripts do for every epoch, or in every test: nothing is left of the one before."""
    model = net()
    for step in range(3):
        optimizer = wrap(hvd, model)
        train(hvd, model, optimizer, [step])
        del optimizer
    expected = net()
    for step in range(3):
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
    groups = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return cls(groups.param_groups, named, hvd.Compression.none)


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


@case()
def the_map_of_handles(hvd: Hvd) -> None:
    handles = importlib.import_module(f"{hvd.__name__}.mpi_ops")._handle_map
    before, tensor = len(handles), torch.ones(3)
    handle = hvd.allreduce_async_(tensor, name="mapped", op=hvd.Sum)
    assert handle in handles
    assert [t.data_ptr() for t in handles[handle]] == [tensor.data_ptr()] * 2
    hvd.synchronize(handle)
    assert handle not in handles
    assert len(handles) == before
