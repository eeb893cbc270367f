"""The private names of torch that hvdtrain uses: a torch that changes one fails here, by its name.

What each is for, and what happens without it, is in the files of `hvdtrain/_torch`.
"""

from __future__ import annotations

import os
import sys
from functools import reduce
from importlib import import_module
from importlib.util import module_from_spec
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from hvdtrain._torch import storage
from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain._torch.dynamo import untraced
from hvdtrain._torch.peer_errors import is_peer_error
from hvdtrain._torch.step_mark import mark_as_stepped, without_step_hooks
from hvdtrain._torch.storage import (
    StorageReference,
    has_private_gradient,
    move_to_shared_memory,
    storage_key,
)
from tests.forkserver import warm
from tests.launching import run, succeed

NAMES = """
    torch.nn.modules.batchnorm _BatchNorm
    torch.nn:BatchNorm1d _check_input_dim
    torch _foreach_copy_
    torch:Tensor _version _use_count
    torch._C _storage_Use_Count
    torch:UntypedStorage _cdata _share_fd_cpu_
    torch.multiprocessing.reductions StorageWeakRef
    torch.distributed.rendezvous _rendezvous_handlers
    torch.utils.data._utils.worker _worker_info
    torch.autograd:Variable _execution_engine
    torch._C._dynamo.eval_frame set_code_exec_strategy
    torch._C._dynamo.eval_frame:_FrameAction SKIP
    torch.distributed:Reducer _rebuild_buckets prepare_for_forward prepare_for_backward
    torch.distributed:Reducer _set_forward_pass_work_handle
    torch.distributed:ProcessGroupGloo _Options _set_default_timeout
    torch.distributed:ProcessGroupGloo._Options _devices _threads _timeout
    torch.distributed:ProcessGroup _allgather_base _device_types _reduce_scatter_base
    torch.distributed.distributed_c10d:Work _source_rank
    torch.distributed.distributed_c10d:_world group_count
    torch._C._distributed_c10d _dump_fr_trace
"""
"""A module, or module:class, and the names in it; some of one file alone, which could not replace
them: transports/gloo.py and transports/process_group.py.
"""


@pytest.mark.parametrize("line", NAMES.strip().splitlines(), ids=lambda line: line.split()[0])
def test_the_names_exist(line: str) -> None:
    owner, *names = line.split()
    module, _, attributes = owner.partition(":")
    holder = reduce(getattr, filter(None, attributes.split(".")), import_module(module))
    missing = [name for name in names if not hasattr(holder, name)]
    assert not missing, f"torch {torch.__version__} has no {missing} in {owner}"


def test_batch_norm_layers_share_one_base() -> None:
    assert issubclass(nn.SyncBatchNorm, BatchNormBase)
    assert issubclass(nn.BatchNorm1d, BatchNormBase)


def test_schedulers_read_the_mark_of_a_step() -> None:
    optimizer: Optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    mark_as_stepped(optimizer)
    scheduler.step()  # it would warn, and warnings are errors here


def test_a_marked_step_runs_no_hooks() -> None:
    ran: list[object] = []

    class Marked(torch.optim.SGD):
        @without_step_hooks
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Do nothing."""

    for cls in (Marked, torch.optim.SGD):
        optimizer = cls([torch.zeros(1, requires_grad=True)], lr=0.1)
        optimizer.register_step_pre_hook(lambda optimizer, *_: ran.append(type(optimizer)))
        optimizer.step()
    assert ran == [torch.optim.SGD]


def test_a_storage_moves_under_its_views() -> None:
    t = torch.ones(1 << 18)
    view, key = t[:3], storage_key(t.untyped_storage())
    reference = StorageReference(t.untyped_storage())
    assert os.fstat(move_to_shared_memory(t.untyped_storage())).st_size >= t.nbytes
    assert view.untyped_storage().is_shared()
    assert storage_key(view.untyped_storage()) == key
    assert reference
    del t, view
    assert not reference


def test_dynamo_leaves_marked_functions_alone() -> None:
    """It compiles neither the function nor what that calls, and breaks the graph at the call."""
    seen: list[bool] = []

    @untraced
    def outer(t: torch.Tensor) -> torch.Tensor:
        def inner() -> None:
            seen.append(torch.compiler.is_compiling())

        inner()
        return t * 3

    def program(t: torch.Tensor) -> torch.Tensor:
        return outer(t + 1) + 1

    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph.code)
        return graph.forward

    assert torch.compile(program, backend=backend)(torch.ones(2)).tolist() == [7.0, 7.0]
    assert seen == [False]
    assert len(graphs) == 2  # before and after the call


def test_who_refers_to_a_gradient() -> None:
    seen: list[bool] = []
    layer = nn.Linear(3, 3)
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(has_private_gradient(p)))  # type: ignore[no-untyped-call]
    layer(torch.ones(2, 3)).sum().backward()
    assert seen == [True]
    p = torch.zeros(4, requires_grad=True)
    holders: dict[str, Any] = {
        "tensor": lambda grad: grad,
        "view": lambda grad: grad[:1],
        "storage": lambda grad: grad.untyped_storage(),
        "array": torch.utils.dlpack.from_dlpack,
        "graph": lambda grad: grad * torch.ones((), requires_grad=True),
    }
    for name, hold in holders.items():
        p.grad = torch.zeros(4)
        held = hold(p.grad)
        assert not has_private_gradient(p), name
        del held
        assert has_private_gradient(p), name
    for grad in (torch.from_numpy(torch.zeros(4).numpy()), torch.zeros(4).share_memory_()):  # type: ignore[no-untyped-call]
        p.grad = grad
        del grad
        assert not has_private_gradient(p)


@pytest.mark.parametrize("install", [sys.settrace, sys.setprofile])
def test_a_debugger_does_not_hide_who_refers_to_a_gradient(install: Any) -> None:
    """It may hold the variables and the arguments of every call."""
    p, seen, before = torch.zeros(4, requires_grad=True), [], (sys.gettrace(), sys.getprofile())

    def hold(frame: FrameType, event: str, argument: object) -> Any:
        seen.append((dict(frame.f_locals), argument))
        return hold

    spec: Any = storage.__spec__
    fresh = module_from_spec(spec)
    install(hold)
    try:
        spec.loader.exec_module(fresh)
        p.grad = torch.zeros(4)
        fresh.has_private_gradient(p)
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    assert seen
    seen.clear()
    held = p.grad
    assert not fresh.has_private_gradient(p)
    del held


def test_texts_of_a_lost_peer() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with pytest.raises(dist.DistStoreError) as raised:
        store.wait(["absent"], torch.distributed.timedelta(milliseconds=1))  # type: ignore[attr-defined]
    assert is_peer_error(raised.value)
    assert is_peer_error(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    assert not is_peer_error(RuntimeError("shape '[2]' is invalid"))


def test_importing_transports_leaves_env_rendezvous_alone() -> None:
    code = (
        "import sys, torch.distributed as dist\n"
        "handlers = sys.modules['torch.distributed.rendezvous']._rendezvous_handlers\n"
        "before = handlers['env']\n"
        "import hvdtrain.transports, hvdtrain.hvd, hvdtrain.backends.ddp\n"
        "assert handlers['env'] is before\n"
        "hvdtrain.transports.rendezvous_by_launcher()\n"
        "mine = handlers['env']\n"
        "assert mine is not before\n"
        "hvdtrain.transports.rendezvous_by_launcher()\n"
        "assert handlers['env'] is mine\n"
    )
    succeed(run(warm([sys.executable, "-c", code])))
