"""One real GPU: each method trains and resumes on it, and hvd takes its tensors.

    pytest tests/one_gpu.py          # `make bench-gpu` runs it, before it measures

The rings do not run it: CI has no GPU. More than one rank wants more GPUs: NCCL refuses to share
one.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hvdtrain.hvd as hvd
from hvdtrain import World, open_backend
from tests.launching import run
from tests.methods.arms import REFUSED, SETTINGS, STOP_AT, TASK
from tests.parity.resume import CONFIG, train

BACKENDS = ("single", "ddp", "compat")
CELLS = [
    (backend, name)
    for name, refused in REFUSED.items()
    for backend in BACKENDS
    if backend not in refused
]


def trained(backend: str, folder: Path, changes: dict[str, Any], **more: Any) -> str:
    """Train on the GPU with a method; return the fingerprint of the weights."""
    of_task = more.pop("of_task", {})
    config = dataclasses.replace(CONFIG, device="cuda", **changes)
    with open_backend(backend, World(), config.backend_options()) as opened:
        assert opened.device.type == "cuda"
        found = train(opened, folder, device="cuda", **changes, **of_task, **more)
    digest: str = found["digest"]
    return digest


@pytest.mark.parametrize(("backend", "name"), CELLS)
def test_a_method_resumes_with_the_same_bits(backend: str, name: str, tmp_path: Path) -> None:
    changes, of_task = SETTINGS[name], TASK.get(name, {})
    whole = trained(backend, tmp_path / "whole", changes, of_task=of_task)
    stopped = trained(backend, tmp_path / "cut", changes, stop_at=STOP_AT, of_task=of_task)
    assert stopped == "stopped"
    resumed = trained(backend, tmp_path / "cut", changes, resume="must", of_task=of_task)
    assert len(whole) == 64
    assert resumed == whole


def test_backends_have_the_same_bits(tmp_path: Path) -> None:
    assert len({trained(backend, tmp_path / backend, {}) for backend in BACKENDS}) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_trains(backend: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hvdtrain", "--backend", backend, "--device", "cuda"]
    options = ["--compile", "--epochs", "1", "--run-dir", str(tmp_path / "run")]
    done = run([*command, *options], timeout=120)
    assert done.code == 0, done.output


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


DTYPES = (
    *(
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
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
def test_the_result_on_another_stream_is_complete() -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for number in range(50):
        with torch.cuda.stream(side):
            given = torch.full((1 << 22,), float(number), device="cuda")
            for _ in range(4):
                given = given * 1.0
            found = hvd.allreduce(given, op=hvd.Sum)
            del given
            assert torch.equal(found, torch.full_like(found, float(number)))


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
def test_parameters_on_the_gpu_and_the_cpu() -> None:
    torch.manual_seed(1)
    front, back = nn.Linear(4, 8), nn.Linear(8, 2).cuda()
    named = [*front.named_parameters("front"), *back.named_parameters("back")]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=0.1), named)
    for _ in range(3):
        optimizer.zero_grad()
        back(front(torch.ones(3, 4)).cuda()).square().mean().backward()
        optimizer.step()
    assert all(p.grad is not None for _, p in named)


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
    assert hvd.allgather_object(3) == [3]
    hvd.barrier()
    hvd.join()


@pytest.mark.usefixtures("one_rank")
def test_batch_norm_of_all_ranks() -> None:
    x = torch.randn(6, 3, 5, device="cuda")
    ours, plain = hvd.SyncBatchNorm(3).cuda(), nn.BatchNorm1d(3).cuda()
    torch.testing.assert_close(ours(x), plain(x))
    torch.testing.assert_close(ours.running_var, plain.running_var)
