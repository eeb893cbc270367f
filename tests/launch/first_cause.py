"""A script one rank of which fails as told while the other waits for it: see test_failure.py."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import hvdtrain.hvd as hvd
from tests.launch.failing import fail


def main() -> None:
    api, how, failing = sys.argv[1:]
    add: Any
    if api == "hvd":
        hvd.init()
        rank, add = hvd.rank(), hvd.allreduce
    else:
        dist.init_process_group(api)
        rank, add = dist.get_rank(), dist.all_reduce
    add(torch.ones(4))
    if rank == int(failing):
        fail(how, os.devnull)
    add(torch.ones(4))


if __name__ == "__main__":
    main()
