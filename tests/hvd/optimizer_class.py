"""What DistributedOptimizer accepts and refuses, and what object it returns; see
optimizer_table.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.hvd.behaviour import Hvd, added, is_real, raises
from tests.hvd.optimizer_state import same_in_all
from tests.hvd.optimizer_table import (
    adamw,
    all_warnings,
    backward,
    batch,
    by_hand,
    case,
    close,
    net,
    plain,
    sgd,
    shard,
    side_by_side,
    synchronized,
    train,
    update,
    wrap,
    wrapped,
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
    model, optimizer = wrapped(hvd)
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


@case(different="a copy, or a pickle, is refused at once")
def copies_are_refused(hvd: Hvd) -> None:
    optimizer = wrap(hvd, net())
    for copied in (copy.deepcopy, pickle.dumps):
        with raises(TypeError, "state_dict()"):
            copied(optimizer)


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
    """Of the one made before wrapping, Horovod's warns that it is stepped before the optimizer."""
    halve = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    for attached_to in ("original, before wrapping", "original", "wrapped"):
        model, expected = net(), net()
        original, by_itself = sgd(model.parameters()), sgd(expected.parameters())
        schedulers = [halve(by_itself)]
        if "before" in attached_to:
            schedulers.append(halve(original))
        optimizer = hvd.DistributedOptimizer(original, model.named_parameters())
        if "before" not in attached_to:
            schedulers.append(halve(optimizer if attached_to == "wrapped" else original))
        with all_warnings() as warned:
            for step in range(3):
                update(model, optimizer, shard(hvd, step))
                update(expected, by_itself, batch(step))
                for scheduler in schedulers:
                    scheduler.step()
        assert is_real(hvd) or not warned
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
    assert type(optimizer).find_duplicates("abcb") == {"b"}


@case()
def nothing_requires_an_update(hvd: Hvd) -> None:
    """As scripts do for networks of which a part gets no gradient: it does not decay."""
    model = nn.ModuleDict({"used": net(), "unused": nn.Linear(2, 2)}).double()
    before = [p.detach().clone() for p in model["unused"].parameters()]
    decaying = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(decaying, named_parameters=model.named_parameters())
    optimizer._requires_update = set()
    train(hvd, model["used"], optimizer, range(2))
    assert all(p.grad is None for p in model["unused"].parameters())
    for p, was in zip(model["unused"].parameters(), before, strict=True):
        assert torch.equal(p, was)


@case()
def wrong_arguments_are_refused(hvd: Hvd) -> None:
    model = net()
    weight, named = model[0].weight, list(model.named_parameters())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"op": op, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor not supported")
        for op in (hvd.Sum, hvd.Adasum, hvd.Min)
    ]
    wrong += [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        ({"named_parameters": model.parameters()}, "should be a sequence of tuples"),
        ({"named_parameters": dict(named)}, "should be a sequence of tuples"),
        ({"named_parameters": [["a", weight]]}, "should be a sequence of tuples"),
        ({"named_parameters": [("same", p) for _, p in named]}, "Found duplicates: same"),
        ({"named_parameters": named[:-1]}, f"Python object ids: {id(model[2].bias)}"),
        ({"groups": 0}, "groups should be a non-negative integer"),
        ({"groups": -1}, "groups should be a non-negative integer"),
        ({"groups": [["0.weight"]]}, "groups must consist of torch.Tensor."),
        ({"groups": [[weight, weight]]}, "A parameter can only appear once in groups."),
        ({"groups": [[weight], [weight]]}, "A parameter can only appear once in groups."),
    ]
    for options, text in wrong:
        with raises(ValueError, text):
            wrap(hvd, model, **options)


@case()
def names_may_be_too_many_or_absent(hvd: Hvd) -> None:
    for surplus in (True, False):
        model, other = net(), net(1)
        named = [*model.named_parameters()]
        named += [(f"other.{name}", p) for name, p in other.named_parameters()]
        optimizer = wrap(hvd, model, named_parameters=named if surplus else None)
        train(hvd, model, optimizer, range(2))
        close(model, by_hand(2))
        assert all(p.grad is None for p in other.parameters())


@case()
def parameter_names_can_be_read(hvd: Hvd) -> None:
    model, optimizer = wrapped(hvd)
    assert optimizer._parameter_names == {p: name for name, p in model.named_parameters()}
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = hvd.DistributedOptimizer(plain(groups))  # type: ignore[arg-type]
    names = ["0.0", "1.0", "1.1", "1.2"]
    expected = {p: f"allreduce.noname.{i}" for i, p in zip(names, parameters, strict=True)}
    assert optimizer._parameter_names == expected


@case()
def num_groups_is_deprecated(hvd: Hvd) -> None:
    model = net()
    with all_warnings() as warned:
        optimizer = wrap(hvd, model, num_groups=2)
    (text,) = warned
    assert "Parameter `num_groups` has been replaced by `groups`" in text
    train(hvd, model, optimizer, range(2))
    close(model, by_hand(2))


@case()
def nothing_warns_on_the_way(hvd: Hvd) -> None:
    with all_warnings() as warned:
        for step, model, optimizer, data in side_by_side(hvd, groups=2):
            update(model, optimizer, data)
            if step:
                optimizer.zero_grad()
                model(torch.ones(2, 4, dtype=torch.double)).sum().backward()
                with synchronized(optimizer):
                    pass
    assert warned == []


# `shard=True`, our extension: a script's bits are those without it.


def train_as_horovods_examples(hvd: Hvd, shard: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Train as Horovod's examples do, with two passes a step and clipping in some steps."""
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(4, 131), nn.Tanh(), nn.Linear(131, 3)).double()
    optimizer = wrap(hvd, model, adamw, backward_passes_per_step=2, shard=shard)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(5):
        for k in range(2):
            backward(hvd, model, 2 * step + k)
        if step % 2:
            with synchronized(optimizer):
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 2:  # as after a checkpoint is loaded on every rank
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = copy.deepcopy(optimizer.state_dict()) if hvd.rank() == 0 else {}  # not collective
    if hvd.rank() == 0:
        torch.save(model.state_dict(), "/dev/null")
    weights = [p.detach().clone() for p in model.parameters()]
    hvd.barrier()
    return weights, state


@case(arms=["hvd-torchrun"], sizes=(2, 3))
def a_script_has_the_bits_of_one_without_it(hvd: Hvd) -> None:
    same_in_all(train_as_horovods_examples(hvd, True), train_as_horovods_examples(hvd, False))


@case(arms=["hvd-torchrun"], sizes=(2,))
def adasum_and_a_process_set_exclude_it(hvd: Hvd) -> None:
    with added(hvd, 0) as small:
        for changes in ({"op": hvd.Adasum}, {"process_set": small}):
            with raises(ValueError, "shard=True"):
                wrap(hvd, net(), shard=True, **changes)
