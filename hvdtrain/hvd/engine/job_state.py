"""JobState: what the parts of one rank's engine share, and how the job ends.

The engine, its executor and the bucket channels use it.
"""

from __future__ import annotations

import os
import threading
import time

from hvdtrain.hvd.engine.process_groups import ProcessGroups
from hvdtrain.hvd.engine.settings import Settings
from hvdtrain.hvd.engine.timeline import Timeline
from hvdtrain.hvd.exceptions import SHUT_DOWN, HorovodInternalError
from hvdtrain.job.world import World
from hvdtrain.liveness.failure import print_stderr
from hvdtrain.liveness.peers import Peers

_FAILURE_WAIT_S = 3.0


class JobState:
    """The connections of one rank, and whether the job goes on.

    `shutdown_reason` is why no operation begins any more, `abort_reason` why running ones cannot
    complete either.
    """

    process_groups: ProcessGroups
    timeline: Timeline

    def __init__(self, world: World, settings: Settings, control: Peers) -> None:
        self.world = world
        self.settings = settings
        self.control = control
        self.executor_gpu = 0  # also of the zeros of a rank that has joined
        self.shutdown_reason: str | None = None
        self.abort_reason: str | None = None
        self.final_steps: dict[str, int] | None = None  # of the rank that left, by channel

    def peer_left_before(self, channel: str, step: int) -> bool:
        """Return whether a rank left before it had sent all buckets of this step of a channel."""
        return self.final_steps is not None and self.final_steps.get(channel, 0) < step

    def report_broken(self, reason: str) -> None:
        """Report a failed connection to rank 0, which shuts all ranks down a moment later."""
        self.control.send(0, ["broken", f"{SHUT_DOWN} Rank {self.world.rank} reports: {reason}"])

    def failure(self, otherwise: str) -> HorovodInternalError:
        """Return an error of why the job is over; of `otherwise` if that is unknown within 3 s.

        After a broken connection: the control plane usually names the lost rank a moment later.
        """
        deadline = time.monotonic() + _FAILURE_WAIT_S
        while self.shutdown_reason is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return HorovodInternalError(self.shutdown_reason or otherwise, lost_peer=True)

    def check_running(self) -> None:
        """Raise HorovodInternalError if no operation begins any more."""
        if self.shutdown_reason is not None:
            raise HorovodInternalError(self.shutdown_reason, lost_peer=True)

    def bind_to_core(self) -> None:
        """Bind the calling thread, one of the engine's, to this rank's HOROVOD_THREAD_AFFINITY."""
        cores, local_rank = self.settings.thread_affinity, self.world.local_rank
        if local_rank >= len(cores) or not hasattr(os, "sched_setaffinity"):
            return
        try:
            os.sched_setaffinity(0, {cores[local_rank]})  # 0 is this thread, not the process
        except (OSError, OverflowError, ValueError) as error:
            print_stderr(
                f"hvd: rank {self.world.rank}: HOROVOD_THREAD_AFFINITY: core {cores[local_rank]} "
                f"cannot be used ({error}); thread {threading.current_thread().name} is not bound"
            )
