"""How gradients are combined: operations, factors, groups, compression, sparse ones; see
optimizer_table.py.
"""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.hvd.behaviour import Hvd, last, raises
from tests.hvd.optimizer_passes import TOO_MANY
from tests.hvd.optimizer_table import (
    adamw,
    batch,
    by_hand,
    case,
    close,
    each_ranks,
    equal_everywhere,
    grads,
    loss,
    net,
    plain,
    shard,
    side_by_side,
    synchronized,
    tensors,
    train,
    twin,
    update,
    wrap,
)


@case()
def every_operation(hvd: Hvd) -> None:
    for op, combine in (
        (hvd.Sum, lambda stacked: stacked.sum(0)),
        (hvd.Min, lambda stacked: stacked.amin(0)),
        (hvd.Max, lambda stacked: stacked.amax(0)),
        (hvd.Product, lambda stacked: stacked.prod(0)),
        (hvd.Average, lambda stacked: stacked.mean(0)),
    ):
        model = net()
        optimizer = wrap(hvd, model, plain, op=op)
        for step in range(2):
            expected = [
                combine(torch.stack(local))  # type: ignore[no-untyped-call]
                for local in zip(*each_ranks(hvd, twin(model), step), strict=True)
            ]
            optimizer.zero_grad()
            loss(model, shard(hvd, step)).backward()
            with synchronized(optimizer):
                close(grads(model), expected)


@case()
def predivision_leaves_the_average(hvd: Hvd) -> None:
    for factor in (2.0, 0.3, float(hvd.size())):
        for groups in (None, 2):
            options: dict[str, Any] = {"gradient_predivide_factor": factor, "groups": groups}
            for _, model, optimizer, data in side_by_side(hvd, **options):
                update(model, optimizer, data)


@case(sizes=(2, 3))
def a_sum_of_halves_overflows_in_every_step(hvd: Hvd) -> None:
    """By one rule: the first step's gradients are sent by name, later ones in buckets."""
    p = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p], lr=1.0), [("p", p)], compression=hvd.Compression.fp16
    )
    for _ in range(3):
        optimizer.zero_grad()
        (p * 40_000.0).sum().backward()  # type: ignore[no-untyped-call]
        with synchronized(optimizer):
            assert p.grad is not None
            assert p.grad.tolist() == [torch.inf] * 3


@case(sizes=(2, 3))
def predivision_keeps_half_precision_in_range(hvd: Hvd) -> None:
    p = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p], lr=1.0),
        [("p", p)],
        compression=hvd.Compression.fp16,
        gradient_predivide_factor=float(hvd.size()),
    )
    (p * 49152).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), -49152.0), rtol=1e-3, atol=0)


@case()
def half_precision_compression(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model, plain, compression=hvd.Compression.fp16)
    for step in range(3):
        halves = [
            torch.stack([grad.half() for grad in local]).float().mean(0).double()
            for local in zip(*each_ranks(hvd, twin(model), step), strict=True)
        ]
        optimizer.zero_grad()
        loss(model, shard(hvd, step)).backward()
        held = grads(model)
        with synchronized(optimizer):
            assert all(a is b for a, b in zip(held, grads(model), strict=True))
            for grad, half in zip(grads(model), halves, strict=True):
                assert grad.dtype == torch.float64
                torch.testing.assert_close(grad, half, rtol=2e-3, atol=5e-4)
    equal_everywhere(hvd, model)


class Recorder:
    """A compressor of a user: it changes numbers, dtype and shape, and counts its calls."""

    compressed: Counter[torch.Size] = Counter()
    decompressed: Counter[torch.Size] = Counter()

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        Recorder.compressed[tensor.shape] += 1
        return (tensor / 2).float().flatten(), tensor.shape

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        Recorder.decompressed[context] += 1
        return (tensor * 2).double().reshape(context)


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


@case()
def groups_by_number_or_list(hvd: Hvd) -> None:
    def groupings(model: Any) -> list[Any]:
        return [
            *(1, 2, 3, 100, []),
            [[model[0].weight, model[2].bias]],
            [[model[2].bias], [model[0].bias, model[0].weight, model[2].weight]],
            [list(model.parameters())],
        ]

    for number in range(len(groupings(net()))):
        model = net()
        train(hvd, model, wrap(hvd, model, groups=groupings(model)[number]), range(3))
        close(model, by_hand(3))


def unused_in_a_group(hvd: Hvd, skips: bool) -> None:
    """Train with a bias that takes part on some ranks or on none: nothing is left waiting."""
    model = net()
    for p in model.parameters():
        p.data.zero_()
    optimizer = wrap(hvd, model, plain, op=hvd.Sum, groups=[[model[0].bias, model[2].bias]])
    for _ in range(3):
        optimizer.zero_grad()
        parts = [model[0].weight, model[2].weight, model[0].bias]
        parts += [] if skips else [model[2].bias]
        sum(part.sum() for part in parts).backward()
        optimizer.step()
    users = int(hvd.allreduce(torch.tensor(int(not skips)), op=hvd.Sum, name="users"))
    assert torch.equal(model[0].bias.detach(), torch.full((5,), -1.5 * hvd.size()).double())
    assert torch.equal(model[2].bias.detach(), torch.full((3,), -1.5 * users).double())


@case()
def groups_with_an_unused_member(hvd: Hvd) -> None:
    unused_in_a_group(hvd, skips=True)


@case(stronger="a group that is complete on some ranks only does not stall", sizes=(2, 3))
def groups_with_a_member_unused_somewhere(hvd: Hvd) -> None:
    unused_in_a_group(hvd, skips=last(hvd))


class Words(nn.Module):
    """An embedding whose gradients are sparse, and a layer whose are not."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        table = torch.arange(40, dtype=torch.double).reshape(10, 4) / 10
        self.table = nn.Embedding(10, 4, sparse=sparse, _weight=table.clone())
        self.out = net()[0]

    def forward(self, words: Tensor) -> Any:
        return self.out(self.table(words)).square().mean()


def words(rank: int, step: int) -> Tensor:
    """The rows that a rank uses, some of them several times, some on several ranks."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 7, (6,), generator=generator)


def sparse_training(hvd: Hvd, users: Iterable[int], steps: int = 3, **options: Any) -> None:
    """Train the embedding; of the ranks, `users` use it in the second step, all in the others."""
    model, expected = Words(sparse=True), Words(sparse=False)
    optimizer = wrap(hvd, model, plain, **options)
    by_itself = plain(expected.parameters())
    users = list(users)

    def value(module: Words, rank: int, step: int) -> Tensor:
        if step != 1 or rank in users:
            return module(words(rank, step))  # type: ignore[no-any-return]
        return module.out(torch.ones(4, dtype=torch.double)).sum()  # type: ignore[no-any-return]

    for step in range(steps):
        optimizer.zero_grad()
        value(model, hvd.rank(), step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert model.table.weight.grad is None or model.table.weight.grad.is_sparse or step == 1
        by_itself.zero_grad()
        for rank in range(hvd.size()):
            (value(expected, rank, step) / hvd.size()).backward()
        by_itself.step()
    close(model, expected)
    equal_everywhere(hvd, model)


@case()
def sparse_gradients(hvd: Hvd) -> None:
    sparse_training(hvd, range(3))
    for users in (range(3), [0]):
        sparse_training(hvd, users, sparse_as_dense=True)


@case(stronger="a rank may lack a sparse gradient", sizes=(2, 3))
def sparse_gradients_that_some_lack(hvd: Hvd) -> None:
    sparse_training(hvd, [0])


@case(stronger="a rank may lack a sparse gradient in the first step too", sizes=(2, 3))
def sparse_gradients_that_some_lack_at_first(hvd: Hvd) -> None:
    model = Words(sparse=True)
    optimizer = wrap(hvd, model, plain)
    before = model.table.weight.detach().clone()
    if last(hvd):
        (model.table(torch.tensor([1, 2])) * 2).sum().backward()
    else:
        model.out(torch.ones(4, dtype=torch.double)).sum().backward()
    optimizer.step()
    before[1:3] -= 1.0 / hvd.size()
    close([model.table.weight], [before])


@case(sizes=(2, 3), uneven=True)
def on_a_process_set(hvd: Hvd) -> None:
    """Members average among themselves; the others apply their own gradients."""
    members = [0, 2] if hvd.size() == 3 else [1]
    inside = members if hvd.rank() in members else [hvd.rank()]
    small = hvd.add_process_set(members)
    try:
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
    finally:
        assert hvd.remove_process_set(small)


ADASUM_ARMS = ("horovod-mpi", "hvd-torchrun", "hvd-mpirun", "hvd-horovodrun")


def adasum(a: Tensor, b: Tensor) -> Tensor:
    dot, aa, bb = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b


@case(sizes=(2,), arms=ADASUM_ARMS)
def adasum_combines_the_steps(hvd: Hvd) -> None:
    """Each rank makes a step of its own; what is combined, by parameter, is how far it came."""
    for passes in (1, 2):
        model = net()
        optimizer = wrap(hvd, model, adamw, op=hvd.Adasum, backward_passes_per_step=passes)
        assert issubclass(type(optimizer), torch.optim.AdamW)
        twins = [net(), net()]
        own = [adamw(t.parameters()) for t in twins]
        for step in range(0, 3 * passes, passes):
            start = [p.detach().clone() for p in model.parameters()]
            for rank, (module, by_itself) in enumerate(zip(twins, own, strict=True)):
                by_itself.zero_grad()
                sums = [torch.zeros_like(p) for p in module.parameters()]
                for k in range(passes):
                    local = each_ranks(hvd, module, step + k)[rank]
                    for total, grad in zip(sums, local, strict=True):
                        total += grad
                for p, total in zip(module.parameters(), sums, strict=True):
                    p.grad = total
                by_itself.step()
            ends = zip(start, *(t.parameters() for t in twins), strict=True)
            expected = [s + adasum(a.detach() - s, b.detach() - s) for s, a, b in ends]
            optimizer.zero_grad()
            for k in range(passes):
                loss(model, shard(hvd, step + k)).backward()
            optimizer.synchronize()
            optimizer.step()
            for p, value in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(p.detach(), value, rtol=1e-10, atol=1e-12)
            for module in (*twins, model):
                for p, value in zip(module.parameters(), expected, strict=True):
                    p.data.copy_(value)


@case(sizes=(2,), arms=ADASUM_ARMS)
def adasum_does_not_skip(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model, op=hvd.Adasum)
    text = "Skipping synchronization is not supported when using Adasum optimizer."
    with raises(AssertionError, text), optimizer.skip_synchronize():
        pass
    train(hvd, model, optimizer, range(2))
    equal_everywhere(hvd, model)


@case(sizes=(2,), arms=ADASUM_ARMS)
def adasum_counts_the_passes(hvd: Hvd) -> None:
    for passes in (1, 2):
        model = net()
        optimizer = wrap(hvd, model, op=hvd.Adasum, backward_passes_per_step=passes)
        for step in range(passes):
            loss(model, shard(hvd, step)).backward()
        with raises(AssertionError, TOO_MANY):
            loss(model, shard(hvd, passes)).backward()
        with raises(AssertionError, "optimizer.zero_grad() was called after loss.backward()"):
            optimizer.zero_grad()
        optimizer.step()
        train(hvd, model, optimizer, range(1))
        equal_everywhere(hvd, model)


@case(sizes=(2,), arms=ADASUM_ARMS)
def adasum_with_a_closure(hvd: Hvd) -> None:
    """It may zero the gradients, unless some were computed before the step."""
    model = net()
    optimizer = wrap(hvd, model, op=hvd.Adasum)

    def closure() -> Any:
        optimizer.zero_grad()
        value = loss(model, shard(hvd, 0))
        value.backward()
        return value

    for _ in range(2):
        before = loss(model, shard(hvd, 0))
        assert optimizer.step(closure) == before
        equal_everywhere(hvd, model)
    loss(model, shard(hvd, 0)).backward()
    with raises(AssertionError, "optimizer.zero_grad() was called after loss.backward()"):
        optimizer.step(closure)
    optimizer.step()
    equal_everywhere(hvd, model)


@case(sizes=(2,), arms=ADASUM_ARMS)
def step_hooks_see_the_combined_updates(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model, op=hvd.Adasum)
    seen: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(twin(model)))
    for step in range(3):
        train(hvd, model, optimizer, [step])
        close(seen[-1], model, 0.0)


@case(stronger="with Adasum too, a closure may run several times in a step", sizes=(2,))
def adasum_of_a_closure_that_runs_again(hvd: Hvd) -> None:
    def lbfgs(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    def own_step(model: nn.Module, optimizer: Any, rank: int, passes: int) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            x, y = (tensor[rank::2] for tensor in batch(0))
            for _ in range(passes):
                value = loss(model, (x, y))
                value.backward()
            return value

        optimizer.step(closure)

    for passes in (1, 2):
        twins = [net(), net()]
        for rank, module in enumerate(twins):
            own_step(module, lbfgs(module.parameters()), rank, passes)
        ends = zip(*(tensors(module) for module in (net(), *twins)), strict=True)
        model = net()
        optimizer = wrap(hvd, model, lbfgs, op=hvd.Adasum, backward_passes_per_step=passes)
        own_step(model, optimizer, hvd.rank(), passes)
        close(model, [s + adasum(a - s, b - s) for s, a, b in ends])
        own_step(model, optimizer, hvd.rank(), passes)
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
            loss(more, shard(hvd, 0)).backward()
    optimizer.step()


@case(stronger="optimizers of Adasum can be pickled and copied", sizes=(2,))
def adasum_can_be_pickled_and_copied(hvd: Hvd) -> None:
    for again in (copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))):
        model, expected = net(), net()
        optimizer = wrap(hvd, model, op=hvd.Adasum)
        train(hvd, expected, wrap(hvd, expected, op=hvd.Adasum), range(4))
        train(hvd, model, optimizer, range(2))
        model, optimizer = again((model, optimizer))  # type: ignore[no-untyped-call]
        train(hvd, model, optimizer, range(2, 4))
        close(model, expected)
        equal_everywhere(hvd, model)
