"""Objects, compressors and devices; see behaviour.py. (Parameters: optimizer_state.py.)"""

from __future__ import annotations

from typing import Any

import torch

from tests.hvd.behaviour import Hvd, averaged, case, mine, raises, same, summed


@case()
def objects_are_broadcast_and_gathered(hvd: Hvd) -> None:
    everyone: list[dict[str, Any]] = [
        {"rank": rank, "list": [1, (2.5, None)], "text": "ü" * rank} for rank in range(hvd.size())
    ]
    own = everyone[hvd.rank()]
    for root in range(hvd.size()):
        got = hvd.broadcast_object(own, root_rank=root, name=f"o{root}")
        assert got == everyone[root]
        assert (got is own) == (hvd.rank() == root)
        assert hvd.allgather_object(own, name=f"g{root}") == hvd.allgather_object(own) == everyone
    rank = hvd.rank()
    assert hvd.broadcast_object(lambda: rank, 1, name="f")() == 1
    assert hvd.broadcast_object(hvd.rank()) == 0


@case(stronger="a fixed default name: None on all but the root matches")
def objects_of_different_types(hvd: Hvd) -> None:
    for i in range(20):  # the default name is used again and again
        own = {"epoch": i} if hvd.rank() == 0 else None
        assert hvd.broadcast_object(own, root_rank=0) == {"epoch": i}
        assert hvd.allgather_object(own) == [{"epoch": i}, *[None] * (hvd.size() - 1)]
    big = bytes(3 << 20)
    assert hvd.broadcast_object(big if hvd.rank() == 1 else "small", 1) == big
    gathered = hvd.allgather_object(big[: hvd.rank() << 20])
    assert [len(b) for b in gathered] == [r << 20 for r in range(hvd.size())]


@case(stronger="an object that cannot be pickled raises on all ranks")
def objects_that_cannot_be_pickled(hvd: Hvd) -> None:
    own = (i for i in range(3)) if hvd.rank() == 0 else 1
    text = "cannot be pickled" if hvd.rank() else "cannot pickle 'generator' object"
    for function in (hvd.broadcast_object, hvd.allgather_object):
        with raises(RuntimeError if hvd.rank() else TypeError, text):
            function(own)
    assert hvd.broadcast_object(5) == 5


@case(stronger="bfloat16, and compressors in the gradient")
def compressors_of_bfloat16(hvd: Hvd) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int32):
        tensor = torch.tensor([1, 2, 3]).to(dtype)
        sent, context = hvd.Compression.bf16.compress(tensor)
        assert sent.dtype == (torch.bfloat16 if dtype.is_floating_point else dtype)
        same(hvd.Compression.bf16.decompress(sent, context), tensor)
    for kind in (hvd.Compression.fp16, hvd.Compression.bf16):
        x = mine(hvd, 2).requires_grad_()
        y = hvd.allreduce(x, name="x", op=hvd.Sum, compression=kind)
        same(y, summed(hvd, 2))
        y.sum().backward()
        same(x.grad, torch.full((2,), float(hvd.size())))


@case(stronger="another default device is the caller's matter")
def another_default_device(hvd: Hvd) -> None:
    tensor, parameter = mine(hvd, 100_000), torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1 + hvd.rank(), momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = torch.full((2,), 1.0 + hvd.rank())
    with torch.device("meta"):
        assert hvd.broadcast_object({"rank": hvd.rank()}, 1) == {"rank": 1}
        assert hvd.allgather_object("x" * hvd.rank()) == ["x" * r for r in range(hvd.size())]
        hvd.broadcast_optimizer_state(optimizer, 0)
        hvd.allreduce_(tensor, name="x")
    assert optimizer.param_groups[0]["lr"] == 0.1
    same(optimizer.state[parameter]["momentum_buffer"], torch.ones(2))
    same(tensor, averaged(hvd, 100_000))
