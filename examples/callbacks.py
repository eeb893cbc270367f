r"""Callbacks of your own for any task: an early stop, a best checkpoint, an average of weights, a
log of gradients, a profile.

torchrun --nproc-per-node 2 -m hvdtrain --callback examples/callbacks.py:Plateaued \
    --callback examples/callbacks.py:Lowest --callback examples/callbacks.py:Averaged
torchrun --nproc-per-node 2 -m hvdtrain --callback examples/callbacks.py:Gradients \
    --callback examples/callbacks.py:Profiled
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.profiler import profile

from hvdtrain import Callback, Trainer


class Plateaued(Callback):
    """Ends the run when two evaluations in a row have not lowered the loss."""

    lowest, since = math.inf, 0

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        self.since = 0 if metrics["loss"] < self.lowest else self.since + 1
        self.lowest = min(self.lowest, metrics["loss"])
        if self.since >= 2:
            trainer.stop("the loss has not fallen in 2 evaluations")

    def state_dict(self) -> dict[str, Any]:
        return {"lowest": self.lowest, "since": self.since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lowest, self.since = state["lowest"], state["since"]


class Lowest(Callback):
    """Saves a checkpoint after each evaluation with the lowest loss so far, and keeps the last."""

    lowest, step = math.inf, 0

    def on_evaluate(self, trainer: Trainer, metrics: Mapping[str, Any]) -> None:
        if metrics["loss"] < self.lowest:
            self.lowest, self.step = metrics["loss"], trainer.progress.step
            trainer.request_checkpoint()

    def kept_steps(self) -> list[int]:
        return [self.step]

    def state_dict(self) -> dict[str, Any]:
        return {"lowest": self.lowest, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lowest, self.step = state["lowest"], state["step"]


class Averaged(Callback):
    """Evaluates an exponential moving average of the weights."""

    def on_start(self, trainer: Trainer) -> None:
        update = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        self.average = AveragedModel(trainer.model, multi_avg_fn=update)
        trainer.eval_model = self.average.module

    def on_step_end(self, trainer: Trainer) -> None:
        self.average.update_parameters(trainer.model)

    def state_dict(self) -> dict[str, Any]:
        return self.average.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state)


class Gradients(Callback):
    """Writes norms of each parameter's gradient into gradients.jsonl of the run directory, in every
    20th step: of the mean before it is clipped, and of what each rank has computed itself.
    """

    every = 20

    def on_start(self, trainer: Trainer) -> None:
        self.own: dict[str, Tensor] = {}
        for name, p in trainer.model.named_parameters():
            if p.requires_grad:
                p.register_hook(partial(self.add, name))  # type: ignore[no-untyped-call]

    def add(self, name: str, grad: Tensor) -> None:
        # In the first step DDP sends the gradients through the hooks once more.
        self.own[name] = self.own.get(name, 0) + grad

    def on_gradients(self, trainer: Trainer, losses: Sequence[Tensor]) -> None:
        own, self.own = self.own, {}
        step, scale = trainer.progress.step + 1, trainer.precision.scaler.get_scale()
        if step % self.every:
            return
        norms = {name: float(grad.norm()) / scale for name, grad in own.items()}
        by_rank = trainer.backend.all_gather_object(norms)
        if trainer.run_dir is None:
            return  # rank 0 writes
        with (trainer.run_dir / "gradients.jsonl").open("a") as file:
            for name, p in trainer.model.named_parameters():
                if p.grad is not None:
                    line = {"step": step, "name": name, "norm": float(p.grad.norm()) / scale}
                    line["by_rank"] = [of_rank.get(name) for of_rank in by_rank]
                    file.write(json.dumps(line) + "\n")


class Profiled(Callback):
    """Writes a trace of the steps 11 to 13 of each rank into the run directory, for
    https://ui.perfetto.dev: operators, kernels of a GPU, and what Gloo or NCCL do.
    """

    first, last = 11, 13

    def on_start(self, trainer: Trainer) -> None:
        self.folder: Any = trainer.backend.broadcast_object(trainer.run_dir)
        self.profile = profile()

    def on_step_end(self, trainer: Trainer) -> None:
        step = trainer.progress.step
        if step == self.first - 1:
            self.profile.start()
        if step == self.last:
            self.profile.stop()
            path = self.folder / f"profile-{trainer.world.rank}.json"
            self.profile.export_chrome_trace(str(path))
            trainer.console.print_line(f"profile  {path}")
