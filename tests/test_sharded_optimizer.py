"""The sharded step against the plain one, bit by bit, on one host and on several. The ranks are
threads of this process: they map one another's memory by its descriptor, as processes do. On live
ranks: tests/methods; on hosts with sshd: tests/launch/test_hosts.py.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hvdtrain.errors import HvdtrainError, InputError, WorldError, WorldMismatch
from hvdtrain.optim import shared_tensors
from hvdtrain.optim.sharded_optimizer import ELEMENTWISE, ShardedOptimizer, shard
from hvdtrain.optim.shared_tensors import Group
from hvdtrain.transports import shm_sync
from tests.runs import bits_of

pytestmark = pytest.mark.usefixtures("one_thread")


def on_threads(function: Callable[[Group], Any], hosts: str = "aa") -> list[Any]:
    """Call `function` on ranks that are threads; return what each returned or raised. `hosts` has a
    letter for each rank.
    """
    size = len(hosts)
    barrier = threading.Barrier(size, timeout=20)
    values: list[Any] = [None] * size

    def call(rank: int) -> Any:
        def all_gather(value: Any) -> list[Any]:
            values[rank] = pickle.dumps(value)
            barrier.wait()
            everyone = [pickle.loads(other) for other in values]
            barrier.wait()
            return everyone

        def all_sum(flags: Tensor) -> Tensor:
            return torch.stack(all_gather(flags)).sum(0)

        try:
            return function(Group(rank, size, all_gather, all_sum, hosts[rank]))
        except HvdtrainError as error:
            return error
        except BaseException:
            barrier.abort()  # as a lost rank: the others' collectives fail
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(call, rank) for rank in range(size)]
    return [future.exception() or future.result() for future in futures]


def assert_refused(
    rank: Callable[[Group], Any],
    text: str,
    kind: type[HvdtrainError] = InputError,
    hosts: str = "aa",
) -> None:
    """Require the same error on all ranks, which each of them knows to be on all."""
    for error in on_threads(rank, hosts):
        assert type(error) is kind
        assert error.on_all_ranks
        assert text in str(error)


class Model(nn.Module):
    """Parameters of one element, of less than a chunk, of many chunks, and not contiguous."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        seed = torch.Generator().manual_seed(0)  # the threads share torch's own
        shapes = {"scalar": (), "small": (7,), "large": (33, 61), "odd": (517,), "empty": (0,)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=seed).to(dtype)))
        image = (
            torch.randn(8, 4, 3, 3, generator=seed).to(dtype).to(memory_format=torch.channels_last)
        )
        self.image = nn.Parameter(image)


def set_gradients(model: nn.Module, step: int, missing: tuple[str, ...] = ()) -> None:
    """Give the parameters the same gradients on every rank, in the default memory format."""
    generator = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if name in missing else grad


def copy_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, **options)


def sharded(group: Group, make: Callable[[Any], Optimizer] = adamw, **of: Any) -> tuple[Any, Any]:
    """Return a model and its optimizer, whose step the ranks share."""
    model = Model(**of)
    optimizer = make(model)
    shard(optimizer, group, {p: name for name, p in model.named_parameters()})
    return model, optimizer


def assert_same_bits(
    make: Callable[[Any], Optimizer],
    train: Callable[[Any, Any], Any],
    hosts: str = "aa",
    **of: Any,
) -> None:
    """Compare what `train(model, optimizer)` returns on sharded ranks with that of a plain run."""
    plain = Model(**of)
    expected = bits_of(train(plain, make(plain)))
    for found in on_threads(lambda group: train(*sharded(group, make, **of)), hosts):
        assert bits_of(found) == expected


def take_steps(model: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    found = []
    for step in range(4):
        set_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
        found.append(copy_of(model, optimizer))
    return found


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "fused": True, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "foreach": True, "maximize": True},
    ],
    "Adam": [{}, {"amsgrad": True, "fused": True}, {"foreach": True, "weight_decay": 0.1}],
    "AdamW": [{"amsgrad": True}, {"fused": True}, {"foreach": True, "maximize": True}],
    "Adagrad": [{"fused": True, "lr_decay": 0.1}, {"initial_accumulator_value": 0.1}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "Rprop": [{}, {"foreach": True}],
}


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_each_optimizer_has_the_bits_of_its_plain_step(kind: Any) -> None:
    for options in VARIANTS.get(kind.__name__, [{}, {"weight_decay": 0.1}, {"foreach": True}]):

        def make(model: nn.Module, options: dict[str, Any] = options) -> Any:
            return kind(model.parameters(), **options)

        assert_same_bits(make, take_steps, "aaa")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("hosts", ["aabb", "abb", "abab"])
def test_each_host_divides_the_whole_step(hosts: str, dtype: torch.dtype) -> None:
    assert_same_bits(adamw, take_steps, hosts, dtype=dtype)


def test_memory_is_shared_within_a_host_alone() -> None:
    def rank(group: Group) -> tuple[float, int]:
        model, optimizer = sharded(group)
        take_steps(model, optimizer)
        group.all_gather_object(None)
        if group.rank == 0:
            with torch.no_grad():
                model.large.fill_(3.0)
        group.all_gather_object(None)
        for p in model.parameters():  # torch.save writes the whole storage
            assert p.untyped_storage().nbytes() == max(p.numel(), 1) * p.element_size()
        pieces = optimizer._sharding._pieces.values()
        return float(model.large.detach().mean()), sum(piece.numel() for piece, _, _ in pieces)

    found = on_threads(rank, "abab")
    total = sum(p.numel() for p in Model().parameters())
    assert [mean == 3.0 for mean, _ in found] == [True, False, True, False]
    assert found[0][1] + found[2][1] == found[1][1] + found[3][1] == total
    assert max(num for _, num in found) < 0.55 * total


def test_groups_schedules_frozen_late_and_added_parameters() -> None:
    def make(model: Any) -> Optimizer:
        groups = [
            {"params": [model.large, model.odd], "weight_decay": 0.3},
            {"params": [model.small, model.scalar], "lr": 0.01},
        ]
        return torch.optim.AdamW(groups, lr=0.1)

    def train(model: Any, optimizer: Optimizer) -> Any:
        found = []
        schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=9)
        for step in range(8):
            if step == 3:
                optimizer.add_param_group({"params": [model.image], "lr": 0.5})
                schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            late = ("odd",) if step < 2 else ()
            frozen = ("small",) if step > 3 else ()
            set_gradients(model, step, missing=late + frozen)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            found.append(copy_of(model, optimizer))
        return found

    assert_same_bits(make, train)


def test_state_is_loaded_and_replaced_between_steps() -> None:
    def train(model: Any, optimizer: Optimizer) -> Any:
        first = take_steps(model, optimizer)[1]
        optimizer.load_state_dict(copy.deepcopy(first["optimizer"]))
        take_steps(model, optimizer)
        for entry in optimizer.state.values():  # a restart of the momentum
            entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])
        take_steps(model, optimizer)
        optimizer.state.clear()
        found = take_steps(model, optimizer)
        optimizer.state[model.odd] = {}
        return found + take_steps(model, optimizer)

    assert_same_bits(adamw, train, "aaa")


def test_the_loss_scale_of_a_fused_optimizer() -> None:
    def train(model: Any, optimizer: Optimizer) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            set_gradients(model, step)
            scaler.scale(torch.ones(()))  # makes the scale
            if step == 2:
                model.small.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
        return copy_of(model, optimizer)

    for make in (adamw, partial(adamw, fused=True)):
        assert_same_bits(make, train)


def test_step_hooks_see_the_whole_optimizer() -> None:
    """They run outside the shared step, so that what they change is found, too: see REFUSED."""
    seen: list[tuple[bool, int]] = []

    def rank(group: Group) -> None:
        model, optimizer = sharded(group)

        def note(*_: Any) -> None:
            pairs = zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True)
            seen.append((all(a is b for a, b in pairs), len(optimizer.state)))

        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(note)
        take_steps(model, optimizer)

    on_threads(rank)
    num = len(list(Model().parameters()))
    assert sorted(seen) == [(True, 0)] * 2 + [(True, num)] * 14


def test_parameters_of_ones_own_may_be_changed() -> None:
    def train(model: Any, optimizer: Any) -> Any:
        found = []
        for _ in range(3):
            take_steps(model, optimizer)
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.unshare_parameters()
            with torch.no_grad():
                model.large.clamp_(-0.1, 0.1)
                model.odd.data.mul_(0.5)
                optimizer.state[model.odd]["exp_avg"].mul_(0.5)
            found.append(copy_of(model, optimizer))
        return found + take_steps(model, optimizer)

    assert_same_bits(adamw, train)


def write(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(0.5)


def _give_other_memory(p: Any) -> None:
    p.data = p.data.clone()


def _make_sparse(p: Any) -> None:
    p.grad = torch.ones(p.shape).to_sparse()


def _differ(model: Any, optimizer: Any, by: int) -> None:
    optimizer.unshare_parameters()
    model.large.data[3, 5] += by


# What a script does between two steps, with the model, its optimizer and the rank; the parameter or
# the state that the error names; its class, and the ranks' hosts.
REFUSED: dict[str, tuple[Any, ...]] = {
    "parameter": (lambda m, o, r: write(m.large), "large was changed outside"),
    "on one rank": (lambda m, o, r: write(m.large[: 33 * r]), "large was changed outside"),
    "on one host": (
        lambda m, o, r: write(m.large[: 33 * (r == 3)]),
        *("large was changed outside", InputError, "aabb"),
    ),
    "a hook": (
        lambda m, o, r: o.register_step_pre_hook(lambda *_: write(m.large)),
        "large was changed outside",
    ),
    "data": (lambda m, o, r: m.small.data.mul_(0.5), "small was changed outside"),
    "state": (
        lambda m, o, r: write(o.state[m.large]["exp_avg"]),
        "state of large was changed outside",
    ),
    "memory": (lambda m, o, r: _give_other_memory(m.odd), "odd was given other memory"),
    "sparse": (lambda m, o, r: _make_sparse(m.odd), "the gradient of odd is sparse"),
    "state on one rank": (
        lambda m, o, r: r or o.load_state_dict(copy.deepcopy(o.state_dict())),
        *("1 of 2 ranks have another state of the optimizer", WorldMismatch),
    ),
    "different parameters": (_differ, "large differs between rank 0 and rank 1"),
    "different hosts": (
        lambda m, o, r: _differ(m, o, r // 2),
        *("large differs between rank 0 and rank 2; broadcast the parameters", InputError, "aabb"),
    ),
}


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_changes_outside_a_step_are_refused_on_all_ranks(row: tuple[Any, ...]) -> None:
    change, *error = row

    def rank(group: Group) -> None:
        model, optimizer = sharded(group)
        take_steps(model, optimizer)
        set_gradients(model, 4)
        change(model, optimizer, group.rank)
        optimizer.step()

    assert_refused(rank, *error)


class _Own(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: _Own(parameters, lr=0.1),
        torch.optim.LBFGS,
        torch.optim.Adafactor,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, differentiable=True),
    ],
    ids=["subclass", "LBFGS", "Adafactor", "differentiable"],
)
def test_what_cannot_be_sharded(make: Any) -> None:
    assert_refused(
        lambda group: shard(make(nn.Linear(3, 3).parameters()), group, {}),
        "leave --shard-optimizer out",
    )


def test_a_closure_is_refused() -> None:
    assert_refused(lambda group: sharded(group)[1].step(lambda: 0.0), "call step()")


def test_memory_that_cannot_be_mapped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = shm_sync.map_peer

    def other_file(pid: int, fd: int, num_bytes: int) -> Any:
        mapping = real(pid, fd, num_bytes)
        mapping.map[:16] = bytes(16)  # as another process would have
        return mapping

    monkeypatch.setattr(shared_tensors, "map_peer", other_file)
    assert_refused(sharded, "rank 1 cannot map the memory of rank 0")


def test_a_lost_rank_leaves_no_state_to_save() -> None:
    is_in_step = threading.Event()

    def betas(rank: int) -> Iterator[float]:
        """Die on rank 1 in the middle of the step, when the other rank is there as well."""
        if rank == 1:
            assert is_in_step.wait(60)
            raise KeyboardInterrupt
        is_in_step.set()
        yield from (0.9, 0.99)

    def rank(group: Group) -> Any:
        model, optimizer = sharded(group)
        take_steps(model, optimizer)

        optimizer.param_groups[0]["betas"] = betas(group.rank)
        set_gradients(model, 4)
        try:
            optimizer.step()
        except threading.BrokenBarrierError:
            for call in (optimizer.state_dict, optimizer.step):
                with pytest.raises(WorldError, match="some parameters are old and some new"):
                    call()
            return "refused"

    assert on_threads(rank)[0] == "refused"


def test_a_copy_is_a_plain_optimizer() -> None:
    def rank(group: Group) -> None:
        model, optimizer = sharded(group)
        take_steps(model, optimizer)
        other_model, other = copy.deepcopy((model, optimizer))
        assert type(other) is torch.optim.AdamW
        assert bits_of(copy_of(other_model, other)) == bits_of(copy_of(model, optimizer))
        group.all_gather_object(None)
        take_steps(other_model, other)  # not collective, and changes nothing of the others
        assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.AdamW
        set_gradients(model, 4)
        optimizer.step()

    assert on_threads(rank) == [None, None]


@pytest.mark.exhaustive
def test_descriptors_and_memory_are_given_back() -> None:
    import gc
    import os

    def count() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps") as file:
            return len(os.listdir("/proc/self/fd")), file.read().count("memfd:hvdtrain")

    before = count()
    assert_same_bits(adamw, take_steps)
    assert count() == before


@pytest.mark.parametrize("hosts", ["a", "ab"])
def test_one_rank_on_each_host_changes_nothing(hosts: str) -> None:
    def rank(group: Group) -> None:
        optimizer = adamw(Model())
        assert shard(optimizer, group, {}) == [1] * len(hosts)
        assert type(optimizer) is torch.optim.AdamW

    assert on_threads(rank, hosts) == [None] * len(hosts)
