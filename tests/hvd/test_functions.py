"""Objects, parameters and optimizer state become one rank's, and nothing else changes."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.hvd.conftest import OUR_TORCHRUN
from tests.hvd.pool import HvdRanks

OURS = pytest.mark.parametrize("hvd_ranks", OUR_TORCHRUN, indirect=True)
BOTH = pytest.mark.parametrize(
    "hvd_ranks",
    [pytest.param(("horovod-gloo", 2), marks=pytest.mark.exhaustive), *OUR_TORCHRUN],
    indirect=True,
)


class Point(NamedTuple):
    x: int
    y: Any


def same(a: Any, b: Any) -> None:
    """Equal in every type and value; tensors in dtype, device and bits."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        same(list(a.values()), list(b.values()))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            same(one, other)
    elif isinstance(a, Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    else:
        assert a == b


# Parameters


def parameters_of(hvd: Any, kind: str, root: int) -> None:
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    for buffer in model.buffers():
        buffer.data.fill_(hvd.rank() + 1)
    kinds: dict[str, Any] = {
        "dict": model.state_dict,
        "list": lambda: list(model.parameters()),
        "named": lambda: list(model.named_parameters()),
        "named generator": model.named_parameters,
        "generator": model.parameters,
        "tuple": lambda: tuple(model.parameters()),
    }
    params = kinds[kind]()
    before = [p.data_ptr() for p in model.parameters()]
    assert hvd.broadcast_parameters(params, root_rank=root) is None
    assert [p.data_ptr() for p in model.parameters()] == before
    torch.manual_seed(root)
    expected = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    same(list(model.parameters()), list(expected.parameters()))
    marker = (root if kind == "dict" else hvd.rank()) + 1
    assert all(buffer.eq(marker).all() for buffer in model.buffers())


@BOTH
@pytest.mark.parametrize("kind", ["dict", "list", "named"])
def test_parameters_become_the_roots(hvd_ranks: HvdRanks, kind: str) -> None:
    hvd_ranks.run(parameters_of, kind, hvd_ranks.n - 1)


@OURS
@pytest.mark.parametrize("kind", ["named generator", "generator", "tuple"])
def test_any_iterable_of_parameters_does(hvd_ranks: HvdRanks, kind: str) -> None:
    hvd_ranks.run(parameters_of, kind, 0)


def any_order(hvd: Any) -> None:
    names = ["a", "b", "c"]
    state = {name: torch.full((2,), hvd.rank() + ord(name)) for name in names}
    if hvd.rank():
        state = dict(reversed(state.items()))
    hvd.broadcast_parameters(state, 0)
    assert all((state[name] == ord(name)).all() for name in names)


@BOTH
def test_the_order_of_a_dict_does_not_matter(hvd_ranks: HvdRanks) -> None:
    hvd_ranks.run(any_order)


def unusual_tensors(hvd: Any) -> None:
    rank = hvd.rank()
    state = {
        "bool": torch.tensor([rank == 0, True]),
        "bf16": torch.full((3,), rank + 0.5, dtype=torch.bfloat16),
        "complex": torch.full((2,), complex(rank, 1)),
        "int16": torch.full((2,), rank, dtype=torch.int16),
        "scalar": torch.tensor(rank),
        "empty": torch.empty(0, 3),
        "transposed": (torch.arange(6.0).view(2, 3) + rank).t(),
        "channels_last": torch.full((1, 2, 2, 2), float(rank)).to(
            memory_format=torch.channels_last
        ),
        "leaf": nn.Parameter(torch.full((2,), float(rank))),
    }
    hvd.broadcast_parameters(state, 0)
    assert state["bool"].tolist() == [True, True]
    assert state["bf16"].tolist() == [0.5] * 3
    assert state["complex"].tolist() == [1j, 1j]
    assert state["transposed"].tolist() == torch.arange(6.0).view(2, 3).t().tolist()
    for name in ("int16", "scalar", "channels_last", "leaf"):
        assert not state[name].any()


@OURS
def test_parameters_of_any_dtype_and_layout(hvd_ranks: HvdRanks) -> None:
    hvd_ranks.run(unusual_tensors)


def refused(hvd: Any) -> list[str]:
    texts = []
    for params in (3, None, torch.ones(2), "ab"):
        with pytest.raises(ValueError, match="^invalid params of type: <class '") as raised:
            hvd.broadcast_parameters(params, 0)
        texts.append(str(raised.value))
    with pytest.raises(ValueError, match="params must be tensors: b is a <class 'float'>"):
        hvd.broadcast_parameters({"a": torch.ones(1), "b": 1.0}, 0)
    with pytest.raises(ValueError, match="two of params have the same name: a"):
        hvd.broadcast_parameters([("a", torch.ones(1)), ("a", torch.ones(1))], 0)
    return texts


@OURS
def test_what_is_not_parameters_is_refused(hvd_ranks: HvdRanks) -> None:
    assert hvd_ranks.run(refused)[0][0] == "invalid params of type: <class 'int'>"


# Objects


def objects(hvd: Any, root: int) -> None:
    rank, n = hvd.rank(), hvd.size()
    sent = {"point": Point(1, [2.5, None]), "tensor": torch.ones(2), "rank": rank, 3: "x" * 9000}
    got = hvd.broadcast_object(sent, root_rank=root, name="obj")
    assert (got is sent) == (rank == root)
    same(got, {**sent, "rank": root})
    assert hvd.allgather_object([rank] * rank, name="all") == [[i] * i for i in range(n)]
    add = hvd.broadcast_object(lambda x: x + root, root, "function")
    assert add(1) == root + 1


@BOTH
def test_objects(hvd_ranks: HvdRanks) -> None:
    hvd_ranks.run(objects, 0)
    hvd_ranks.run(objects, hvd_ranks.n - 1)


def unlike_objects(hvd: Any) -> None:
    rank = hvd.rank()
    for i in range(20):  # the default name is used again and again
        assert hvd.broadcast_object({"i": i} if rank == 0 else None) == {"i": i}
        assert hvd.allgather_object(None if rank else i) == [i] + [None] * (hvd.size() - 1)
    big = bytes(3 << 20)
    assert hvd.broadcast_object(big if rank == 1 else "small", 1) == big
    assert [len(b) for b in hvd.allgather_object(big[: rank << 20])] == [
        i << 20 for i in range(hvd.size())
    ]


@OURS
def test_objects_of_different_types_under_the_default_name(hvd_ranks: HvdRanks) -> None:
    hvd_ranks.run(unlike_objects)


def unpicklable(hvd: Any) -> list[str]:
    bad = (i for i in range(3))
    texts = []
    for function in (hvd.broadcast_object, hvd.allgather_object):
        with pytest.raises((TypeError, RuntimeError)) as raised:
            function(bad if hvd.rank() == 0 else 1)
        texts.append(f"{raised.type.__name__}: {raised.value}")
    assert hvd.broadcast_object(5) == 5
    return texts


@OURS
def test_an_object_that_cannot_be_pickled_raises_everywhere(hvd_ranks: HvdRanks) -> None:
    found = hvd_ranks.run(unpicklable)
    assert found[0] == ["TypeError: cannot pickle 'generator' object"] * 2
    assert "object of rank 0 cannot be pickled" in found[1][0]
    assert "object of rank 0 of the set cannot be pickled" in found[1][1]


def in_a_set(hvd: Any) -> None:
    members = hvd.add_process_set([0, hvd.size() - 1])
    if members.included():
        last = hvd.size() - 1
        assert hvd.broadcast_object(hvd.rank(), last, process_set=members) == last
        assert hvd.allgather_object(hvd.rank(), process_set=members) == [0, last]
        t = torch.full((2,), float(hvd.rank()))
        hvd.broadcast_parameters([t], last, process_set=members)
        assert t.tolist() == [last, last]
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1 + hvd.rank())
        hvd.broadcast_optimizer_state(optimizer, last, process_set=members)
        assert optimizer.param_groups[0]["lr"] == 1 + last
    hvd.remove_process_set(members)


@pytest.mark.parametrize("hvd_ranks", [("hvd-torchrun", 3)], indirect=True)
def test_a_process_set(hvd_ranks: HvdRanks) -> None:
    hvd_ranks.run(in_a_set)


# Optimizer state

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {"betas": (0.8, 0.9), "weight_decay": 0, "amsgrad": True}),
    "tensor lr": (torch.optim.Adam, {"lr": torch.tensor(0.1), "foreach": False}),
    "AdamW": (torch.optim.AdamW, {}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "RMSprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.1}),
    "Rprop": (torch.optim.Rprop, {"etas": (0.4, 1.3)}),
}


def made(rank: int, name: str, steps: int) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """An optimizer that has made some steps, with options that differ between ranks."""
    torch.manual_seed(rank)
    params = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4)), nn.Parameter(
        torch.ones(1), requires_grad=False)]  # fmt: skip
    cls, options = OPTIMIZERS[name]
    optimizer: torch.optim.Optimizer = cls(
        [{"params": params[:1]}, {"params": params[1:]}], **options
    )
    for _ in range(steps):
        for p in params[:2]:
            p.grad = torch.randn_like(p)
        optimizer.step()
    for p in params:
        p.grad = None
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"] * (rank + 1)
        else:
            group["lr"] = type(group["lr"])(group["lr"] * (rank + 1))
        group["extra"] = [None, (rank, {"a": 1.5}), True, Point(rank, 2)]
    return params, optimizer


def state_of(hvd: Any, name: str, steps: list[int], wrapped: bool, root: int) -> int:
    params, optimizer = made(hvd.rank(), name, steps[hvd.rank()])
    expected = pickle.loads(pickle.dumps(made(root, name, steps[root])[1].state_dict()))
    if wrapped:
        state = optimizer.state_dict()
        names = [(f"p{i}", p) for i, p in enumerate(params)]
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names)
        optimizer.load_state_dict(state)
    before = [p.detach().clone() for p in params]
    tensors = {id(t) for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)}
    groups, had_state = optimizer.param_groups, bool(optimizer.state)
    hvd.broadcast_optimizer_state(optimizer, root_rank=root)
    same(optimizer.state_dict(), expected)
    same(params, [nn.Parameter(b, p.requires_grad) for b, p in zip(before, params, strict=True)])
    assert all((p.grad is None) is (had_state or not p.requires_grad) for p in params)
    assert optimizer.param_groups is groups
    assert set(optimizer.state) <= set(params)
    if steps[hvd.rank()] and steps[root]:  # in place
        now = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        assert {id(t) for t in now} == tensors
    for p in params[:2]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return len(optimizer.state)


@OURS
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_becomes_the_roots(hvd_ranks: HvdRanks, name: str) -> None:
    last = hvd_ranks.n - 1
    for steps in ([2, 3, 1], [2, 0, 0], [0, 2, 2], [0, 0, 0]):
        hvd_ranks.run(state_of, name, steps, False, 0)
    hvd_ranks.run(state_of, name, [0, 2, 2], False, last)


@OURS
@pytest.mark.parametrize("name", ["SGD", "momentum", "Adam", "tensor lr"])
def test_so_does_that_of_a_wrapped_optimizer(hvd_ranks: HvdRanks, name: str) -> None:
    for steps in ([2, 1, 3], [2, 0, 0], [0, 2, 0], [0, 0, 0]):
        hvd_ranks.run(state_of, name, steps, True, 0)


class Odd(torch.optim.Optimizer):
    """With state of every kind."""

    def __init__(self, params: Any, rank: int) -> None:
        super().__init__(params, {"lr": 1.0})
        for i, p in enumerate(self.param_groups[0]["params"]):
            self.state[p] = {
                "none": None,
                "count": rank + i,
                "nested": [torch.full((2,), float(rank)), {"t": torch.full((1,), rank)}],
                "sparse": torch.eye(2).mul(rank + 1).to_sparse(),
                "bool": torch.tensor(rank == 0),
                "bf16": torch.full((2, 2), rank, dtype=torch.bfloat16).t(),
                "empty": torch.empty(0),
            }
        self.state["all"] = {"total": torch.tensor(rank), "name": f"rank {rank}"}  # type: ignore


def odd_state(hvd: Any) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = Odd(params, hvd.rank())
    hvd.broadcast_optimizer_state(optimizer, 0)
    expected = Odd(params, 0)
    for key, value in expected.state.items():
        mine = dict(optimizer.state[key])
        for name in ("sparse",) if isinstance(key, Tensor) else ():
            mine[name], value[name] = mine[name].to_dense(), value[name].to_dense()
        same(mine, dict(value))
    assert set(optimizer.state) == set(expected.state)


@OURS
def test_state_of_any_kind(hvd_ranks: HvdRanks) -> None:
    hvd_ranks.run(odd_state)


def misfits(hvd: Any) -> list[str]:
    texts = []
    rank = hvd.rank()
    for shapes in ([(2,), (3 if rank == 1 else 2,)], [(2,)] * (2 - (rank == 1))):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(s)) for s in shapes], lr=rank + 1)
        with pytest.raises(ValueError, match="optimizer") as raised:
            hvd.broadcast_optimizer_state(optimizer, 0)
        texts.append(str(raised.value))
        assert optimizer.param_groups[0]["lr"] == rank + 1
    lbfgs = torch.optim.LBFGS([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=r"^cannot broadcast torch.optim.LBFGS state$"):
        hvd.broadcast_optimizer_state(lbfgs, 0)
    return texts


@OURS
def test_optimizers_that_differ_raise_everywhere(hvd_ranks: HvdRanks) -> None:
    found = hvd_ranks.run(misfits)
    assert found[0] == ["the optimizer of rank 1 of the set does not fit that of 0"] * 2
    assert found[1][0] == "parameter 1 of the optimizer is (2,) on the root, (3,) on this rank"
    assert "[2] on the root, [1] on this rank" in found[1][1]


# Compression


def compressed(hvd: Any) -> None:
    from hvdtrain.hvd.compression import BF16Compressor, Compressor, FP16Compressor

    assert issubclass(hvd.Compression.none, Compressor)
    ours = {torch.float16: FP16Compressor, torch.bfloat16: BF16Compressor}
    for narrow, compressor in ours.items():
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32):
            t = torch.tensor([1, 2, 3]).to(dtype)
            sent, ctx = compressor.compress(t)
            assert sent.dtype == (narrow if dtype.is_floating_point else dtype)
            back = compressor.decompress(sent, ctx)
            assert back.dtype == dtype
            assert back.tolist() == [1, 2, 3]
    t = torch.ones(2)
    assert hvd.Compression.none.compress(t) == (t, None)
    assert hvd.Compression.none.decompress(t, None) is t
    for kind in (hvd.Compression.fp16, hvd.Compression.bf16):
        x = torch.full((2,), float(hvd.rank()), requires_grad=True)
        y = hvd.allreduce(x, name="x", op=hvd.Sum, compression=kind)
        y.sum().backward()
        assert y.dtype == torch.float32
        assert y.tolist() == [sum(range(hvd.size()))] * 2


@OURS
def test_compression(hvd_ranks: HvdRanks) -> None:
    hvd_ranks.run(compressed)
