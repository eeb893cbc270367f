"""A task, and a callback that counts each sample of each epoch, for elastic runs of the Trainer.

The callback prints "START rank/size pid" when it enters a world, "STEP rank/size time" after the
first step there, "EPOCH n missing m repeated k" on rank 0, and "END rank/size pid state". Its
counts are in commits, so a step that is lost takes its samples along. It ends the run after the
epoch in which the file $FINISH exists.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hvdtrain import Callback, Task, Trainer

SAMPLES = 40


class Numbered(Dataset[tuple[int, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.randn(8, generator=torch.Generator().manual_seed(index))


class Small(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def datasets(self) -> tuple[Numbered, Numbered]:
        return Numbered(), Numbered()

    def loss(self, net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = net(batch[1]).square().mean()
        return loss


class Count(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.batch: list[int] = []
        self.num_own = 0
        self.has_stepped = False

    def say(self, word: str, trainer: Trainer, *more: object) -> None:
        print(word, f"{trainer.world.rank}/{trainer.world.size}", *more, flush=True)

    def on_start(self, trainer: Trainer) -> None:
        trainer.on_batch = lambda batch: self.batch.extend(batch[0].tolist())
        self.say("START", trainer, os.getpid())

    def on_step_end(self, trainer: Trainer) -> None:
        # `--uneven join` gives a rank without samples one of another rank's, with the weight 0.
        before, self.num_own = self.num_own, trainer._own_samples
        mine, self.batch = self.batch[: self.num_own - before], []
        self.seen += sum(trainer.backend.all_gather_object(mine), [])
        if not self.has_stepped:
            self.say("STEP", trainer, time.time())
            self.has_stepped = True
        time.sleep(float(os.environ.get("PAUSE", "0.02")))

    def on_epoch_end(self, trainer: Trainer) -> None:
        missing = len({*range(SAMPLES)} - {*self.seen})
        if trainer.world.rank == 0:
            counts = "missing", missing, "repeated", len(self.seen) - SAMPLES
            print("EPOCH", trainer.progress.epoch - 1, *counts, flush=True)
        self.seen, self.num_own = [], 0
        if trainer.backend.broadcast_object(Path(os.environ["FINISH"]).exists()):
            trainer.stop("the test has seen enough")

    def on_end(self, trainer: Trainer) -> None:
        tensors: list[Any] = list(trainer.model.state_dict().values())
        states = trainer.optimizer.state_dict()["state"].values()
        tensors += [state["momentum_buffer"] for state in states]
        state = hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()
        self.say("END", trainer, os.getpid(), state[:16])

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])
