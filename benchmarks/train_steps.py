"""A training script without end, as anybody's, by any engine; `steps.py` compares its commands.

    torchrun --nproc-per-node 2 benchmarks/train_steps.py mlp ddp/shm
    mpirun -np 2 python benchmarks/train_steps.py tensors horovod
    torchrun --nproc-per-node 2 benchmarks/train_steps.py small ddp/shm --slower 0.1    # by a tenth
    torchrun --nproc-per-node 2 benchmarks/train_steps.py mlp compat/shm --source ../hvdtrain-0.1

An engine is ddp, compat (hvdtrain.hvd) or horovod, over a transport; `compat/shm sharded` shares
the optimizer's step among the ranks of a host.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def mlp(width: int = 2048, depth: int = 6) -> nn.Module:
    """Layers of 2048: 101 MB of gradients, most of it in six tensors."""
    return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())])


def small() -> nn.Module:
    """An MLP of half a million parameters: steps of 3 ms."""
    return mlp(320, 5)


def tensors() -> nn.Module:
    """A thousand tensors, of 16 KB and of 256 bytes. Orthogonal, so that no gradient vanishes."""
    layers = [nn.Linear(64, 64) for _ in range(500)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
    return nn.Sequential(*layers)


def convnet() -> nn.Module:
    """A small residual-free convolutional network on 32 x 32 images."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 4, 10))


def transformer() -> nn.Module:
    """Two encoder layers of 256 on sequences of 32."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def digits() -> nn.Module:
    """The network of the task `digits`, so small that averaging is a large part of a step."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, in one pass over the parameters."""
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as torch's default is."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW in one pass over the parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


# name: model, optimizer, shape of a batch
WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], tuple[int, ...]]] = {
    "mlp": (mlp, sgd, (8, 2048)),
    "mlp-adamw": (mlp, adamw, (8, 2048)),
    "mlp-fused-adamw": (mlp, fused_adamw, (8, 2048)),
    "small": (small, sgd, (32, 320)),
    "tensors": (tensors, sgd, (8, 64)),
    "convnet": (convnet, sgd, (32, 3, 32, 32)),
    "transformer": (transformer, sgd, (8, 32, 256)),
    "digits": (digits, sgd, (32, 1, 8, 8)),
}


def by_ddp(
    model: nn.Module, optimizer: torch.optim.Optimizer, transport: str, _: bool
) -> tuple[nn.Module, Any, int]:
    """Return the model as DDP wraps it, the optimizer and the rank."""
    transports = import_module("hvdtrain.transports")
    transports.register()
    dist.init_process_group(transports.TRANSPORTS.get(transport, transport))
    net = nn.parallel.DistributedDataParallel(
        model, gradient_as_bucket_view=True, forward_sync_buffers=False
    )
    return net, optimizer, dist.get_rank()


def by_horovod(
    model: nn.Module, optimizer: torch.optim.Optimizer, name: str, shard: bool
) -> tuple[nn.Module, Any, int]:
    """Return the model, the optimizer as Horovod's API wraps it, and the rank."""
    hvd: Any = import_module(name)
    hvd.init()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    more = {"shard": True} if shard else {}
    named = model.named_parameters()
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=named, **more), hvd.rank()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("engine")
    parser.add_argument("--slower", type=float, default=0.0, help="share that each step is longer")
    parser.add_argument("--every", type=int, default=1, help="of so many steps only one is longer")
    parser.add_argument("--source", type=Path, default=Path(__file__).parent.parent)
    options = parser.parse_args()
    sys.path.insert(0, str(options.source.resolve()))

    make, make_optimizer, shape = WORKLOADS[options.workload]
    torch.manual_seed(0)
    model = make()
    engine, _, transport = options.engine.removesuffix(" sharded").partition("/")
    shard = options.engine.endswith(" sharded")
    if engine == "ddp":
        net, optimizer, rank = by_ddp(model, make_optimizer(model), transport, shard)
    else:
        os.environ["HVDTRAIN_TRANSPORT"] = transport or "auto"
        name = "horovod.torch" if engine == "horovod" else "hvdtrain.hvd"
        net, optimizer, rank = by_horovod(model, make_optimizer(model), name, shard)
    inputs = torch.randn(*shape, generator=torch.Generator().manual_seed(1 + rank))
    plain: deque[float] = deque([0.0], maxlen=50)
    for step in itertools.count():
        since = time.perf_counter()
        loss: Tensor = net(inputs).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        now = time.perf_counter()
        plain.append(now - since)
        # Not a share of this step: one after a pause would be longer by seconds.
        until = now + (step % options.every == 0) * options.slower * median(plain)
        while time.perf_counter() < until:
            pass
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
