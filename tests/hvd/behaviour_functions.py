"""Objects and parameters; see behaviour.py. (Optimizer state has tests of its own.)"""

from __future__ import annotations

from typing import Any

import torch

from tests.hvd.behaviour import Hvd, case, data, mine, raises, same


@case()
def objects_are_broadcast(hvd: Hvd) -> None:
    for root in range(hvd.size()):
        own: dict[str, Any] = {"rank": hvd.rank(), "list": [1, (2.5, None)], "text": "ü" * root}
        got = hvd.broadcast_object(own, root_rank=root, name=f"o{root}")
        assert got == {"rank": root, "list": [1, (2.5, None)], "text": "ü" * root}
        assert (got is own) == (hvd.rank() == root)
    assert hvd.broadcast_object(hvd.rank()) == 0
    assert hvd.broadcast_object([hvd.rank()], 1) == [1]


@case()
def large_objects_and_tensors(hvd: Hvd) -> None:
    got = hvd.broadcast_object(bytes([hvd.rank()]) * (1 << 20), 1, "large")
    assert got == b"\x01" * (1 << 20)
    same(hvd.broadcast_object(mine(hvd, 3), 1, name="t"), data(1, 3))


@case()
def objects_are_gathered(hvd: Hvd) -> None:
    n, rank = hvd.size(), hvd.rank()
    assert hvd.allgather_object({"rank": rank, "x": "y" * rank}, name="o") == [
        {"rank": r, "x": "y" * r} for r in range(n)
    ]
    assert hvd.allgather_object(rank) == list(range(n))


@case()
def closures_are_objects(hvd: Hvd) -> None:
    rank = hvd.rank()
    assert hvd.broadcast_object(lambda: rank, 1, name="f")() == 1


def _model(rank: int) -> torch.nn.Sequential:
    torch.manual_seed(rank)
    norm = torch.nn.BatchNorm1d(2)
    torch.nn.init.constant_(norm.weight, rank)
    return torch.nn.Sequential(torch.nn.Linear(3, 2), norm)


@case()
def parameters_are_broadcast(hvd: Hvd) -> None:
    expected = _model(1).state_dict()
    for kind in ("dict", "list of pairs"):
        model = _model(hvd.rank())
        given: Any = model.state_dict()
        if kind == "list of pairs":
            given = list(model.state_dict().items())
        assert hvd.broadcast_parameters(given, root_rank=1) is None
        for name, value in model.state_dict().items():
            same(value, expected[name])


@case()
def parameters_of_something_else(hvd: Hvd) -> None:
    with raises(ValueError, "invalid params of type: <class 'int'>"):
        hvd.broadcast_parameters(3, root_rank=0)


@case()
def compressors(hvd: Hvd) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16):
        compressed, context = hvd.Compression.fp16.compress(torch.ones(2, dtype=dtype))
        assert compressed.dtype == torch.float16
        assert hvd.Compression.fp16.decompress(compressed, context).dtype == dtype
    whole = torch.ones(2, dtype=torch.int64)
    compressed, context = hvd.Compression.fp16.compress(whole)
    assert compressed.dtype == torch.int64
    tensor = torch.ones(2)
    compressed, context = hvd.Compression.none.compress(tensor)
    assert compressed is tensor
    assert hvd.Compression.none.decompress(compressed, context) is tensor


@case(stronger="a fixed default name: None on all but the root matches")
def objects_of_different_types(hvd: Hvd) -> None:
    own = {"epoch": 3} if hvd.rank() == 0 else None
    assert hvd.broadcast_object(own, root_rank=0) == {"epoch": 3}
    gathered = hvd.allgather_object(own)
    assert gathered == [{"epoch": 3}, *[None] * (hvd.size() - 1)]


@case(stronger="generators, and buffers of any dtype")
def parameters_of_a_generator(hvd: Hvd) -> None:
    model = _model(hvd.rank())
    hvd.broadcast_parameters(model.named_parameters(), root_rank=1)
    expected = dict(_model(1).named_parameters())
    for name, value in model.named_parameters():
        same(value, expected[name].detach())
    flag = torch.tensor([hvd.rank() == 1, False])
    hvd.broadcast_parameters({"flag": flag}, root_rank=1)
    assert flag.tolist() == [True, False]
