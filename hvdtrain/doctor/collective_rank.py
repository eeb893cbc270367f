"""One rank of `hvdtrain doctor`: `python -m hvdtrain.doctor.collective_rank TIMEOUT_S ARM...`.

`arm_checks` starts it under each launcher. For one arm after the other ("ddp/shm=shm", the name and
the transport to choose) it opens the backend, checks each collective's answer, and times it:

    arm_checks                               each rank
    start the launcher                 <---- rank 0: "ddp/shm", "open"
    (restarts its clock at each)       <---- rank 0: "ddp/shm", "all_reduce"
                                       <---- rank 0: "ddp/shm", "broadcast", ms of all_reduce
    end the launcher                   <---- any rank: an error, then exit
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hvdtrain.backends import open_backend
from hvdtrain.backends.base import Backend
from hvdtrain.backends.horovod import Horovod
from hvdtrain.backends.options import BackendOptions
from hvdtrain.doctor.arm_checks import REPORT
from hvdtrain.errors import HvdtrainError, one_line
from hvdtrain.job.world import detect
from hvdtrain.system import cores

NUM_ELEMENTS = 1 << 18  # of each part: 1 MiB of float32
NUM_CALLS = 5

Collective = tuple[Callable[[], Any], Any]
"""A call, and the result that it must return on this rank; None: the result is not checked."""


def data(multiple: int, device: torch.device) -> Tensor:
    """Return the input of rank `multiple` - 1: small whole numbers, so float32 sums are exact."""
    return (torch.arange(NUM_ELEMENTS, dtype=torch.float32) % 97 * multiple).to(device)


def c10d_collectives(backend: Backend) -> dict[str, Collective]:
    """Return the collectives of torch.distributed."""
    rank, size = backend.world.rank, backend.world.size
    each = [data(r + 1, backend.device) for r in range(size)]
    own, total = each[rank], data(size * (size + 1) // 2, backend.device)
    to_each = [own * (r + 1) for r in range(size)]  # what this rank sends to each rank
    to_all, from_all = torch.cat(to_each), torch.cat([t * (rank + 1) for t in each])
    one, gathered, parts = own.clone(), from_all.clone(), [own.clone() for _ in each]

    def in_place(call: Callable[..., Any], *arguments: Any) -> Tensor:
        call(one.copy_(own), *arguments)
        return one

    def into(out: Any, call: Callable[..., Any], *arguments: Any) -> Any:
        call(out, *arguments)
        return out

    def gather(out: list[Tensor] | None) -> Any:
        dist.gather(own, out)
        return out

    def send_recv() -> Tensor:
        send = dist.P2POp(dist.isend, own, (rank + 1) % size)
        receive = dist.P2POp(dist.irecv, one, (rank - 1) % size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        return one

    root, largest = rank == 0, dist.ReduceOp.MAX
    return {
        "all_reduce": (lambda: in_place(dist.all_reduce), total),
        "all_reduce max": (lambda: in_place(dist.all_reduce, largest), each[-1]),
        "reduce": (lambda: in_place(dist.reduce, 0), total if root else None),
        "reduce_scatter": (lambda: into(one, dist.reduce_scatter, to_each), total * (rank + 1)),
        "broadcast": (lambda: in_place(dist.broadcast, 0), each[0]),
        "all_gather": (lambda: into(parts, dist.all_gather, own), each),
        "gather": (lambda: gather(parts if root else None), each if root else None),
        "scatter": (lambda: into(one, dist.scatter, each if root else None), own),
        "all_to_all": (lambda: into(gathered, dist.all_to_all_single, to_all), from_all),
        "send_recv": (send_recv, each[rank - 1]),
    }


def horovod_collectives(backend: Horovod) -> dict[str, Collective]:
    """Return the collectives of Horovod's API, real or hvdtrain's."""
    hvd: Any = backend.module()
    rank, size = backend.world.rank, backend.world.size
    each = [data(r + 1, backend.device) for r in range(size)]
    own, total = each[rank], data(size * (size + 1) // 2, backend.device)
    to_all = torch.cat([own * (r + 1) for r in range(size)])
    from_all = torch.cat([t * (rank + 1) for t in each])
    sums = [total, 2 * total]
    return {
        "allreduce": (lambda: hvd.allreduce(own, op=hvd.Sum), total),
        "allreduce max": (lambda: hvd.allreduce(own, op=hvd.Max), each[-1]),
        "grouped_allreduce": (lambda: hvd.grouped_allreduce([own, 2 * own], op=hvd.Sum), sums),
        "reducescatter": (lambda: hvd.reducescatter(to_all, op=hvd.Sum), total * (rank + 1)),
        "broadcast": (lambda: hvd.broadcast(own, 0), each[0]),
        "allgather": (lambda: hvd.allgather(own), torch.cat(each)),
        "alltoall": (lambda: hvd.alltoall(to_all), from_all),
    }


def backend_collectives(backend: Backend) -> dict[str, Collective]:
    """Return the collectives of every backend, the mean of the gradients first."""
    rank, size, device = backend.world.rank, backend.world.size, backend.device
    own, mean = data(rank + 1, device), data(1, device) * (size + 1) / 2
    model = nn.Linear(NUM_ELEMENTS, 1, bias=False, device=device)
    net, optimizer = backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))

    def gradients() -> Tensor | None:
        with backend.gradients(optimizer):
            net(own).sum().backward()
        grad = model.weight.grad
        first = None if grad is None else grad[0].clone()
        optimizer.step()
        optimizer.zero_grad()
        return first

    return {
        "gradients": (gradients, mean),
        "mean": (lambda: backend.all_reduce(own), mean),
        "all objects": (lambda: backend.all_gather_object(rank), list(range(size))),
        "object": (lambda: backend.broadcast_object([rank]), [0]),
        "barrier": (backend.barrier, None),
    }


def collectives_of(backend: Backend) -> dict[str, Collective]:
    """Return every collective of an open backend, by name. Collective."""
    own: dict[str, Collective] = {}
    if isinstance(backend, Horovod):
        own = horovod_collectives(backend)
    elif dist.is_initialized():
        own = c10d_collectives(backend)
    return {**own, **backend_collectives(backend)}


def check_and_time(collective: Collective, backend: Backend) -> float:
    """Check the answer of a collective; return the ms that it takes. Collective.

    Raises AssertionError for a wrong answer.
    """
    call, expected = collective
    found = call()
    if expected is not None:
        torch.testing.assert_close(
            found, expected, rtol=1e-6, atol=0, msg=lambda text: f"wrong result: {text}"
        )
    times = []
    for _ in range(NUM_CALLS):
        backend.barrier()
        begin = time.perf_counter()
        call()
        if backend.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - begin))
    return statistics.median(times)


def main(timeout_s: float, arms: list[str]) -> None:
    """Check all arms. Collective. The process ends at the first error."""
    world = detect()
    doing = ("", "start")

    def begin(arm: str, what: str, ms: float | None = None) -> None:
        nonlocal doing
        doing = (arm, what)
        if world.rank == 0:
            _report(arm, what, ms, None)

    try:
        torch.set_num_threads(max(1, len(cores.of_host()) // world.local_size))
        for arm, _, transport in (text.rpartition("=") for text in arms):
            begin(arm, "open")
            device = "cuda" if transport == "nccl" else "cpu"
            options = BackendOptions(
                device=device, transport=transport or "auto", timeout_s=timeout_s
            )
            with open_backend(arm.partition("/")[0], world, options) as backend:
                ms: float | None = None
                for what, collective in collectives_of(backend).items():
                    begin(arm, what, ms)
                    ms = check_and_time(collective, backend)
                begin(arm, "close", ms)
            begin(arm, "end")
    except Exception as error:
        known = isinstance(error, (HvdtrainError, AssertionError))
        kind = "" if known else f"{type(error).__name__}: "
        _report(*doing, None, f"rank {world.rank}: {kind}{one_line(error)}")
        os._exit(1)  # other ranks may wait for this one: the launcher ends them


def _report(arm: str, doing: str, ms: float | None, error: str | None) -> None:
    # In one write: launchers mix the output of ranks.
    os.write(1, f"\n{REPORT}{json.dumps([arm, doing, ms, error])}\n".encode())


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
