"""A task whose ranks die as told, once each: see test_restart.py and benchmarks/chaos.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hvdtrain import detect
from hvdtrain.tasks.mlp import MLP

SAMPLES, STEPS = 256, 8  # an epoch of two ranks with micro-batches of 16 has 8 steps


class Dying(MLP):
    """`deaths`: "1:12,0:3" kills rank 1 in its 12th step, and after the restart rank 0 in its
    third; in step 0 while it makes the model; "1:2!" raises instead. `folder` keeps which have
    been.
    """

    hidden = 8

    def __init__(self, folder: str, deaths: str = "") -> None:
        super().__init__(width=self.hidden, depth=2, features=4, samples=SAMPLES)
        self.num_samples = 2 * SAMPLES
        self.folder = Path(folder)
        self.steps = 0
        number = len([*self.folder.glob("dead-*")])
        self.mark = self.folder / f"dead-{number}"
        self.death = [*deaths.split(","), ""][number]

    def _maybe_die(self) -> None:
        if self.death.rstrip("!") == f"{detect().rank}:{self.steps}":
            self.mark.touch()
            if self.death.endswith("!"):
                raise ArithmeticError("as told")
            signal.raise_signal(signal.SIGKILL)

    def model(self) -> nn.Module:
        self._maybe_die()
        return nn.Sequential(super().model(), nn.Dropout(0.2))

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        self.steps += 1
        self._maybe_die()
        return super().loss(net, batch)


class Observed(Dying):
    """Appends "PHASE RANK PID TIME" to the file `events` of `folder` as it begins each step,
    checkpoint and batch of an evaluation. A step sleeps for 5 ms.
    """

    hidden = 300

    def _observe(self, phase: str) -> None:
        with (self.folder / "events").open("a") as events:
            events.write(f"{phase} {detect().rank} {os.getpid()} {time.time()}\n")

    def model(self) -> nn.Module:
        model = super().model()
        hook = self._before_checkpoint
        model.register_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
        return model

    def _before_checkpoint(self, *unused: Any) -> None:
        if self.steps:
            self._observe("checkpoint")

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        self._observe("training")
        time.sleep(0.005)
        return super().loss(net, batch)

    def metrics(self, net: nn.Module, batch: Any) -> dict[str, Tensor]:
        self._observe("evaluation")
        return super().metrics(net, batch)
