"""Random training runs, each made from a seed, compared with one process that plays all ranks.

The seed says everything, the ranks' differences included: which branches of its model a rank uses
in a pass, and in which order; how many passes it makes before a step; how many batches it has
before it joins; in which order it submits metrics of its own between backward and step, and when
it waits for them; and when it is late. Of the real Horovod a seed asks for what it can do. See
test_random_runs.py.
"""

from __future__ import annotations

import faulthandler
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.hvd.behaviour import Hvd, is_real
from tests.hvd.optimizer_table import close, synchronized
from tests.hvd.test_properties import KINDS, Call, Running

SEED_S = 12.0  # a run takes well under a second; this is when it hangs


OPTIMIZERS: list[Callable[..., torch.optim.Optimizer]] = [
    partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    partial(torch.optim.SGD, lr=0.1, weight_decay=0.01, momentum=0.5),
    partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1, eps=1e-4),
]


@dataclass(frozen=True)
class Share:
    """What a rank does in a step. `passes[k]` are the branches of its k-th pass, by optimizer."""

    passes: list[list[list[int]]]
    metrics: list[int]  # the order in which it submits them
    waits_early: list[bool]  # for which it waits before it steps
    steps: list[int]  # the order in which its optimizers step
    late: tuple[float, float]  # before backward, before step
    frozen: list[list[int]]  # branches that need no gradient in this step, by optimizer


@dataclass(frozen=True)
class Step:
    """A step of all ranks; ranks that have joined have no share."""

    number: int
    optimizers: list[int]  # those that take part
    metrics: list[tuple[str, Call]]  # operations of the script's own, with their names
    shares: list[Share | None]


class Plan:
    """A whole run of `n` ranks."""

    def __init__(self, seed: int, n: int, real: bool = False) -> None:
        self.seed, self.n = seed, n
        self.rng = rng = random.Random(seed)
        self.numbers = itertools.count()  # of the steps
        numbers = range(rng.choice([1, 1, 2]))
        # Whether all ranks use everything in every pass.
        self.total = rng.random() < 0.4
        self.branches = [rng.randint(1, 4) for _ in numbers]  # how many each optimizer has
        self.makes = [rng.choice(OPTIMIZERS) for _ in numbers]
        self.passes = [rng.choice([1, 1, 2, 3]) for _ in numbers]  # that each optimizer expects
        self.options = [self._options(o, self.total or not real) for o in numbers]
        self.clip = rng.random() < 0.3
        self.keep = rng.random() < 0.3  # zero the gradients instead of dropping them
        self.epochs: list[list[Step]] = []  # ranks join at the end of uneven ones
        for _ in range(rng.choice([1, 2, 2])):
            batches = [rng.randint(2, 5)] * n
            uneven = rng.random() < 0.4  # one or two ranks have fewer
            if uneven:
                for rank in rng.sample(range(n), rng.randint(1, max(1, n - 1))):
                    batches[rank] = rng.randint(0, batches[rank] - 1)
            steps = range(max(batches))
            self.epochs.append([self._step([s < b for b in batches]) for s in steps])
            if real and uneven:
                break
        # Equal optimizers are told apart by their first use, which may differ between ranks here.
        self.same_names = len({*self.branches}) == 2 and not real and rng.random() < 0.6

    def _options(self, o: int, groups: bool) -> dict[str, Any]:
        rng, factor = self.rng, self.rng.choice([1.0, 1.0, 2.0])
        options: dict[str, Any] = {"gradient_predivide_factor": factor}
        options["backward_passes_per_step"] = self.passes[o]
        if groups and rng.random() < 0.4:  # numbers of groups, or of parameters in two of them
            some = rng.sample(range(4 * self.branches[o]), 3)
            options["groups"] = rng.choice([1, 2, 4, [some[:2], some[2:]]])
        return options

    def _step(self, active: list[bool]) -> Step:
        rng = self.rng
        optimizers = rng.choice([[0], [1], [0, 1], [1, 0]]) if len(self.branches) == 2 else [0]
        metrics = [
            (f"metric.{i if rng.random() < 0.7 else rng.random()}", self._metric())
            for i in range(rng.randint(0, 4) if all(active) else 0)
        ]
        # Alike on all ranks, or on each its own.
        alike = self._frozen(1.0 - self.total) if rng.random() < 0.3 else None
        shares = [self._share(optimizers, len(metrics), alike) for _ in active]
        return Step(
            next(self.numbers),
            optimizers,
            metrics,
            [s if a else None for s, a in zip(shares, active, strict=True)],
        )

    def _metric(self) -> Call:
        rng = self.rng
        kind, shape, ranks = rng.choice(KINDS[:3]), (rng.choice([1, 5, 3000]),), (*range(self.n),)
        return Call(kind, torch.double, "Sum", rng.randrange(1 << 16), ranks, shape=shape)

    def _frozen(self, chance: float) -> list[list[int]]:
        rng, some = self.rng, self.rng.random() < chance
        return [rng.sample(range(b), rng.randint(0, b) if some else 0) for b in self.branches]

    def _share(self, optimizers: list[int], metrics: int, frozen: list[list[int]] | None) -> Share:
        rng, total = self.rng, self.total
        # Two ranks must not wait for each other's zeros: they step in different orders only where
        # all use everything in every pass, and not for the first time.
        before = [step.optimizers for steps in self.epochs for step in steps if all(step.shares)]
        steps = list(optimizers)
        if total and all(any(o in each for each in before) for o in optimizers):
            rng.shuffle(steps)
        window = min(self.passes[o] for o in optimizers)
        if not total and rng.random() < 0.2:
            window = rng.randint(1, window)  # this rank steps early
        passes = [
            [
                rng.sample(range(b), (b if total else rng.randint(0, b)) * (o in optimizers))
                for o, b in enumerate(self.branches)
            ]
            for _ in range(window)
        ]
        late = [rng.choice([0.0, 0.0, 0.0, 0.01]) for _ in range(2)]
        order = rng.sample(range(metrics), metrics)
        early = [rng.random() < 0.5 for _ in range(metrics)]
        frozen = frozen or self._frozen(0.2 * (not total))
        return Share(passes, order, early, steps, (late[0], late[1]), frozen)


# The model


def make_model(plan: Plan) -> list[nn.ModuleList]:
    """A list of branches for every optimizer, equal on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(plan.seed)
        return [
            nn.ModuleList(
                nn.Sequential(nn.Linear(3, 2 + i), nn.Tanh(), nn.Linear(2 + i, 2)).double()
                for i in range(branches)
            )
            for branches in plan.branches
        ]


def losses(
    plan: Plan, model: Sequence[nn.ModuleList], share: Share, number: int, rank: int, k: int
) -> list[Any]:
    """What each optimizer's branches lose in a rank's pass; the second looks at the first too."""
    for branches, frozen in zip(model, share.frozen, strict=True):
        for i, branch in enumerate(branches):
            branch.requires_grad_(i not in frozen)
    seed = (plan.seed * 1009 + number * 101 + rank) * 11 + k
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    found = []
    seen = torch.zeros(4, 2, dtype=torch.double)
    for branches, taken in zip(model, share.passes[k], strict=True):
        total = seen.detach()
        for i in taken:
            total = total + branches[i](x)
        value = (total - x[:, :2]).square().mean()
        if value.requires_grad:
            found.append(value)
        seen = total
    return found


# What the ranks do


def train(hvd: Hvd, plan: Plan) -> list[nn.ModuleList]:
    """Run this rank's part of the plan."""
    model = make_model(plan)
    optimizers = []
    for o, branches in enumerate(model):
        prefix = o * (not plan.same_names)
        names = [(f"net{prefix}.{name}", p) for name, p in branches.named_parameters()]
        inner = plan.makes[o](branches.parameters())
        options = dict(plan.options[o])
        if isinstance(options.get("groups"), list):
            parameters = [*branches.parameters()]
            options["groups"] = [[parameters[i] for i in group] for group in options["groups"]]
        optimizers.append(hvd.DistributedOptimizer(inner, names, **options))
    for steps in plan.epochs:
        for step in steps:
            share = step.shares[hvd.rank()]
            if share is not None:
                _one_step(hvd, plan, model, optimizers, step, share)
        if all(share is not None for step in steps for share in step.shares):
            continue
        last = hvd.join()
        assert steps[-1].shares[last] is not None
        for o, branches in enumerate(model):
            if not is_real(hvd):  # which needs state on all ranks, and moves weights to make it
                hvd.broadcast_optimizer_state(optimizers[o], root_rank=last)
            named = {f"{o}.{k}": v for k, v in branches.state_dict().items()}
            hvd.broadcast_parameters(named, root_rank=last)
    return model


def _one_step(
    hvd: Hvd,
    plan: Plan,
    model: list[nn.ModuleList],
    optimizers: list[Any],
    step: Step,
    share: Share,
) -> None:
    for o in step.optimizers:
        if plan.keep:
            model[o].zero_grad(set_to_none=False)
        else:
            optimizers[o].zero_grad()
    time.sleep(share.late[0])
    for k in range(len(share.passes)):
        for value in losses(plan, model, share, step.number, hvd.rank(), k):
            value.backward()
    metrics = {}
    for i in share.metrics:
        name, call = step.metrics[i]
        running = Running(hvd, call)
        metrics[i] = running, running.start(name)

    def finish(i: int) -> None:
        running, handle = metrics.pop(i)
        running.finish(hvd.synchronize(handle), waited=True)

    time.sleep(share.late[1])
    for i, early in enumerate(share.waits_early):
        if early:
            finish(i)
    for o in share.steps:
        _apply(plan, model[o], optimizers[o])
    for i in [*metrics]:
        finish(i)


def _apply(plan: Plan, branches: nn.ModuleList, optimizer: Any) -> None:
    """Make a step, of a wrapped optimizer or of a plain one."""
    if plan.clip:
        with synchronized(optimizer):
            nn.utils.clip_grad_norm_(branches.parameters(), 0.1)
    else:
        optimizer.step()


# What must come out


def by_hand(plan: Plan, n: int) -> list[nn.ModuleList]:
    """Play all ranks on one process, without hvd."""
    model = make_model(plan)
    optimizers = [
        make(branches.parameters()) for make, branches in zip(plan.makes, model, strict=True)
    ]
    for step in itertools.chain(*plan.epochs):
        for o in step.optimizers:
            for p in model[o].parameters():
                p.grad = torch.zeros_like(p)
        for rank, share in enumerate(step.shares):
            for k in range(len(share.passes) if share is not None else 0):
                assert share is not None
                for value in losses(plan, model, share, step.number, rank, k):
                    (value / n).backward()
        for o in step.optimizers:
            _apply(plan, model[o], optimizers[o])
    return model


def run_seeds(hvd: Hvd, seeds: Sequence[int]) -> None:
    """Run these plans. A run that hangs ends the process, with the seed in the output."""
    for seed in seeds:
        plan = Plan(seed, hvd.size(), is_real(hvd))
        try:
            print(f"rank {hvd.rank()} runs seed {seed}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(SEED_S, exit=True)
            model = train(hvd, plan)
            faulthandler.cancel_dump_traceback_later()
            for got, expected in zip(model, by_hand(plan, hvd.size()), strict=True):
                close(got, expected)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
