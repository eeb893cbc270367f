"""Elastic training in one process: what a commit holds, and notices of Horovod's driver. See
behaviour_elastic.py for what takes ranks.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from hvdtrain.hvd.elastic.state import OptimizerStateHandler


def test_a_commit_survives_the_steps_after_a_restore() -> None:
    """An optimizer adopts the tensors that it loads, and changes them in place."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

    def step() -> Any:
        parameter.grad = torch.ones(3)
        optimizer.step()
        return optimizer.state[parameter]["momentum_buffer"].clone()

    committed = step()
    handler = OptimizerStateHandler(optimizer)
    for _ in range(2):
        step()
        handler.restore()
        assert torch.equal(optimizer.state[parameter]["momentum_buffer"], committed)


def test_notices_of_horovods_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own client tells the address and key to a driver, and sends the notice."""
    worker = pytest.importorskip("horovod.runner.elastic.worker")
    client = worker.WorkerNotificationClient
    rendezvous = import_module("horovod.runner.http.http_server").KVStoreServer(verbose=0)
    codec = import_module("horovod.runner.common.util.codec")
    from hvdtrain.hvd.elastic.common import HostUpdateResult, WorkerNotificationManager

    class Heard:
        def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
            heard.append((timestamp, update_res))

    heard: list[tuple[float, HostUpdateResult]] = []
    port = rendezvous.start_server()
    env = f"ELASTIC=1 GLOO_RENDEZVOUS_ADDR=127.0.0.1 GLOO_RENDEZVOUS_PORT={port} GLOO_IFACE=lo"
    for variable in f"{env} HOSTNAME=here LOCAL_RANK=1".split():
        name, _, value = variable.partition("=")
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    try:
        manager = WorkerNotificationManager()
        manager.register_listener(Heard())
        manager.init()
        told = rendezvous.httpd.cache["worker_addresses"]["here:1"]
        addresses, key = codec.loads_base64(told)
        client(addresses, key, 0).notify_hosts_updated(12, worker.HostUpdateResult.added)
        forger = client(addresses, key, 0)
        forger._wire = import_module("horovod.runner.common.util.network").Wire(b"another key")
        with pytest.raises(Exception):  # noqa: B017,PT011  the connection is closed
            forger.notify_hosts_updated(13, worker.HostUpdateResult.removed)
        assert heard == [(12.0, HostUpdateResult.added)]
    finally:
        rendezvous.shutdown_server()
