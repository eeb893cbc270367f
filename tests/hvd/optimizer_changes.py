"""A set of parameters that changes while training, and several optimizers; see optimizer_table.py,
and random_runs.py for what ranks do unlike.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.hvd.behaviour import Hvd, last, raises
from tests.hvd.optimizer_table import (
    adamw,
    backward,
    by_hand,
    case,
    close,
    grads,
    net,
    plain,
    sgd,
    side_by_side,
    train,
    update,
    wrap,
    wrapped,
)


def frozen_net() -> Any:
    model = net()
    model[0].requires_grad_(False)
    return model


@case(stronger="parameters that are unfrozen after the construction are reduced")
def unfrozen_later(hvd: Hvd) -> None:
    for step, model, optimizer, data in side_by_side(hvd, new=frozen_net, steps=5):
        model[0].requires_grad_(step >= 2)
        update(model, optimizer, data)
        assert all((p.grad is None) is (step < 2) for p in model[0].parameters())


@case(real="parameters that are unfrozen after the construction stay local", sizes=(2, 3))
def unfrozen_later_and_local(hvd: Hvd) -> None:
    model, optimizer = wrapped(hvd, new=frozen_net)
    model[0].requires_grad_(True)
    backward(hvd, model, 0)
    own = [grad.clone() for grad in grads(model[0])]
    optimizer.synchronize()
    close(grads(model[0]), own, 0.0)


@case(stronger="parameters that are added after the construction are reduced")
def added_later(hvd: Hvd) -> None:
    def of_the_first_layer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return sgd([*parameters][:2])

    for added_at in (0, 2):
        for step, model, optimizer, data in side_by_side(hvd, of_the_first_layer):
            if step == added_at:
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
            model.zero_grad()
            update(model, optimizer, data)


@case()
def state_is_loaded_and_training_goes_on(hvd: Hvd) -> None:
    for make in (sgd, adamw):
        model, optimizer = wrapped(hvd, make)
        train(hvd, model, optimizer, range(2))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(hvd, model, optimizer, range(5, 7))
        fresh = net(3)
        for into, loading in ((model, optimizer), (fresh, wrap(hvd, fresh, make))):
            into.load_state_dict(saved[0])
            loading.load_state_dict(copy.deepcopy(saved[1]))  # torch would go on with its tensors
            train(hvd, into, loading, range(2, 4))
            close(into, by_hand(4, make))


@case()
def loaded_options_are_used(hvd: Hvd) -> None:
    """Loading replaces the groups: from then on the original has none in common."""
    model, optimizer = wrapped(hvd)
    state = optimizer.state_dict()
    state["param_groups"][0].update(lr=0.0, weight_decay=0.0)
    optimizer.load_state_dict(state)
    train(hvd, model, optimizer, range(2))
    close(model, net())


@case(sizes=(2, 3))
def loading_drops_what_is_under_way(hvd: Hvd) -> None:
    model, optimizer = wrapped(hvd)
    backward(hvd, model, 9)
    hvd.barrier()  # all have submitted
    optimizer.load_state_dict(sgd(model.parameters()).state_dict())
    optimizer.zero_grad()
    train(hvd, model, optimizer, range(3))
    close(model, by_hand(3))


@case()
def parameters_of_another_type_later(hvd: Hvd) -> None:
    """`model.double()` between steps changes the parameters in place."""
    single = side_by_side(hvd, plain, new=lambda: net().float(), tolerance=1e-5)
    for step, model, optimizer, (x, y) in single:
        if step == 2:
            model.double()
        dtype = model[0].weight.dtype
        update(model, optimizer, (x.to(dtype), y.to(dtype)))


@case(sizes=(2, 3))
def an_optimizer_of_one_rank_alone(hvd: Hvd) -> None:
    """It is built for an evaluation, and never steps."""
    kept = []
    for seed in (0, 1):
        both = wrapped(hvd, new=partial(net, seed))
        if hvd.rank() == 0:
            kept.append(wrapped(hvd))
        train(hvd, *both, range(2))
        close(both[0], by_hand(2, model=net(seed)))


@case(stronger="optimizers that could be swapped are refused", sizes=(2,))
def equal_optimizers_in_another_order(hvd: Hvd) -> None:
    both = [wrapped(hvd, new=partial(net, seed)) for seed in (0, 1)]
    if last(hvd):
        both.reverse()
    with raises(hvd.HorovodInternalError, "first used two optimizers in different orders"):
        for model, optimizer in both:
            train(hvd, model, optimizer, range(1))


@case(different="optimizers that ranks step in unlike order at first are refused", sizes=(2, 3))
def two_optimizers_in_unlike_order_at_first(hvd: Hvd) -> None:
    models = [net(0), nn.Linear(4, 3).double()]
    optimizers = [wrap(hvd, model) for model in models]
    for model in models:
        backward(hvd, model, 0)
    with raises(hvd.HorovodInternalError, "step them in the same order on all ranks"):
        optimizers[last(hvd)].step()
