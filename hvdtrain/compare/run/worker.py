"""One rank of one arm: `python -m hvdtrain.compare.run.worker SOCKET`, under the arm's launcher.

It connects to the comparison and serves its calls until that closes the connection; `arm_process`
shows the sequence. A call is "open" or the name of a method of `ArmRank`, with arguments. Every
call is collective over the ranks of the arm.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import torch

from hvdtrain import provenance
from hvdtrain.backends import open_backend
from hvdtrain.compare.compare_options import steps_in_sync
from hvdtrain.compare.proof.trace_recorder import record_trace
from hvdtrain.compare.proof.work_trace import RankTrace
from hvdtrain.compare.record import RankSettings
from hvdtrain.compare.run.by_hand import ByHand
from hvdtrain.compare.run.messages import RankFacts, StepTimes
from hvdtrain.errors import HvdtrainError, InputError, TrainingDiverged, one_line
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.meter import StepTaken
from hvdtrain.training.metrics import fingerprint
from hvdtrain.training.task import Task, load_task
from hvdtrain.training.trainer import Trainer
from hvdtrain.transports.malloc import return_freed_memory
from hvdtrain.world import World, detect

# Variables that mpirun sets in its ranks for its own use, such as addresses and folders.
_BY_MPIRUN = tuple(
    f"OMPI_MCA_{name}" for name in "ess initial_wdir orte pmix shmem mpi_oversubscribe".split()
)
LOOPS: dict[str, type[Trainer] | type[ByHand]] = {"trainer": Trainer, "by hand": ByHand}


class ArmRank:
    """One rank: its backend, and the training loop whose steps it takes."""

    def __init__(
        self, backend: str, loop: str, options: dict[str, Any], pin: bool, per_host: int
    ) -> None:
        """Open model and loop.

        `options`: of TrainConfig; `pin`: bind to a share of the cores; `per_host`: the ranks by
        which a host's cores are divided, if `options` has no number of threads.
        """
        world, cores = detect(), sorted(os.sched_getaffinity(0))
        config = TrainConfig(**options)
        if config.threads is None:  # before this rank is bound to its share, which is divided
            config = replace(config, threads=max(1, len(cores) // per_host))
        if pin:
            os.sched_setaffinity(0, share_of_cores(world, cores))
        # Before any inter-op parallel work: torch rejects a later change.
        torch.set_num_interop_threads(1)
        self.backend = open_backend(backend, world, config.backend_options())
        task = load_task(config.task, config.set)
        self.loop = LOOPS[loop](task, self.backend, config)
        self.loop.set_up(record=False)
        self._last_step = 0
        self._steps = self._numbered(self.loop.steps())
        self._is_cuda = self.backend.device.type == "cuda"
        self._optimizer_s = 0.0
        self._peak_is_of_steps = False
        gc.collect()
        gc.freeze()  # garbage collections in timed steps skip the objects of set-up
        self._gradient_bytes = sum(
            p.numel() * p.element_size() for p in self.loop.model.parameters() if p.requires_grad
        )

    def _numbered(self, steps: Iterator[StepTaken]) -> Iterator[StepTaken]:
        """Yield the same steps, and remember the number of the last."""
        for step in steps:
            self._last_step = step.number
            yield step

    def facts(self) -> RankFacts:
        """Return the settings in force on this rank."""
        config = self.loop.config
        variables = {
            name: value
            for name, value in provenance.variables(os.environ).items()
            if not name.startswith(_BY_MPIRUN)
        }
        return RankFacts(
            settings=RankSettings(
                threads=torch.get_num_threads(),
                interop_threads=torch.get_num_interop_threads(),
                affinity=sorted(os.sched_getaffinity(0)),
                variables=variables,
            ),
            describe={**self.backend.describe(), "reason": self.backend.reason},
            samples_per_step=self.loop.batches.global_micro_batch * config.accumulate,
            gradient_bytes=self._gradient_bytes,
            parameters=sum(p.numel() for p in self.loop.model.parameters()),
            lr=[group["lr"] for group in self.loop.optimizer.param_groups],
            data=describe_data(self.loop.task, self.loop.batches.num_samples),
        )

    def trace(self, steps: int) -> RankTrace:
        """Take the first steps, and return the trace of their work."""
        self._peak_is_of_steps = False
        return record_trace(self.loop, self._steps, steps)

    def time_steps(self, steps: int, skip: int) -> StepTimes:
        """Take `skip` untimed steps, then time `steps` in a row, without barriers between them.

        Raise TrainingDiverged if the last loss is not finite.
        """
        if not self._peak_is_of_steps:
            self._reset_peak()
        begin = time.process_time()
        self.backend.barrier()
        for _ in range(skip):
            next(self._steps)
        # CUDA steps are asynchronous: events in the stream time them without a synchronisation.
        clock = _Clock(self._is_cuda)
        found, step = StepTimes(), None
        cpu = time.process_time()
        clock.mark()
        for _ in range(steps):
            step = next(self._steps)
            clock.mark()
            found.input_ms.append(1000 * step.data_s)
        found.step_ms = clock.between_ms()
        found.cpu_s = time.process_time() - cpu
        found.whole_cpu_s = time.process_time() - begin
        assert step is not None
        if not torch.isfinite(step.loss):
            raise TrainingDiverged(
                f"the loss became {float(step.loss)} by step {step.number}, and steps on such "
                "numbers are not what training costs; lower the learning rate with --lr"
            )
        return found

    def time_breakdown(self, steps: int) -> StepTimes:
        """Time the parts of steps; all ranks begin each step together, after a barrier."""
        precision, plain = self.loop.precision, self.loop.precision.step

        def timed(optimizer: torch.optim.Optimizer) -> None:
            self._synchronise()
            begin = time.perf_counter()
            plain(optimizer)
            self._synchronise()
            self._optimizer_s = time.perf_counter() - begin

        found, cpu = StepTimes(), time.process_time()
        # Both loops call `precision.step`: wrapping it separates the optimizer's time.
        precision.step = timed  # type: ignore[method-assign]
        try:
            for _ in range(steps):
                self.backend.barrier()
                begin = time.perf_counter()
                step = next(self._steps)
                self._synchronise()
                whole = time.perf_counter() - begin
                found.step_ms.append(1000 * whole)
                found.input_ms.append(1000 * step.data_s)
                found.optimizer_ms.append(1000 * self._optimizer_s)
                found.rest_ms.append(1000 * (whole - step.data_s - self._optimizer_s))
        finally:
            del precision.step
        found.whole_cpu_s = time.process_time() - cpu
        return found

    def _synchronise(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def time_memcpy(self, repeats: int) -> list[float]:
        """Return the ms of each copy of as many bytes as all gradients, on all ranks at once."""
        source = torch.ones(
            max(1, self._gradient_bytes), dtype=torch.uint8, device=self.backend.device
        )
        target = torch.empty_like(source)
        target.copy_(source)  # untimed: faults in the pages
        found = []
        for _ in range(repeats):
            self.backend.barrier()
            begin = time.perf_counter()
            target.copy_(source)
            self._synchronise()
            found.append(1000 * (time.perf_counter() - begin))
        return found

    def _reset_peak(self) -> None:
        """Reset the peak memory, so that it does not include start and parity check.

        The first window calls it, not the end of `trace`, when the trace is still to be sent.
        """
        self._peak_is_of_steps = True
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        return_freed_memory()
        # proc(5): writing "5" resets VmHWM to the present resident size. If that is not permitted,
        # the peak includes start and parity check.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def peak_mib(self) -> float:
        """Return the peak memory of this rank's steps in MiB: resident, or on a GPU allocated
        there.
        """
        if self._is_cuda:
            return torch.cuda.max_memory_allocated() / 2**20
        # Not ru_maxrss, which starts at the launcher's value.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10

    def fingerprint(self) -> tuple[int, str]:
        """Return the number of the last optimizer step, in any phase, and a hash of this rank's
        parameters after it. With local SGD, take the steps up to the next average before.
        """
        for _ in range(steps_in_sync(self._last_step, self.loop.config) - self._last_step):
            next(self._steps)
        return self._last_step, fingerprint(dict(self.loop.model.named_parameters()))


def share_of_cores(world: World, cores: list[int]) -> list[int]:
    """Return the cores of a rank: an equal share of its host's; one if the ranks exceed them."""
    share = len(cores) // world.local_size
    if share == 0:
        return [cores[world.local_rank % len(cores)]]
    return cores[world.local_rank * share :][:share]


def describe_data(task: Task, num_samples: int | None) -> str:
    """Return the task's description of its data, with the number of samples."""
    size = "a stream" if num_samples is None else f"{num_samples} samples"
    return f"{task.about_data or 'the task does not say (Task.about_data)'}; {size}"


class _Clock:
    """Timestamps between steps: of the CPU's clock, or CUDA events in the current stream."""

    def __init__(self, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def between_ms(self) -> list[float]:
        if self._is_cuda:
            torch.cuda.synchronize()
            pairs = zip(self._marks, self._marks[1:], strict=False)
            return [float(before.elapsed_time(after)) for before, after in pairs]
        return [1000 * (b - a) for a, b in zip(self._marks, self._marks[1:], strict=False)]


def connect(address: str) -> Connection:
    """Connect to the comparison's socket; on another host, to one that ssh forwards there."""
    for path in [address, *sorted(glob.glob(f"{address}-*"))]:
        with contextlib.suppress(OSError):
            return Client(path, "AF_UNIX")
    raise OSError(f"no socket of the comparison at {address}")


def main(address: str) -> None:
    """Serve calls until the comparison sends None or closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the comparison handles Ctrl-C
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)  # so that SIGSTOP reaches data loader processes too
    rank: ArmRank | None = None
    with connect(address) as connection:
        world = detect()
        connection.send_bytes(pickle.dumps((world.rank, world.size, os.getpid())))
        while True:
            try:
                call = pickle.loads(connection.recv_bytes())
            except EOFError:
                break
            if call is None:
                break
            what, *arguments = call
            try:
                if what == "open":
                    rank = ArmRank(*arguments)
                    answer: Any = rank.facts()
                else:
                    answer = getattr(rank, what)(*arguments)
                reply = (True, answer)
            except Exception as error:  # the log gets the traceback, the comparison one line
                traceback.print_exc()
                reply = (False, _one_line(error))
            connection.send_bytes(pickle.dumps(reply))
    if rank is not None:
        rank.backend.close()


def _one_line(error: Exception) -> str:
    text = one_line(error)
    if isinstance(error, InputError):
        return text  # every rank raises the same: name none
    kind = "" if isinstance(error, HvdtrainError) else f"{type(error).__name__}: "
    return f"rank {detect().rank}: {kind}{text}"


if __name__ == "__main__":
    main(sys.argv[1])
