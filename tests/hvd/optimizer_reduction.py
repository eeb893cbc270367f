"""How gradients are combined: operations, factors, groups, compression, sparse ones; see
optimizer_table.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from tests.hvd.behaviour import Hvd, added, one_parameter, raises
from tests.hvd.optimizer_table import (
    Recorder,
    adamw,
    backward,
    case,
    close,
    each_ranks,
    equal_everywhere,
    grads,
    loss,
    net,
    part,
    plain,
    shard,
    side_by_side,
    synchronized,
    tensors,
    train,
    twin,
    update,
    wrap,
    wrapped,
)
from tests.hvd.optimizer_training import GUARD, TOO_MANY
from tests.hvd.test_properties import OPS, REDUCE, adasum


@case()
def every_operation_and_half_precision(hvd: Hvd) -> None:
    none, half = hvd.Compression.none, hvd.Compression.fp16
    for op, compression in (*((op, none) for op in OPS[:5]), ("Average", half)):
        model, optimizer = wrapped(hvd, plain, op=getattr(hvd, op), compression=compression)
        for step in range(3):
            local = zip(*each_ranks(hvd, twin(model), step), strict=True)
            expected = [REDUCE[op](torch.stack(every_ranks)) for every_ranks in local]
            if op == "Average":
                expected = [total / hvd.size() for total in expected]
            optimizer.zero_grad()
            backward(hvd, model, step)
            held = grads(model)
            with synchronized(optimizer):
                assert all(a is b for a, b in zip(held, grads(model), strict=True))
                close(grads(model), expected, 1e-12 if compression is none else 2e-3)
        equal_everywhere(hvd, model)


def check_average_of_halves(hvd: Hvd, value: int, average: float, **how: Any) -> None:
    """In every step, be its gradients sent by name or in buckets."""
    p, optimizer = one_parameter(hvd, compression=hvd.Compression.fp16, **how)
    for _ in range(3):
        optimizer.zero_grad()
        (p * value).sum().backward()  # type: ignore[no-untyped-call]
        with synchronized(optimizer):
            torch.testing.assert_close(p.grad, torch.full((4,), average), rtol=1e-3, atol=0)


@case(sizes=(2, 3))
def a_sum_of_halves_overflows_unless_predivided(hvd: Hvd) -> None:
    check_average_of_halves(hvd, 40_000, torch.inf)
    check_average_of_halves(hvd, 49_152, 49_152.0, gradient_predivide_factor=float(hvd.size()))


@case(real="gradients in groups are not predivided", sizes=(2, 3))
def groups_are_not_predivided(hvd: Hvd) -> None:
    how = {"gradient_predivide_factor": float(hvd.size()), "groups": 1}
    check_average_of_halves(hvd, 49_152, torch.inf, **how)


@case(sizes=(2, 3))
def a_compressor_of_ones_own(hvd: Hvd) -> None:
    """A class or an instance, called once for each parameter and step."""
    for compressor in (Recorder, Recorder()):
        for groups in (None, 2):
            Recorder.compressed.clear()
            Recorder.decompressed.clear()
            for _, model, optimizer, data in side_by_side(
                hvd, steps=3, tolerance=1e-5, compression=compressor, groups=groups
            ):
                update(model, optimizer, data)
            once = Counter(p.shape for p in net().parameters())
            assert Recorder.compressed == Counter({k: 3 * v for k, v in once.items()})
            assert Recorder.decompressed == Recorder.compressed


class Words(nn.Module):
    """An embedding whose gradients are sparse, and a layer whose are not."""

    def __init__(self, sparse: bool, rows: int = 10) -> None:
        super().__init__()
        table = torch.arange(4 * rows, dtype=torch.double).reshape(rows, 4) / 10
        self.table = nn.Embedding(rows, 4, sparse=sparse, _weight=table.clone())
        self.out = net()[0]

    def forward(self, words: Tensor) -> Any:
        return self.out(self.table(words)).square().mean()


def words(rank: int, step: int) -> Tensor:
    """The rows that a rank uses, some of them several times, some on several ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 7, (6,), generator=generator)


def sparse_training(
    hvd: Hvd, users: Container[int], lacking: int = 1, rows: int = 10, **options: Any
) -> None:
    """Train the embedding; in the step `lacking` only the ranks `users` use it."""
    model, expected = Words(True, rows), Words(False, rows)
    optimizer = wrap(hvd, model, plain, **options)
    by_itself = plain(expected.parameters())

    def value(module: Words, rank: int, step: int) -> Tensor:
        if step != lacking or rank in users:
            return module(words(rank, step))  # type: ignore[no-any-return]
        return module.out(torch.ones(4, dtype=torch.double)).sum()  # type: ignore[no-any-return]

    for step in range(3):
        optimizer.zero_grad()
        value(model, hvd.rank(), step).backward()  # type: ignore[no-untyped-call]
        held = model.table.weight.grad
        optimizer.step()
        found = model.table.weight.grad
        assert held is found or held is None or options
        assert found is None or found.is_sparse or step == lacking
        by_itself.zero_grad()
        for rank in range(hvd.size()):
            (value(expected, rank, step) / hvd.size()).backward()
        by_itself.step()
    close(model, expected)
    equal_everywhere(hvd, model)


@case()
def sparse_gradients(hvd: Hvd) -> None:
    everyone = range(hvd.size())
    sparse_training(hvd, everyone)
    for users, rows in ((everyone, 10), ([0], 5000)):
        sparse_training(hvd, users, rows=rows, sparse_as_dense=True)


@case(stronger="a rank may lack a sparse gradient, in the first step too", sizes=(2, 3))
def sparse_gradients_that_some_lack(hvd: Hvd) -> None:
    for lacking in (0, 1):
        for users in ([0], [1]):
            sparse_training(hvd, users, lacking)


@case(sizes=(2, 3))
def on_a_process_set(hvd: Hvd) -> None:
    """Members average among themselves; the others apply their own gradients."""
    members = [0, 2] if hvd.size() == 3 else [1]
    inside = members if hvd.rank() in members else [hvd.rank()]
    with added(hvd, *members) as small:
        # Horovod takes the order of groups from rank 0, which must be a member then.
        for groups in (None, 2) if 0 in members else (None,):
            model, expected = net(), net()
            optimizer = wrap(hvd, model, adamw, process_set=small, groups=groups)
            by_itself = adamw(expected.parameters())
            for step in range(3):
                locals_ = [each_ranks(hvd, expected, step)[rank] for rank in inside]
                for p, *local in zip(expected.parameters(), *locals_, strict=True):
                    p.grad = torch.stack(local).mean(0)
                by_itself.step()
                update(model, optimizer, shard(hvd, step))
            close(model, expected)


ADASUM_ARMS = ("horovod-mpi", "hvd-")


def combined(start: nn.Module, ends: list[Any]) -> list[Tensor]:
    """What Adasum makes of two ranks' steps from one start."""
    values = zip(*(tensors(model) for model in (start, *ends)), strict=True)
    return [s + adasum([a - s, b - s]) for s, a, b in values]


@case(sizes=(2,), arms=ADASUM_ARMS)
def adasum_combines_the_steps(hvd: Hvd) -> None:
    """Each rank makes a step of its own; what is combined, by parameter, is how far it came."""
    for passes in (1, 2):
        model, optimizer = wrapped(hvd, adamw, op=hvd.Adasum, backward_passes_per_step=passes)
        assert issubclass(type(optimizer), torch.optim.AdamW)
        seen: list[Any] = []  # by a hook of the step: the combined updates
        optimizer.register_step_post_hook(lambda *_, m=model, seen=seen: seen.append(twin(m)))
        twins = [net(), net()]
        own = [adamw(t.parameters()) for t in twins]
        for step in range(0, 3 * passes, passes):
            start = twin(model)
            for rank, (module, by_itself) in enumerate(zip(twins, own, strict=True)):
                update(module, by_itself, *(part(rank, 2, step + k) for k in range(passes)))
            optimizer.zero_grad()
            for k in range(passes):
                backward(hvd, model, step + k)
            optimizer.synchronize()
            optimizer.step()
            close(seen[-1], model, 0.0)
            close(model, combined(start, twins), 1e-10)
            for module in twins:
                module.load_state_dict(model.state_dict())


@case(sizes=(2,), arms=ADASUM_ARMS)
def adasum_with_a_closure(hvd: Hvd) -> None:
    """It may zero the gradients, unless some were computed before the step."""
    model, optimizer = wrapped(hvd, op=hvd.Adasum)

    def closure() -> Any:
        optimizer.zero_grad()
        value = loss(model, shard(hvd, 0))
        value.backward()
        return value

    for _ in range(2):
        before = loss(model, shard(hvd, 0))
        assert optimizer.step(closure) == before
        equal_everywhere(hvd, model)
    backward(hvd, model, 0)
    with raises(AssertionError, GUARD):
        optimizer.step(closure)
    optimizer.step()
    equal_everywhere(hvd, model)


@case(stronger="with Adasum too, parameters that are added move", sizes=(2,))
def adasum_moves_what_is_added(hvd: Hvd) -> None:
    model, more = net(), net(1)
    optimizer = wrap(hvd, model, op=hvd.Adasum)
    optimizer.add_param_group({"params": list(more.parameters())})
    train(hvd, more, optimizer, range(2))
    equal_everywhere(hvd, more)
    assert not torch.equal(more[0].weight, net(1)[0].weight)
    with raises(AssertionError, TOO_MANY):
        for _ in range(2):
            backward(hvd, more, 0)
    optimizer.step()
