"""A script one rank of which fails as told while the other waits for it: see test_failure.py."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    api, how, failing = sys.argv[1:]
    add: Callable[[Any], Any]
    if api == "hvd":
        import hvdtrain.hvd as hvd

        hvd.init()
        rank, add = hvd.rank(), hvd.allreduce
    else:
        import hvdtrain.transports  # noqa: F401

        dist.init_process_group(api)
        rank, add = dist.get_rank(), dist.all_reduce
    add(torch.ones(4))
    if rank == int(failing):
        if how == "raise":
            raise ValueError("the cause")
        if how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    add(torch.ones(4))


if __name__ == "__main__":
    main()
