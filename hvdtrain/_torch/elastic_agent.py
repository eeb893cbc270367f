"""torch's elastic agent, which reports a failed rank at once. Used by `launch.agent`.

Relies on `LocalElasticAgent._monitor_workers`, which is called every `monitor_interval`, and on its
`_pcontext`. torch ends the other ranks of the host, in up to 30 s, before it returns the failures.
Without the names a failed rank is reported when the agent ends.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


class ReportingAgent(LocalElasticAgent):
    """Calls `on_failure(rank, exit code)`, with -9 for SIGKILL, before it ends the other ranks."""

    def __init__(self, *arguments: Any, on_failure: Callable[[int, int], None], **more: Any):
        super().__init__(*arguments, **more)
        self._on_failure = on_failure
        self._reported: set[int] = set()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        codes = {
            worker.global_rank: handlers[worker.local_rank].proc.poll()
            for worker in worker_group.workers
            if worker.local_rank in handlers
        }
        self._report(codes)
        result: RunResult = super()._monitor_workers(worker_group)
        # Ranks that have failed since.
        self._report({rank: failure.exitcode for rank, failure in result.failures.items()})
        return result

    def _report(self, codes: dict[int, int | None]) -> None:
        """Report new failures; first a killed rank, which others may have lost, and last those that
        torch has ended by SIGTERM.
        """
        failed = [(rank, code) for rank, code in codes.items() if code]
        for rank, code in sorted(
            failed, key=lambda each: (each[1] == -signal.SIGTERM, each[1] > 0)
        ):
            if rank not in self._reported:
                self._reported.add(rank)
                self._on_failure(rank, code)
