"""Any calls of the collectives, drawn from a seed, against the same computed in plain torch.

A seed draws the calls: form, dtype, reduction, factors, shape, memory, process set, name. Every
rank derives all ranks' inputs from them, so it can compute what must come out, and the gradients.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.hvd.behaviour import (
    MOVED,
    REDUCED,
    Hvd,
    align_handles,
    has_adasum,
    is_real,
    run_case,
)
from tests.hvd.pool import REAL_ARMS, HvdRanks

OURS = (*MOVED, torch.bfloat16, torch.bool, torch.complex64, torch.complex128)
KINDS = "allreduce allgather broadcast alltoall reducescatter".split()
IN_PLACE, GROUPED = ("allreduce", "broadcast"), ("allreduce", "allgather", "reducescatter")
REDUCING = ("allreduce", "reducescatter")
OPS = "Sum Average Min Max Product Adasum".split()
LAYOUTS = "contiguous turned part channels_last conjugate negative odd_stride inference".split()
CONJUGATE = ["conjugate"] * len(LAYOUTS)
FACTORS = ((1.0, 1.0), (0.5, 1.0), (1.0, 0.25), (2, 3), (-1, 0.5), (0.0, 1), (0.5, 3.0))
RETURNS = {"allreduce": list, "allreduce_": tuple, "allgather": tuple, "reducescatter": list}


@dataclass(frozen=True)
class Call:
    """One call; what differs between ranks comes from the seed and the rank."""

    kind: str
    dtype: torch.dtype
    op: str
    seed: int
    members: tuple[int, ...]  # of its process set
    in_place: bool = False
    grouped: bool = False
    factors: tuple[float, float] = (1.0, 1.0)
    shape: tuple[int, ...] = (3,)
    layout: str = "contiguous"
    unsent: int = 0  # rows beyond the splits of an alltoall

    @property
    def size(self) -> int:
        return len(self.members)

    def rows(self, rank: int) -> list[int]:
        """How many rows a rank gathers, or sends to each rank and to none: without splits, the same
        to all.
        """
        if self.seed % 4 == 0:
            return [1 + self.seed % 3] * self.size
        dice = random.Random(self.seed * 31 + rank)
        return [*(dice.randint(0, 3) for _ in range(self.size)), self.unsent]

    def inputs(self, rank: int) -> list[Tensor]:
        """What this rank puts in, as plain tensors: small whole numbers, exact in every dtype."""
        shape, tail = self.shape, self.shape[1:]
        if self.kind == "allgather":
            shape = (self.rows(rank)[0], *tail)
        elif self.kind == "alltoall":
            shape = (sum(self.rows(rank)), *tail)
        elif self.kind == "reducescatter":
            shape = (self.seed % 7, *tail)
        generator = torch.Generator().manual_seed(self.seed * 31 + rank)
        low = 0 if self.dtype in (torch.uint8, torch.bool) or self.op == "Product" else -3
        made = torch.randint(low, 2 if self.dtype == torch.bool else 4, shape, generator=generator)
        first = made.to(self.dtype)
        if self.dtype.is_complex:
            first = first * (1 + 2j)
        second = (first.flip(0) if first.dim() else first) + 1
        return [first, second.to(self.dtype)][: 1 + self.grouped]

    def arguments(self, hvd: Hvd, rank: int) -> dict[str, Any]:
        """Those of the call beside its tensors, its name and its process set."""
        if self.kind == "broadcast":
            return {"root_rank": self.members[self.seed % self.size]}
        if self.kind == "alltoall" and self.seed % 4:
            splits = self.rows(rank)[: self.size]
            return {"splits": splits if self.seed % 2 else torch.tensor(splits, dtype=torch.int32)}
        before, after = self.factors
        scaled = {"prescale_factor": before, "postscale_factor": after}
        return {"op": getattr(hvd, self.op), **scaled} if self.kind in REDUCING else {}

    def reduced(self, tensors: list[Tensor]) -> Tensor:
        """The reduction with its factors; whole numbers are cut toward zero after each of them."""
        before, after = self.factors
        wide = torch.complex128 if self.dtype.is_complex else torch.float64
        scaled = [(t.to(wide) * before).to(self.dtype).to(wide) for t in tensors]
        after = after / len(tensors) if self.op == "Average" else after
        return (REDUCE[self.op](torch.stack(scaled)) * after).to(self.dtype)

    def expected(self, rank: int) -> list[Tensor]:
        """What comes out on this rank, by its number among the members."""
        found = []
        for tensors in zip(*(self.inputs(r) for r in range(self.size)), strict=True):
            if self.kind == "allgather":
                found.append(torch.cat(tensors))
            elif self.kind == "broadcast":
                found.append(tensors[self.seed % self.size])
            elif self.kind == "alltoall":
                parts = [torch.split(t, self.rows(r))[rank] for r, t in enumerate(tensors)]
                found.append(torch.cat(parts))
            else:
                whole = self.reduced(list(tensors))
                scattered = self.kind == "reducescatter"
                found.append(torch.tensor_split(whole, self.size)[rank] if scattered else whole)
        return found

    def upstream(self, rank: int) -> list[Tensor]:
        """The gradients that reach the outputs of this rank."""
        return [
            torch.full_like(output, rank + 1 + i, dtype=self.dtype)
            for i, output in enumerate(self.expected(rank))
        ]

    def gradients(self, rank: int) -> list[Tensor]:
        """The gradients that reach the inputs of this rank."""
        found = []
        for ups in zip(*(self.upstream(r) for r in range(self.size)), strict=True):
            if self.kind == "allreduce":
                found.append(self.reduced(list(ups)))
            elif self.kind == "alltoall":
                received = [[self.rows(s)[r] for s in range(self.size)] for r in range(self.size)]
                parts = [torch.split(up, received[r])[rank] for r, up in enumerate(ups)]
                unsent = sum(self.rows(rank)[self.size :])
                found.append(torch.cat([*parts, parts[0].new_zeros(unsent, *parts[0].shape[1:])]))
            elif self.kind == "reducescatter":
                before, after = self.factors
                times = before * after * (self.size if self.op == "Sum" else 1)
                found.append(torch.cat(ups) * times)
            else:
                mean = torch.stack(ups).mean(0)
                if self.kind == "broadcast":
                    found.append(mean if rank == self.seed % self.size else torch.zeros_like(mean))
                else:
                    rows = [self.rows(r)[0] for r in range(self.size)]
                    grouped = torch.split(mean, rows) if sum(rows) else [mean] * self.size
                    found.append(grouped[rank])
        return found

    def check(self, got: Any, rank: int) -> None:
        """Compare what a call has returned, or its handle, with what must come out."""
        if self.kind == "alltoall" and isinstance(got, tuple):
            got, received = got
            assert received.dtype == torch.int32
            assert received.tolist() == [self.rows(r)[rank] for r in range(self.size)]
        outputs = got if self.grouped else [got]
        for output, value in zip(outputs, self.expected(rank), strict=True):
            torch.testing.assert_close(output.detach().clone(), value)


def draw(
    dice: random.Random, hvd: Hvd, sets: list[tuple[int, ...]], kind: str = "", **fixed: Any
) -> Call:
    """Draw a call that the library supports; `fixed` are its dtype, op or shape."""
    real, kind = is_real(hvd), kind or dice.choice(KINDS)
    reduces = kind in REDUCING
    dtype = fixed.get("dtype") or dice.choice((REDUCED if reduces else MOVED) if real else OURS)
    op = fixed.get("op") or dice.choice(ops_of(kind, dtype, hvd))
    exact = dtype in (torch.bool, torch.int8, torch.uint8) or op in ("Product", "Adasum")
    return Call(
        kind,
        dtype,
        op,
        dice.randrange(1 << 16),
        dice.choice(sets) if op != "Adasum" else sets[0],
        in_place=kind in IN_PLACE and dice.random() < 0.5,
        grouped=kind in GROUPED and dice.random() < 0.5,
        factors=FACTORS[0] if exact or not reduces else dice.choice(FACTORS),
        shape=fixed.get("shape") or tuple(dice.choices(range(5), k=dice.randrange(5))),
        layout="contiguous" if real else dice.choice(LAYOUTS + CONJUGATE * dtype.is_complex),
        unsent=0 if real else dice.randrange(2),
    )


def ops_of(kind: str, dtype: torch.dtype, hvd: Hvd) -> list[str]:
    """The reductions of a collective that the library has for a dtype."""
    ops = OPS[:2] if kind == "reducescatter" else OPS[:5] if kind == "allreduce" else OPS[:1]
    if dtype == torch.bool:
        return [op for op in ops if op in ("Sum", "Min", "Max")]
    if dtype.is_complex:
        return ops[:2]
    adasum = kind == "allreduce" and dtype in REDUCED[3:] and has_adasum(hvd)
    return ops + ["Adasum"] * adasum


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The same tensor in other memory, or as it is where it cannot be so."""
    if layout == "turned" and t.dim() > 1:
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "part":
        memory = torch.stack([t, torch.ones_like(t)], -1)
        return memory[..., 0]
    if layout == "channels_last" and t.dim() == 4:
        return t.to(memory_format=torch.channels_last)
    if layout == "odd_stride" and t.dim() and t.shape[0] == 1:  # and contiguous all the same
        return torch.cat([t, torch.ones_like(t)], -1)[..., : t.shape[-1]]
    if layout == "conjugate" and t.is_complex():
        return t.conj().resolve_conj().conj()
    if layout == "negative" and t.dtype in (torch.float32, torch.float64):
        return torch.complex(torch.zeros_like(t), -t).conj().imag
    if layout == "inference":
        with torch.inference_mode():
            return t.clone()
    return t.clone()


def adasum(tensors: list[Tensor]) -> Tensor:
    """Combine pairs, then pairs of these: each part is shortened along the other."""
    if len(tensors) == 1:
        return tensors[0]
    half = len(tensors) // 2
    a, b = adasum(tensors[:half]), adasum(tensors[half:])
    dot, aa, bb = ((x * y).sum() for x, y in ((a, b), (a, a), (b, b)))
    first, second = (1 - dot / (2 * square) if square else 1.0 for square in (aa, bb))
    return first * a + second * b


REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "Sum": lambda stacked: stacked.sum(0),
    "Average": lambda stacked: stacked.sum(0),
    "Min": lambda stacked: stacked.amin(0),
    "Max": lambda stacked: stacked.amax(0),
    "Product": lambda stacked: stacked.prod(0),
    "Adasum": lambda stacked: adasum(list(stacked)),
}


class Running:
    """A call of this rank, from its begin to the comparison of its results."""

    def __init__(self, hvd: Hvd, call: Call, process_set: Any = None) -> None:
        self.hvd, self.call = hvd, call
        self.process_set = process_set or hvd.global_process_set
        self.rank = call.members.index(hvd.rank())
        self.plain = call.inputs(self.rank)
        self.layout = call.layout
        if call.layout not in ("contiguous", "inference") and call.seed % 2:  # each rank its own
            self.layout = LAYOUTS[(call.seed + self.rank) % (len(LAYOUTS) - 1)]
        self.tensors = [laid_out(t, self.layout) for t in self.plain]
        floating = call.dtype.is_floating_point
        if call.in_place and floating and call.layout == "contiguous" and call.seed % 2:
            self.tensors = [torch.nn.Parameter(t) for t in self.tensors]
        differentiable = floating and call.op != "Adasum" and call.layout != "inference"
        self.differentiable = differentiable and not call.in_place

    def start(self, name: str | None, asynchronous: bool = True) -> Any:
        call, hvd = self.call, self.hvd
        form = "_async" * asynchronous + "_" * call.in_place
        function = getattr(hvd, "grouped_" * call.grouped + call.kind + form)
        options = call.arguments(hvd, self.rank)
        what = self.tensors if call.grouped else self.tensors[0]
        got = function(what, name=name, process_set=self.process_set, **options)
        assert not asynchronous or type(got) is int
        return got

    def finish(self, got: Any, waited: bool) -> None:
        """Compare results, and what must have been left alone."""
        call = self.call
        if call.grouped:
            kind = tuple if waited else RETURNS[call.kind + "_" * call.in_place]
            assert type(got) is kind
        if call.kind == "alltoall":
            assert isinstance(got, tuple) is (waited or call.seed % 4 > 0)
        call.check(got, self.rank)
        for i, t in enumerate(self.tensors):
            if call.in_place:
                assert (got[i] if call.grouped else got) is t
                assert t.requires_grad is isinstance(t, torch.nn.Parameter)
                assert t.is_leaf
            else:
                assert torch.equal(t, self.plain[i]), "an input has changed"
            if self.layout == "part" and t._base is not None:
                assert bool((t._base[..., 1] == 1).all()), "other memory has changed"

    def differentiate(self, name: str | None) -> None:
        """Run it as a part of a graph, and compare the gradients, and the gradients of these."""
        call, rank = self.call, self.rank
        for t in self.tensors:
            t.requires_grad_()
        got = self.start(name, asynchronous=False)
        if call.kind == "alltoall" and isinstance(got, tuple):
            got = got[0]
        ups = [up.requires_grad_() for up in call.upstream(rank)]
        given = ups
        if not is_real(self.hvd):  # not contiguous
            given = [torch.stack([up, up], -1)[..., 0] for up in ups]
        twice = not is_real(self.hvd) or call.kind in ("allgather", "broadcast")
        gradients = torch.autograd.grad(
            got if call.grouped else [got], self.tensors, given, create_graph=twice
        )
        expected = call.gradients(rank)
        for gradient, value in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient.detach(), value)
        if twice:
            torch.autograd.backward(gradients, self.plain)
            # Means, as Horovod's.
            share = 1 / call.size if call.kind in ("allgather", "broadcast") else 1
            for up, value in zip(ups, call.expected(rank), strict=True):
                torch.testing.assert_close(up.grad, value * share)


def run_calls(hvd: Hvd, calls: list[Call], dice: random.Random) -> None:
    """Run them one after the other and differentiate them; then all at once, each rank in
    an order of its own, one of them late: four times, as names that are known are sent otherwise.
    """
    some = {call.members for call in calls if call.size < hvd.size()}
    sets = {members: hvd.add_process_set(list(members)) for members in sorted(some)}
    own = [call for call in calls if hvd.rank() in call.members]
    own.sort(key=lambda call: (-call.size, call.members))  # see `process_sets`
    inside = torch.inference_mode(not is_real(hvd) and dice.random() < 0.3)
    for call in own:
        name = "x" if call.seed % 2 else None
        running = Running(hvd, call, sets.get(call.members))
        with inside:
            got = running.start(name, asynchronous=False)
        running.finish(got, waited=False)
        running = Running(hvd, call, sets.get(call.members))
        if running.differentiable:
            running.differentiate(name)
    used: Counter[tuple[Any, ...]] = Counter()
    names = {}
    for call in own:  # an operation has a name once, in each process set
        scope = (call.kind, call.grouped, call.members)
        names[call] = f"x{used[scope]}"
        used[scope] += 1
    late, after = dice.randrange(hvd.size()), dice.randrange(8)
    for again in range(4):
        order = random.Random(dice.randrange(99) + hvd.rank() + again).sample(own, len(own))
        begun = []
        for place, call in enumerate(order):
            if hvd.rank() == late and place == after:
                time.sleep(0.005)
            running = Running(hvd, call, sets.get(call.members))
            with inside:
                begun.append((running, running.start(names[call])))
        for running, handle in reversed(begun):
            running.finish(hvd.synchronize(handle), waited=True)
    for process_set in sets.values():  # not if a call has failed: the others would hang in it
        assert hvd.remove_process_set(process_set)


def process_sets(hvd: Hvd, dice: random.Random) -> list[tuple[int, ...]]:
    """All ranks, thrice, and each process set of some of them; one of these with the real Horovod,
    where the members of two could not match calls without a name, or the gradients of any.
    """
    size = hvd.size()
    some = [m for k in range(1, size) for m in itertools.combinations(range(size), k)]
    return [tuple(range(size))] * 3 + ([dice.choice(some)] if is_real(hvd) else some)


def every_dtype(kind: str, hvd: Hvd) -> None:
    """Each with each reduction, in a small tensor, and in one that a transport moves."""
    reduces = kind in REDUCING
    dtypes = (REDUCED if reduces else MOVED) if is_real(hvd) else OURS
    dice = random.Random(kind)
    sets = process_sets(hvd, dice)
    calls = [
        draw(dice, hvd, sets, kind, dtype=dtype, op=op, shape=shape)
        for dtype in dtypes
        for op in ops_of(kind, dtype, hvd)
        for shape in [(3,), (1, 3, 2, 2), (3, 2, 5_000)] * (1 if reduces else 3)
    ]
    run_calls(hvd, calls, dice)


def any_calls(seed: int, hvd: Hvd) -> None:
    for number in range(10):
        dice = random.Random(10 * seed + number)
        sets = process_sets(hvd, dice)
        run_calls(hvd, [draw(dice, hvd, sets) for _ in range(dice.randrange(1, 9))], dice)
        align_handles(hvd)


ARMS = [*(("hvd-torchrun", n) for n in (2, 3, 4, 1)), ("hvd-mpirun", 2), ("hvd-horovodrun", 3)]
ARMS += REAL_ARMS
ROWS = [
    pytest.param(arm, what, marks=() if is_short else pytest.mark.exhaustive)
    for arm in ARMS
    for what in (*KINDS, 0, 1, 2)
    for is_short in [arm == ARMS[0] or arm[1] == 4 and what == "allreduce"]  # Adasum of two pairs
]


@pytest.mark.parametrize(("hvd_ranks", "what"), ROWS, indirect=["hvd_ranks"])
def test_equals_plain_torch(hvd_ranks: HvdRanks, what: str | int) -> None:
    """All dtypes and reductions of a collective; or, of this seed, any calls in any order."""
    function = partial(every_dtype, what) if isinstance(what, str) else partial(any_calls, what)
    hvd_ranks.run(run_case, function)
