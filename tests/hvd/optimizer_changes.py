"""A set of parameters that changes while training, and several optimizers; see
optimizer_table.py.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import nn

from tests.hvd.behaviour import Hvd, last
from tests.hvd.optimizer_table import (
    Make,
    adamw,
    batch,
    by_hand,
    case,
    close,
    equal_everywhere,
    loss,
    net,
    plain,
    sgd,
    shard,
    train,
    update,
    wrap,
)


def alike(hvd: Hvd, make: Make, change: Any, steps: int = 6) -> None:
    """Train with and without hvd, calling `change(model, optimizer, step)` before every step."""
    model, expected = net(), net()
    optimizer, by_itself = wrap(hvd, model, make), make(expected.parameters())
    for step in range(steps):
        change(model, optimizer, step)
        change(expected, by_itself, step)
        update(model, optimizer, shard(hvd, step))
        update(expected, by_itself, batch(step))
        close(model, expected)
    equal_everywhere(hvd, model)


@case()
def frozen_from_the_start(hvd: Hvd) -> None:
    model, expected = net(), net()
    for module in (model, expected):
        module[0].requires_grad_(False)
    optimizer = wrap(hvd, model)
    train(hvd, model, optimizer, range(3))
    close(model, by_hand(3, model=expected))
    assert all(p.grad is None for p in model[0].parameters())
    close(model[0], net()[0])


@case()
def frozen_later(hvd: Hvd) -> None:
    """Without momentum and weight decay, which would act on the gradient of zeros."""

    def change(model: Any, optimizer: Any, step: int) -> None:
        if step == 2:
            model[0].requires_grad_(False)

    alike(hvd, plain, change)


@case()
def frozen_in_every_other_step(hvd: Hvd) -> None:
    def change(model: Any, optimizer: Any, step: int) -> None:
        model[0].requires_grad_(step % 2 == 0)

    alike(hvd, plain, change)


@case(stronger="parameters that are unfrozen after the construction are reduced")
def unfrozen_later(hvd: Hvd) -> None:
    model, expected = net(), net()
    for module in (model, expected):
        module[0].requires_grad_(False)
    optimizer, by_itself = wrap(hvd, model), sgd(expected.parameters())
    for step in range(5):
        if step == 2:
            for module in (model, expected):
                module[0].requires_grad_(True)
        update(model, optimizer, shard(hvd, step))
        update(expected, by_itself, batch(step))
        close(model, expected)
    equal_everywhere(hvd, model)


@case(stronger="parameters that are added after the construction are reduced")
def added_later(hvd: Hvd) -> None:
    for before_any_step in (True, False):
        model, expected = net(), net()
        optimizer = hvd.DistributedOptimizer(
            sgd(model[0].parameters()), list(model[0].named_parameters())
        )
        by_itself = sgd(expected[0].parameters())
        for step in range(4):
            if step == (0 if before_any_step else 2):
                optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
                by_itself.add_param_group({"params": list(expected[2].parameters()), "lr": 0.02})
            model.zero_grad()
            loss(model, shard(hvd, step)).backward()
            optimizer.step()
            expected.zero_grad()
            loss(expected, batch(step)).backward()
            by_itself.step()
            close(model, expected)


@case()
def state_is_loaded_and_training_goes_on(hvd: Hvd) -> None:
    for make in (sgd, adamw):
        model = net()
        optimizer = wrap(hvd, model, make)
        train(hvd, model, optimizer, range(2))
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        train(hvd, model, optimizer, range(5, 7))

        model.load_state_dict(saved[0])  # into the one that has gone on
        optimizer.load_state_dict(copy.deepcopy(saved[1]))  # torch would go on with these tensors
        train(hvd, model, optimizer, range(2, 4))
        close(model, by_hand(4, make))

        fresh = net(3)  # and into a new one
        wrapped = wrap(hvd, fresh, make)
        fresh.load_state_dict(saved[0])
        wrapped.load_state_dict(saved[1])
        train(hvd, fresh, wrapped, range(2, 4))
        close(fresh, by_hand(4, make))


@case()
def loaded_options_are_used(hvd: Hvd) -> None:
    """Loading replaces the groups: from then on the original has none in common."""
    model = net()
    optimizer = wrap(hvd, model)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.0
    state["param_groups"][0]["weight_decay"] = 0.0
    optimizer.load_state_dict(state)
    train(hvd, model, optimizer, range(2))
    close(model, net())


@case(sizes=(2, 3))
def loading_drops_what_is_under_way(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model)
    loss(model, shard(hvd, 9)).backward()
    hvd.barrier()  # all have submitted
    time.sleep(0.2)  # what was submitted comes to its end
    optimizer.load_state_dict(sgd(model.parameters()).state_dict())
    optimizer.zero_grad()
    train(hvd, model, optimizer, range(3))
    close(model, by_hand(3))


@case()
def parameters_of_another_type_later(hvd: Hvd) -> None:
    """A model that is made wider between steps, as `model.double()` does, in place."""
    model, expected = net().float(), net().float()
    optimizer, by_itself = wrap(hvd, model, plain), plain(expected.parameters())
    for step in range(4):
        if step == 2:
            model.double()
            expected.double()
        optimizer.zero_grad()
        by_itself.zero_grad()
        dtype = model[0].weight.dtype
        x, y = shard(hvd, step)
        loss(model, (x.to(dtype), y.to(dtype))).backward()
        x, y = batch(step)
        loss(expected, (x.to(dtype), y.to(dtype))).backward()
        optimizer.step()
        by_itself.step()
    for p, value in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, value, rtol=1e-5, atol=1e-6)
    equal_everywhere(hvd, model)


class Duel:
    """Two nets in turn, as a GAN has them, with hvd's optimizers or plain ones."""

    def __init__(self, hvd: Hvd | None, named: bool, **options: Any) -> None:
        self.maker, self.judge = net(4), nn.Sequential(nn.Linear(3, 1)).double()
        for p in self.judge.parameters():
            p.data.fill_(0.3)
        self.opt_maker, self.opt_judge = (
            adamw(self.maker.parameters()),
            sgd(self.judge.parameters()),
        )
        if hvd is not None:
            for kind in ("maker", "judge"):
                model = getattr(self, kind)
                names = [(f"{kind}.{k}", p) for k, p in model.named_parameters()]
                wrapped = hvd.DistributedOptimizer(
                    getattr(self, f"opt_{kind}"),
                    names if named else model.named_parameters(),
                    **options,
                )
                setattr(self, f"opt_{kind}", wrapped)

    def losses(self, data: tuple[torch.Tensor, torch.Tensor]) -> tuple[Any, Any]:
        """What the judge wants, and what the maker wants."""
        made = self.maker(data[0])
        judged = self.judge(data[1]).mean() - self.judge(made.detach()).mean()
        return judged, self.judge(made).square().mean()

    def step(self, data: tuple[torch.Tensor, torch.Tensor]) -> None:
        """A step of the judge, then one of the maker with the judge frozen."""
        self.opt_judge.zero_grad()
        self.losses(data)[0].backward()
        self.opt_judge.step()
        self.judge.requires_grad_(False)
        self.opt_maker.zero_grad()
        self.losses(data)[1].backward()
        self.opt_maker.step()
        self.judge.requires_grad_(True)


@case()
def two_optimizers_in_turn(hvd: Hvd) -> None:
    for named in (True, False):
        ours, plain_ones = Duel(hvd, named), Duel(None, named)
        for step in range(4):
            ours.step(shard(hvd, step))
            plain_ones.step(batch(step))
        close(ours.maker, plain_ones.maker)
        close(ours.judge, plain_ones.judge)


def both_at_once(hvd: Hvd, named: bool) -> None:
    """Both losses go backward before either step; in which order, differs between the ranks."""
    ours, plain_ones = Duel(hvd, named), Duel(None, named)
    for step in range(4):
        for duel, data in ((ours, shard(hvd, step)), (plain_ones, batch(step))):
            duel.opt_judge.zero_grad()
            duel.opt_maker.zero_grad()
            inputs = [list(duel.judge.parameters()), list(duel.maker.parameters())]
            pairs = list(zip(duel.losses(data), inputs, strict=True))
            for value, parameters in pairs[:: -1 if last(hvd) else 1]:
                value.backward(inputs=parameters)
            duel.opt_judge.step()
            duel.opt_maker.step()
    close(ours.maker, plain_ones.maker)
    close(ours.judge, plain_ones.judge)


@case()
def two_optimizers_at_once(hvd: Hvd) -> None:
    both_at_once(hvd, named=True)


@case(stronger="the parameters of two optimizers under way may have equal names", sizes=(2, 3))
def two_optimizers_of_equal_names_at_once(hvd: Hvd) -> None:
    both_at_once(hvd, named=False)


@case()
def two_optimizers_that_step_in_another_order(hvd: Hvd) -> None:
    ours, plain_ones = Duel(hvd, True), Duel(None, True)
    for step in range(4):
        for duel, data in ((ours, shard(hvd, step)), (plain_ones, batch(step))):
            order = [duel.opt_judge, duel.opt_maker]
            for optimizer in order:
                optimizer.zero_grad()
            judged, made = duel.losses(data)
            judged.backward(inputs=list(duel.judge.parameters()))
            made.backward(inputs=list(duel.maker.parameters()))
            for optimizer in order[:: -1 if last(hvd) else 1]:
                optimizer.step()
    close(ours.maker, plain_ones.maker)
    close(ours.judge, plain_ones.judge)


@case()
def two_optimizers_of_one_net(hvd: Hvd) -> None:
    """Layers with optimizers of their own, and one loss."""
    model, expected = net(), net()
    named = list(model.named_parameters())
    wrapped = [
        hvd.DistributedOptimizer(sgd([p for _, p in named[:2]]), named[:2]),
        hvd.DistributedOptimizer(adamw([p for _, p in named[2:]]), named[2:]),
    ]
    parameters = list(expected.parameters())
    alone = [sgd(parameters[:2]), adamw(parameters[2:])]
    for step in range(4):
        for module, optimizers, data in (
            (model, wrapped, shard(hvd, step)),
            (expected, alone, batch(step)),
        ):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss(module, data).backward()
            for optimizer in optimizers:
                optimizer.step()
    close(model, expected)
