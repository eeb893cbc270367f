"""The launcher of a job whose ranks are fixed: a supervisor on every host, and the first error.

Used by `hvdtrain launch` and `function_call`; `supervisor` has the messages. Once all hosts are
connected the ranks start, numbered in the order of the hosts, with the variables that torchrun
sets. Imports no torch.
"""

from __future__ import annotations

import json
import math
import sys
import time
import uuid
from dataclasses import replace

from hvdtrain.errors import HvdtrainError, InputError, LaunchError, WorldError
from hvdtrain.job.world import HVDRUN_ID, RESTART_VARIABLE
from hvdtrain.launch.event_loop import (
    EventLoop,
    HostConnection,
    Job,
    Rank,
    RankFailed,
    how_ended,
)
from hvdtrain.launch.host_list import choose_slots
from hvdtrain.launch.remote import is_this_host, master_address


def run(job: Job) -> None:
    """Run the ranks to their end, again if they fail and `max_restarts` allows it. Raises
    RankFailed for the first that failed, WorldError for a lost host, LaunchError for one that did
    not start, KeyboardInterrupt for Ctrl-C, and JobStopped for SIGTERM and SIGHUP.
    """
    try:
        if job.output is not None:
            job.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output-filename {job.output}: {error.strerror}") from None
    name, cause = uuid.uuid4().hex, ""
    for number in range(job.max_restarts + 1):
        restart = {"job": name, "number": number, "of": job.max_restarts, "cause": cause}
        if job.max_restarts:
            job = replace(job, env={**job.env, RESTART_VARIABLE: json.dumps(restart)})
        try:
            _Attempt(job, "ab" if number else "wb").run()
            return
        except (RankFailed, WorldError) as error:
            if number == job.max_restarts:
                raise
            cause = str(error)
            again = f"restart {number + 1} of {job.max_restarts}: {cause}; all ranks start again"
            if isinstance(error, WorldError):
                job = _without(job, error.value)
                again += f" on {','.join(map(str, job.hosts))}"
            print(again, file=sys.stderr, flush=True)


def _without(job: Job, lost: object) -> Job:
    """Return a job on the other hosts, if their slots suffice for its ranks, else itself."""
    slots = [host for host in job.slots if host.name != lost]
    size = sum(host.slots for host in job.hosts)
    if sum(host.slots for host in slots) < size:
        return job
    return replace(job, slots=slots, hosts=choose_slots(slots, size))


class _Attempt(EventLoop[Rank]):
    """One start of the job."""

    def _begin(self) -> None:
        self._start_by = time.monotonic() + self.job.start_timeout_s
        for host in self.job.hosts:
            if self.stopped_by is None:
                self._connect(host.name, None if self.connections else self.job.master_port)

    def _decide(self) -> None:
        if not self.connections:
            self._end()
        elif time.monotonic() >= self._start_by:
            late = ", ".join(each.host for each in self.connections if each.port is None)
            timeout_s = self.job.start_timeout_s
            self._fail(
                LaunchError(f"no ranks started on {late} within --start-timeout {timeout_s:g} s")
            )

    def _handle_ready(self, connection: HostConnection) -> None:
        """Start all ranks, once all hosts are connected."""
        job, hosts = self.job, self.job.hosts
        ports = [each.port for each in self.connections]
        if None in ports or len(ports) < len(hosts) or self.stopped_by is not None:
            return
        if not ports[0]:
            port = f"port {job.master_port} of {hosts[0].name}"
            self._fail(LaunchError(f"{port} is in use; give another --master-port"))
            return
        self._start_by = math.inf
        master = job.master_addr or master_address([host.name for host in hosts])
        rank, size = 0, sum(host.slots for host in hosts)
        for node, host in enumerate(hosts):
            for slot in range(host.slots):
                variables = {
                    "RANK": rank,
                    "LOCAL_RANK": slot,
                    "GROUP_RANK": node,
                    "ROLE_RANK": rank,
                    "WORLD_SIZE": size,
                    "LOCAL_WORLD_SIZE": host.slots,
                    "GROUP_WORLD_SIZE": len(hosts),
                    "ROLE_WORLD_SIZE": size,
                    "ROLE_NAME": "default",
                    "MASTER_ADDR": master,
                    "MASTER_PORT": ports[0],
                    "TORCHELASTIC_RUN_ID": HVDRUN_ID,
                    "TORCHELASTIC_RESTART_COUNT": 0,
                    "TORCHELASTIC_MAX_RESTARTS": 0,
                    "TORCHELASTIC_USE_AGENT_STORE": False,  # rank 0 serves the store
                }
                folder = f"rank.{rank:0{len(str(size - 1))}d}"  # rank.07 of 16, as horovodrun's
                place = Rank(rank, self.connections[node], slot, folder)
                self._start(place, host.slots, variables)
                rank += 1

    def _handle_exit(self, rank: Rank, code: int) -> None:
        if code:
            self._fail(RankFailed(f"rank {rank.number} on {rank.host}", code, rank.number))

    def _handle_lost(self, connection: HostConnection, code: int | None) -> None:
        host, is_here = connection.host, is_this_host(connection.host)
        what = f"the supervisor on {host}" if is_here else f"{self.job.remote.name} to {host}"
        if code is None:
            # It is reported before the ranks end, so that no rank that loses them is blamed.
            self._fail(WorldError(f"the supervisor on {host} was killed", value=host))
        elif connection.port is None:
            hint = "" if is_here else ", or check that its shell runs commands"
            text = f"{what} {how_ended(code)} before its ranks started"
            self._fail(LaunchError(f"{text}; see its output above{hint}"))
        elif code or connection.ranks:
            self._fail(WorldError(f"{what} {how_ended(code)}", value=host))

    def _fail(self, error: HvdtrainError) -> None:
        """Keep the first error, and end the ranks of all hosts; after a signal they are ending."""
        if self.stopped_by is None:
            self.error = self.error or error
            self._end()
