"""An elastic training, in the form of Horovod's examples, that counts each sample of each epoch.

Arguments: a file whose existence ends the training at the end of the epoch; seconds for a batch.
Prints "START rank/size pid" when it enters a world, "STEP rank/size pid" after the first step
there, "EPOCH n missing m repeated k" on rank 0, and "END rank/size pid parameters".
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import hvdtrain.hvd as hvd

SAMPLES = 36
BATCH = 2


def say(word: str, *more: object) -> None:
    print(word, f"{hvd.rank()}/{hvd.size()}", os.getpid(), *more, flush=True)


def checksum(model: torch.nn.Module, optimizer: Any) -> str:
    """Return a hash of the parameters and their momentum."""
    tensors = [*model.parameters()]
    tensors += [s["momentum_buffer"] for s in optimizer.state_dict()["state"].values()]
    return hashlib.sha256(repr([t.tolist() for t in tensors]).encode()).hexdigest()[:16]


def train_epoch(state: Any, data: torch.Tensor) -> None:
    indices = list(state.sampler)
    for number, start in enumerate(range(0, len(indices), BATCH)):
        batch = indices[start : start + BATCH]
        state.optimizer.zero_grad()
        state.model(data[batch]).square().mean().backward()
        state.optimizer.step()
        everyone = hvd.allgather_object(batch, name="batch")
        state.seen = state.seen + [index for part in everyone for index in part]
        state.sampler.record_batch(number, BATCH)
        if state.is_first:
            say("STEP")
            state.is_first = False
        time.sleep(float(sys.argv[2]))
        if number % 3 == 2:
            state.commit()


@hvd.elastic.run
def train(state: Any, data: torch.Tensor) -> None:
    say("START")
    state.is_first = True
    is_done = False
    while not is_done:
        train_epoch(state, data)
        if hvd.rank() == 0:
            missing = set(range(SAMPLES)) - {*state.seen}
            # The last round of a world is filled up: at most one batch for each rank but one.
            repeated = len(state.seen) - SAMPLES
            print("EPOCH", state.epoch, "missing", len(missing), "repeated", repeated, flush=True)
        is_done = hvd.broadcast_object(Path(sys.argv[1]).exists(), name="finish")
        state.epoch += 1
        state.seen = []
        state.sampler.set_epoch(state.epoch)
        state.commit()


def main() -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    data = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(0))
    sampler = hvd.elastic.ElasticSampler(data, shuffle=True)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, seen=[])
    train(state, data)
    say("END", checksum(model, optimizer))


if __name__ == "__main__":
    main()
