"""A set of parameters that changes while training, and several optimizers; see
optimizer_table.py.
"""

from __future__ import annotations

import copy
from typing import Any

from tests.hvd.behaviour import Hvd, last, raises
from tests.hvd.optimizer_table import (
    adamw,
    batch,
    by_hand,
    case,
    close,
    loss,
    net,
    plain,
    sgd,
    shard,
    side_by_side,
    train,
    update,
    wrap,
)


def frozen_net() -> Any:
    model = net()
    model[0].requires_grad_(False)
    return model


@case()
def frozen_from_the_start(hvd: Hvd) -> None:
    for _, model, optimizer, data in side_by_side(hvd, new=frozen_net):
        update(model, optimizer, data)
        assert all(p.grad is None for p in model[0].parameters())


@case()
def frozen_now_and_then(hvd: Hvd) -> None:
    """Without momentum and weight decay, which would act on the gradient of zeros."""
    for frozen_steps in ([2, 3, 4], [1, 3]):
        for step, model, optimizer, data in side_by_side(hvd, plain, steps=5):
            model[0].requires_grad_(step not in frozen_steps)
            update(model, optimizer, data)


@case(stronger="parameters that are unfrozen after the construction are reduced")
def unfrozen_later(hvd: Hvd) -> None:
    for step, model, optimizer, data in side_by_side(hvd, new=frozen_net, steps=5):
        model[0].requires_grad_(step >= 2)
        update(model, optimizer, data)


@case(stronger="parameters that are added after the construction are reduced")
def added_later(hvd: Hvd) -> None:
    for added_at in (0, 2):
        model, expected = net(), net()
        by_itself = sgd(expected[0].parameters())
        optimizer = hvd.DistributedOptimizer(
            sgd(model[0].parameters()), list(model[0].named_parameters())
        )
        for step in range(4):
            for module, changed, data in (
                (model, optimizer, shard(hvd, step)),
                (expected, by_itself, batch(step)),
            ):
                if step == added_at:
                    changed.add_param_group({"params": list(module[2].parameters()), "lr": 0.02})
                module.zero_grad()
                loss(module, data).backward()
                changed.step()
            close(model, expected)


@case()
def state_is_loaded_and_training_goes_on(hvd: Hvd) -> None:
    for make in (sgd, adamw):
        model = net()
        optimizer = wrap(hvd, model, make)
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
    model = net()
    optimizer = wrap(hvd, model)
    state = optimizer.state_dict()
    state["param_groups"][0].update(lr=0.0, weight_decay=0.0)
    optimizer.load_state_dict(state)
    train(hvd, model, optimizer, range(2))
    close(model, net())


@case(sizes=(2, 3))
def loading_drops_what_is_under_way(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model)
    loss(model, shard(hvd, 9)).backward()
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


def two_layers(hvd: Hvd, prefixes: tuple[str, str]) -> tuple[Any, ...]:
    """Return two models, and the optimizers of their two layers: wrapped, with these prefixes of
    the parameters' names, and plain.
    """
    model, expected = net(), net()
    wrapped, alone = [], []
    for make, i, prefix in ((sgd, 0, prefixes[0]), (adamw, 2, prefixes[1])):
        named = [(prefix + name, p) for name, p in model[i].named_parameters()]
        wrapped.append(hvd.DistributedOptimizer(make(model[i].parameters()), named))
        alone.append(make(expected[i].parameters()))
    return model, wrapped, expected, alone


def both_at_once(hvd: Hvd, prefixes: tuple[str, str]) -> None:
    """One loss of two optimizers; in which order they step, differs later between the ranks."""
    model, wrapped, expected, alone = two_layers(hvd, prefixes)
    for step in range(4):
        for module, optimizers, data in (
            (model, wrapped, shard(hvd, step)),
            (expected, alone, batch(step)),
        ):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss(module, data).backward()
            for optimizer in optimizers[:: -1 if step and last(hvd) else 1]:
                optimizer.step()
        close(model, expected)


@case()
def two_optimizers_at_once(hvd: Hvd) -> None:
    both_at_once(hvd, ("first.", "second."))


@case(stronger="the parameters of two optimizers under way may have equal names", sizes=(2, 3))
def two_optimizers_of_equal_names_at_once(hvd: Hvd) -> None:
    both_at_once(hvd, ("", ""))


@case(different="ranks that step two optimizers in unlike order at first are refused", sizes=(2, 3))
def two_optimizers_in_unlike_order_at_first(hvd: Hvd) -> None:
    model, wrapped, _, _ = two_layers(hvd, ("", ""))
    loss(model, shard(hvd, 0)).backward()
    with raises(hvd.HorovodInternalError, "step them in the same order on all ranks"):
        wrapped[last(hvd)].step()


@case()
def two_optimizers_in_turn(hvd: Hvd) -> None:
    """As of a GAN: the parameters of one are frozen while those of the other are trained."""
    for prefixes in (("first.", "second."), ("", "")):
        model, wrapped, expected, alone = two_layers(hvd, prefixes)
        for step in range(4):
            for module, optimizers, data in (
                (model, wrapped, shard(hvd, step)),
                (expected, alone, batch(step)),
            ):
                for optimizer, frozen in zip(optimizers, (module[2], module[0]), strict=True):
                    frozen.requires_grad_(False)
                    optimizer.zero_grad()
                    loss(module, data).backward()
                    optimizer.step()
                    frozen.requires_grad_(True)
            close(model, expected)
