"""A hand-written DDP training loop on the same samples, as the reference for hvdtrain's own loop.

`arm_script` runs it for the arm "by hand". The Trainer's extra time per step is its overhead.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hvdtrain._torch.ddp_buckets import FORWARD_SYNC
from hvdtrain.backends.base import Backend
from hvdtrain.optim.model_sync import fill_missing_gradients, sync_buffers
from hvdtrain.training import determinism
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.data_loading import (
    StepBatches,
    check_same_plan,
    derive_seed,
    make_loader,
    on_device,
    shard,
)
from hvdtrain.training.lr_schedule import RateSchedule, Unit
from hvdtrain.training.meter import StepTaken
from hvdtrain.training.precision import Precision
from hvdtrain.training.task import CheckedTask, Task
from hvdtrain.training.weighted_loss import WeightedLosses
from hvdtrain.transports.malloc import keep_freed_memory


class ByHand:
    """The part of `Trainer`'s interface that a comparison needs: `set_up`, then `steps`."""

    def __init__(self, task: Task, backend: Backend, config: TrainConfig) -> None:
        self.task, self.backend, self.config = task, backend, config
        self.precision = Precision(config.precision, backend.device)
        self.on_batch: Callable[[Any], None] | None = None

    def set_up(self, record: bool = False) -> None:
        """Create model, optimizer and data loader. Collective: DDP broadcasts the weights."""
        config, world = self.config, self.backend.world
        determinism.set_threads(config.threads, world, os.environ)
        keep_freed_memory()
        determinism.seed_all(derive_seed(config.seed))
        data, _ = self.task.datasets()
        self.batches = shard(data, config, world, CheckedTask(self.task).sampler)
        self.loader = make_loader(
            data,
            self.batches,
            self.task.collate,
            world,
            self.backend.device,
            config.workers,
            config.seed,
        )
        check_same_plan(self.backend, data, {}, config)
        determinism.seed_all(derive_seed(config.seed))
        self.model: nn.Module = self.precision.convert(self.task.model()).to(self.backend.device)
        self.optimizer = self.task.optimizer(self.model)
        if config.lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = config.lr
        per_epoch = -(-len(self.batches) // config.accumulate)
        own = self.task.schedule(self.optimizer, per_epoch, config.epochs * per_epoch)
        # One that depends on evaluations keeps its rate: nothing is evaluated here.
        unit: Unit = "epoch" if self.task.schedule_unit == "epoch" else "step"
        self.schedule = None if own is None else RateSchedule(own, unit)
        on_gpu = self.backend.device.type == "cuda"
        self._names: dict[Tensor, str] = {p: n for n, p in self.model.named_parameters()}
        self.net = DistributedDataParallel(
            self.model,
            device_ids=[self.backend.device.index] if on_gpu else None,
            bucket_cap_mb=config.bucket_mib,
            # All arms share one buffer policy, which `_step` applies; DDP's forward must not.
            **cast("dict[str, Any]", {FORWARD_SYNC: False}),
            find_unused_parameters=config.unused_parameters == "zero",
            gradient_as_bucket_view=True,
        )

    def steps(self) -> Iterator[StepTaken]:
        """Take one optimizer step for each `next`, epoch after epoch. Collective."""
        number = 0
        for epoch in count():
            self.batches.begin(self.backend, epoch, 0)
            data = on_device(self.loader, self.backend.device, self.precision.convert_batch)
            is_first = True
            for batches in self.batches.steps(self.config.accumulate, data):
                # Dropout needs the same random numbers as in every other arm.
                determinism.seed_all(derive_seed(self.config.seed, number, self.backend.world.rank))
                number += 1
                if self.schedule is not None and epoch and is_first:
                    self.schedule.after_epoch()
                is_first = False
                yield self._step(number, batches)

    def _step(self, number: int, batches: StepBatches) -> StepTaken:
        net, optimizer, precision = self.net, self.optimizer, self.precision
        data_s, total = 0.0, torch.zeros((), device=self.backend.device)
        passes, weights = batches.num, batches.weights
        weighted: WeightedLosses | None = None
        for k in range(passes):
            waited = time.perf_counter()
            batch = next(batches.data)
            data_s += time.perf_counter() - waited
            if self.on_batch is not None:
                self.on_batch(batch)
            with nullcontext() if k == passes - 1 else net.no_sync():
                with precision.autocast():
                    loss = self.task.loss(net, batch)
                    if isinstance(loss, tuple):
                        if weighted is None:
                            weighted = WeightedLosses(self.backend, self.model.parameters(), passes)
                        counts = weights is None or weights[k] > 0
                        loss = weighted.scale(loss[0], float(loss[1]) if counts else 0.0)
                    else:
                        loss = loss / passes if weights is None else loss * weights[k]
                precision.backward(loss)
            if weighted is None:
                total += loss.detach()
        if weighted is not None:
            total = weighted.mean()
        # DDP skips parameters that no rank used. If the option makes that an error, DDP raises only
        # in the second step, with a long text; this call raises in the first.
        if number == 1 or self.config.unused_parameters == "zero":
            policy = self.backend.options.unused_parameters
            fill_missing_gradients(optimizer, self._names, policy)
        sync_buffers(self.backend, self.model)
        precision.unscale_(optimizer)
        if not math.isinf(self.config.clip_norm):
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        precision.step(optimizer)
        if self.schedule is not None:
            self.schedule.after_step()
        optimizer.zero_grad()
        return StepTaken(number, data_s, total)
