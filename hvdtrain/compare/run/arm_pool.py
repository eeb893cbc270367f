"""The arms of a comparison over its lifetime: started, called one at a time, failed, ended.

`comparison` uses it; it keeps each arm's row of the record up to date. An arm that fails is dropped
with its reason, and the others continue. Imports no torch.
"""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from operator import methodcaller
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.compare import probe
from hvdtrain.compare.compare_options import CompareOptions
from hvdtrain.compare.record import ArmRecord, RankSettings, Record
from hvdtrain.compare.run.arm_process import ArmFailed, ArmProcess
from hvdtrain.compare.run.arms import Arm
from hvdtrain.errors import LaunchError
from hvdtrain.launch.host_list import parse_host_list
from hvdtrain.launch.placement import free_port
from hvdtrain.launch.real_launchers import launch_environment
from hvdtrain.launch.remote_hosts import RemoteHosts
from hvdtrain.system.signals import uninterrupted

T = TypeVar("T")
THREADS = "OMP_NUM_THREADS"
# Of $TMPDIR in bytes: ssh and mpirun make sockets below, whose paths have at most 107.
_LONGEST_FOLDER = 30


Show = Callable[[Record, str], None]
"""Shows the results so far, and the current activity."""


class ArmPool:
    """All arms by name, and the running ones in `live`. A context manager that ends them."""

    def __init__(
        self,
        arms: Iterable[Arm],
        options: CompareOptions,
        record: Record,
        show: Show,
        folder: Path,
    ) -> None:
        self.options, self.record, self.folder = options, record, folder
        self.arms = {arm.name: arm for arm in arms}
        self.live: dict[str, ArmProcess] = {}
        self.start_s = 0.0
        """Duration of the longest start."""
        self._show = show
        self._num_started = 0
        for name, arm in self.arms.items():
            record.arms[name] = ArmRecord(name, role=arm.role, command=shlex.join(arm.line))

    def __enter__(self) -> ArmPool:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        hosts = parse_host_list(self.options.hosts) if self.options.hosts else []
        with ExitStack() as opened:
            where = tempfile.gettempdir()
            if len(os.fsencode(where)) > _LONGEST_FOLDER:
                where = "/tmp"
            folder = tempfile.TemporaryDirectory(prefix="hvdtrain-", dir=where)
            self._sockets = Path(opened.enter_context(folder))
            self._remote = opened.enter_context(RemoteHosts(hosts, self._sockets))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # This takes seconds, and a second Ctrl-C meanwhile must not leave ranks behind.
        with uninterrupted():
            try:
                self.end_all(gently=kind is None)
            finally:
                self._opened.close()

    @property
    def has_rivals(self) -> bool:
        """Whether there is still something to compare with the baseline, besides itself."""
        return any(self.arms[name].role == "arm" for name in self.live)

    def show_activity(self, activity: str) -> None:
        """Show the current activity."""
        self._show(self.record, activity)

    def start(self, names: list[str]) -> None:
        """Start arms in parallel, and wait until each has taken its first step."""
        began = time.monotonic()
        self.show_activity(f"starting {len(names)} commands")
        for name in names:
            try:
                self.live[name] = self._launch(name)
            except (ArmFailed, LaunchError) as error:
                self.drop(name, "failed", str(error))
        # In parallel: a start is mostly waiting, and nothing is timed yet.
        patience = self.options.timeout_s
        for name in names:
            self._attempt(name, methodcaller("meet", patience))
            self._attempt(name, methodcaller("begin", "open"))
        for name in names:
            facts = self._attempt(name, methodcaller("finish", patience))
            if facts is not None:
                self._record_facts(name, facts)
        self.start_s = max(self.start_s, time.monotonic() - began)

    def call(self, name: str, what: str, *arguments: object) -> list[Any] | None:
        """Run the call `what` on the ranks of an arm; None if the arm fails or failed before."""
        timeout_s = self.options.timeout_s + 60  # ranks time out first: their errors say more
        return self._attempt(name, lambda arm: arm.call(what, *arguments, timeout_s=timeout_s))

    def drop(self, name: str, status: str, reason: str) -> None:
        """Drop an arm that has failed or is refused, and end it. Its measurements are kept. Without
        the baseline no arm can be compared.
        """
        row = self.record.arms[name]
        if row.status != "measured":
            row.status, row.reason = status, reason
        if name in self.live:
            # It stays in `live` until it has ended, in case of Ctrl-C.
            self.live[name].end(gently=status == "refused")
            self.live.pop(name, None)
        self.show_activity(f"{name} {status}: {reason}")
        if row.role == "baseline":
            why = f"there is nothing to compare with: the baseline {name} {status}"
            for other in list(self.live):
                self.drop(other, "failed", why)

    def end_all(self, gently: bool) -> None:
        """End all arms. `gently`: by a normal exit, else by SIGKILL."""
        if gently:  # ask all first, so that they exit in parallel
            for arm in self.live.values():
                arm.release()
        for arm in self.live.values():
            arm.end(gently)
        self.live.clear()

    def _attempt(self, name: str, action: Callable[[ArmProcess], T]) -> T | None:
        """Return `action(process)` for an arm; None if the arm fails now or has failed before."""
        if name not in self.live:
            return None
        try:
            return action(self.live[name])
        except ArmFailed as error:
            self.drop(name, "failed", str(error))
            return None

    def _launch(self, name: str) -> ArmProcess:
        """Start the command of an arm. Raise ArmFailed if the program cannot be started."""
        arm, options = self.arms[name], self.options
        self._num_started += 1
        address = self._sockets / str(self._num_started)
        log = Path("logs") / f"{arm.slug}.log"
        self.record.arms[name].log = str(log)
        shares_cores = not any(THREADS in word for word in arm.line)
        env, port = self._environment(), free_port()
        env = probe.environment(env, address, port, options.pin, options.optimizer, shares_cores)
        return ArmProcess(arm.command(port), env, address, self.folder / log, self._remote)

    def _environment(self) -> dict[str, str]:
        """Return this environment without launcher variables, with what a command needs to be
        stopped for a while; all else is as a user runs it.
        """
        return {
            **launch_environment(),
            "TMPDIR": str(self._sockets),  # torchrun leaves a folder there per job
            # Two mpiruns of one user that start together can fail to create their common folder.
            "OMPI_MCA_orte_tmpdir_base": tempfile.mkdtemp(dir=self._sockets),
            # Horovod's Gloo times out on stopped ranks, and all arms but one are stopped.
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "36000",
            "PYTHONUNBUFFERED": "1",
        }

    def _record_facts(self, name: str, ranks: list[dict[str, Any]]) -> None:
        """Put what the ranks of an arm have found into the record."""
        row = self.record.arms[name]
        row.in_force = [RankSettings(rank["threads"], rank["affinity"]) for rank in ranks]
        row.describe, row.samples_per_step = ranks[0]["describe"], ranks[0]["samples"] or None
        row.status, row.ranks = "running", len(ranks)
