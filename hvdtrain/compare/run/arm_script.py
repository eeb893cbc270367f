"""The script of an arm that is named, not given as a command. It runs under the arm's launcher:
`python -m hvdtrain.compare.run.arm_script SOCKET`.

It trains with hvdtrain's Trainer, or by hand, and the probe takes its steps as those of any script.
Only the first call, "open", is its own: it says what to train.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import signal
import sys
import traceback
from dataclasses import replace
from typing import Any

import torch

from hvdtrain.backends import open_backend
from hvdtrain.backends.base import Backend
from hvdtrain.compare.probe.hvdtrain_probe import Probe, RefusedError, connect
from hvdtrain.compare.run.by_hand import ByHand
from hvdtrain.errors import HvdtrainError, InputError, one_line
from hvdtrain.job.world import detect
from hvdtrain.system import cores
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.task import Task, load_task
from hvdtrain.training.trainer import Trainer

LOOPS: dict[str, type[Trainer] | type[ByHand]] = {"trainer": Trainer, "by hand": ByHand}


def open_loop(
    backend: str, loop: str, options: dict[str, Any], pin: bool, per_host: int
) -> tuple[Backend, Trainer | ByHand]:
    """Open model and loop. Collective.

    `options`: of TrainConfig; `pin`: bind to a share of the cores; `per_host`: the ranks by which a
    host's cores are divided, if `options` has no number of threads.
    """
    world, of_host = detect(), cores.of_host()
    config = TrainConfig(**options)
    if config.threads is None:  # before this rank is bound to its share, which is divided
        config = replace(config, threads=max(1, len(of_host) // per_host))
    if pin:
        share = cores.share_of_cores(world.local_rank, world.local_size, of_host)
        os.sched_setaffinity(0, share)
    # Before any inter-op parallel work: torch rejects a later change.
    torch.set_num_interop_threads(1)
    opened = open_backend(backend, world, config.backend_options())
    made = LOOPS[loop](load_task(config.task, config.set), opened, config)
    made.set_up(record=False)
    gc.collect()
    gc.freeze()  # garbage collections in timed steps skip the objects of set-up
    return opened, made


def about(loop: Trainer | ByHand) -> dict[str, Any]:
    """Return what the loop knows of its work, for the answer to "open"."""
    backend, batches = loop.backend, loop.batches
    return {
        "describe": {**backend.describe(), "reason": backend.reason},
        "samples": batches.global_micro_batch * loop.config.accumulate,
        "data": describe_data(loop.task, batches.num_samples),
    }


def describe_data(task: Task, num_samples: int | None) -> str:
    """Return the task's description of its data, with the number of samples."""
    size = "a stream" if num_samples is None else f"{num_samples} samples"
    return f"{task.about_data or 'the task does not say (Task.about_data)'}; {size}"


def main(address: str) -> None:
    """Train until the comparison ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the comparison handles Ctrl-C
    world, backend = detect(), None
    connection = connect(address, world.rank, world.size)
    try:
        _, *request = pickle.loads(connection.recv_bytes())
        backend, loop = open_loop(*request)
        probe = Probe()
        probe.adopt(connection, **about(loop))
        probe.watch(loop.optimizer, loop.model)
        loop.on_batch = probe.record_batch
        for _ in loop.steps():  # with local SGD, a step ends after the average
            probe.end_step()
    except EOFError:
        pass
    except Exception as error:  # the log gets the traceback, the comparison one line
        traceback.print_exc()
        with contextlib.suppress(OSError):
            connection.send((False, _one_line(error)))
            connection.recv_bytes()  # it ends all ranks
    finally:
        if backend is not None:
            backend.close()


def _one_line(error: Exception) -> str:
    text = one_line(error)
    if isinstance(error, (InputError, RefusedError)):
        return text  # every rank raises the same: name none
    kind = "" if isinstance(error, HvdtrainError) else f"{type(error).__name__}: "
    return f"rank {detect().rank}: {kind}{text}"


if __name__ == "__main__":
    main(sys.argv[1])
