"""One real GPU: each method trains and resumes on it, and hvd takes its tensors.

    pytest tests/one_gpu.py          # `make bench-gpu` runs it, before it measures

The rings do not run it: CI has no GPU. More than one rank wants more GPUs: NCCL refuses to share
one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hvdtrain.hvd as hvd
from hvdtrain import Backend, BackendOptions, World, open_backend
from tests.methods.arms import REFUSED, STOP_AT
from tests.parity.interruption import stop, train_with

BACKENDS = ("single", "ddp", "compat")
CELLS = [
    (backend, name)
    for name, refused in REFUSED.items()
    for backend in BACKENDS
    if backend not in refused
]


@contextmanager
def on_gpu(backend: str) -> Iterator[Backend]:
    with open_backend(backend, World(), BackendOptions(device="cuda")) as opened:
        assert opened.device.type == "cuda"
        yield opened


@pytest.mark.parametrize(("backend", "name"), CELLS)
def test_a_method_resumes_with_the_same_bits(backend: str, name: str, tmp_path: Path) -> None:
    with on_gpu(backend) as opened:
        whole = train_with(opened, tmp_path / "whole", name, device="cuda")
        resumed = stop(opened, tmp_path / "cut", name, STOP_AT, device="cuda")
    assert resumed["digest"] == whole["digest"]


def test_backends_have_the_same_bits(tmp_path: Path) -> None:
    digests = set()
    for backend in BACKENDS:
        with on_gpu(backend) as opened:
            found = train_with(opened, tmp_path / backend, "plain", device="cuda")
            digests.add(found["digest"])
    assert len(digests) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_trains(backend: str, tmp_path: Path) -> None:
    with on_gpu(backend) as opened:
        options = {"device": "cuda", "compile": True, "epochs": 1}
        assert len(train_with(opened, tmp_path, "plain", **options)["digest"]) == 64


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


NAMES = "uint16 uint32 uint64 uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 bool"
DTYPES = [getattr(torch, name) for name in NAMES.split()]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_come_back(dtype: torch.dtype) -> None:
    given = (torch.arange(1, 25, device="cuda").reshape(6, 4) % 2).to(dtype)
    found: dict[str, Any] = {
        "allgather": hvd.allgather(given),
        "broadcast": hvd.broadcast(given, 0),
        "alltoall": hvd.alltoall(given),
        "grouped_allgather": hvd.grouped_allgather([given, given])[1],
    }
    if dtype != torch.bool:
        for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
            found[f"allreduce {op}"] = hvd.allreduce(given, op=op)
        found["reducescatter"] = hvd.reducescatter(given, op=hvd.Sum)
        found["grouped_allreduce"] = hvd.grouped_allreduce([given, given], op=hvd.Sum)[1]
    if dtype.is_floating_point:
        found["average"] = hvd.allreduce(given)
        found["compressed"] = hvd.allreduce(given, compression=hvd.Compression.fp16)
        found["adasum"] = hvd.allreduce(given, op=hvd.Adasum)
    for name, value in found.items():
        assert value.device == given.device, name
        assert value.dtype == dtype, name
        assert torch.equal(value.cpu(), given.cpu()), name


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["dense", "sparse", "sparse as dense", "groups", "delayed"])
def test_an_optimizer_steps_as_torchs(kind: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.EmbeddingBag(50, 16, sparse="sparse" in kind, mode="sum"), nn.Linear(16, 3)
        ).cuda()

    mine, theirs = model(), model()
    plain = torch.optim.SGD(theirs.parameters(), lr=0.1)
    options: dict[str, dict[str, Any]] = {
        "sparse as dense": {"sparse_as_dense": True},
        "groups": {"groups": 2},
        "delayed": {"backward_passes_per_step": 2},
    }
    more = options.get(kind, {})
    ours = hvd.DistributedOptimizer(
        torch.optim.SGD(mine.parameters(), lr=0.1), mine.named_parameters(), **more
    )
    hvd.broadcast_parameters(mine.state_dict(), root_rank=0)
    for step in range(4):
        for net, optimizer in ((mine, ours), (theirs, plain)):
            optimizer.zero_grad()
            for part in range(more.get("backward_passes_per_step", 1)):
                words = torch.randint(
                    0, 50, (8, 5), generator=torch.Generator().manual_seed(10 * step + part)
                )
                net(words.cuda()).square().mean().backward()
            optimizer.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("one_rank")
def test_states_are_committed_and_restored() -> None:
    model = nn.Linear(3, 2).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=1)
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    optimizer.step()
    state.commit()
    kept = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    state.restore()
    state.sync()
    assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))
    assert hvd.broadcast_object({"a": torch.ones(2, device="cuda")})["a"].sum() == 2


@pytest.mark.usefixtures("one_rank")
def test_batch_norm_of_all_ranks() -> None:
    x = torch.randn(6, 3, 5, device="cuda")
    ours, plain = hvd.SyncBatchNorm(3).cuda(), nn.BatchNorm1d(3).cuda()
    torch.testing.assert_close(ours(x), plain(x))
    torch.testing.assert_close(ours.running_var, plain.running_var)
