"""The arms of a comparison over its lifetime: started, called one at a time, failed, ended.

`comparison` uses it; it keeps each arm's row of the record up to date. An arm that fails is dropped
with its reason, and the others continue. Imports no torch.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hvdtrain.compare import probe
from hvdtrain.compare.compare_options import CompareOptions
from hvdtrain.compare.proof.work_trace import ArmTraces
from hvdtrain.compare.record import ArmRecord, Record
from hvdtrain.compare.run.arm_process import ArmFailed, ArmProcess
from hvdtrain.compare.run.arms import Arm
from hvdtrain.compare.run.messages import RankFacts, StepTimes, facts_of, trace_of
from hvdtrain.compare.run.remote_hosts import RemoteHosts
from hvdtrain.errors import LaunchError
from hvdtrain.launch.host_list import parse_host_list
from hvdtrain.system.commands import own_environment
from hvdtrain.system.signals import uninterrupted

T = TypeVar("T")
ALLOW_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
ARM_SCRIPT = ["-m", "hvdtrain.compare.run.arm_script"]
_LONGEST_FOLDER = 30  # bytes: ssh and mpirun make sockets below, whose paths have at most 107
# Prefixes of the variables that launchers set for their ranks.
_LAUNCHER_VARIABLES = tuple(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_ MASTER_ "
    "TORCHELASTIC_ OMPI_COMM_ PMIX_ PMI_ MPI_LOCAL MV2_COMM_ HOROVOD_RANK HOROVOD_SIZE "
    "HOROVOD_LOCAL_ HOROVOD_CROSS_ HOROVOD_HOSTNAME HOROVOD_GLOO_ HOROVOD_CONTROLLER "
    "HOROVOD_CPU_OPERATIONS HVDTRAIN_".split()
)


class ProgressDisplay(Protocol):
    """The display of progress: `terminal.ProgressTable`."""

    def print_line(self, text: str) -> None:
        """Print a line that stays."""

    def update(self, record: Record, activity: str) -> None:
        """Show the results so far, and the current activity."""


class ArmPool:
    """All arms by key, and the running ones in `live`. A context manager that ends them on exit."""

    def __init__(
        self,
        arms: list[Arm],
        options: CompareOptions,
        record: Record,
        display: ProgressDisplay,
        folder: Path,
    ) -> None:
        self.options, self.record, self.folder = options, record, folder
        self.arms = {arm.key: arm for arm in arms}
        self.sizes = (0,) if options.commands else options.ranks
        """The world sizes; that of commands is 0 until their ranks have connected."""
        self.live: dict[str, ArmProcess] = {}
        self.start_s = 0.0
        """Duration of the longest start."""
        self._display = display
        self._num_started = 0
        record.arms.update({arm.key: _new_row(arm, options) for arm in arms})

    def __enter__(self) -> ArmPool:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        hosts = parse_host_list(self.options.hosts) if self.options.hosts else []
        with ExitStack() as opened:
            where = temporary_folder_for_sockets()
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

    def show_activity(self, activity: str) -> None:
        """Show the current activity."""
        self._display.update(self.record, activity)

    def start(self, keys: list[str]) -> None:
        """Start arms in parallel, and open model and loop in each."""
        began = time.monotonic()
        self.show_activity(f"starting {len(keys)} arms")
        for key in keys:
            try:
                self.live[key] = self._launch(key)
            except (ArmFailed, LaunchError) as error:
                self.drop(key, "failed", str(error))
        # In parallel: a start is mostly waiting, and nothing is timed yet.
        patience = 60.0 + 6.0 * sum(self.live[key].size for key in keys if key in self.live)
        if self.options.commands:  # a script may load or compile for minutes before its first step
            patience = self.options.timeout_s
        # Send "open" to all before waiting for any answer: opening can take long, too.
        for key in keys:
            self._attempt(key, methodcaller("meet", patience))
            self._attempt(key, methodcaller("begin", "open", *self._request(self.arms[key])))
        for key in keys:
            facts = self._attempt(key, methodcaller("finish", patience))
            if facts is not None:
                self._record_facts(key, list(map(facts_of, facts)))
        if self.options.commands:
            self._record_sizes()
        self.start_s = max(self.start_s, time.monotonic() - began)

    def call(self, key: str, what: str, *arguments: object) -> list[Any] | None:
        """Run the call `what` on the ranks of an arm; None if the arm fails or failed before."""
        timeout_s = self.options.timeout_s + 60  # ranks time out first: their errors say more
        return self._attempt(key, lambda arm: arm.call(what, *arguments, timeout_s=timeout_s))

    def traces(self, key: str, steps: int) -> ArmTraces:
        """Return the traces of the first steps of an arm; none if it fails or failed before."""
        config = None if self.arms[key].line else self.arms[key].config(self.options)
        return [trace_of(one, config) for one in self.call(key, "trace", steps) or ()]

    def times(self, key: str, steps: int, skip: int) -> list[StepTimes] | None:
        """Time steps of an arm, after some that are skipped; None if it fails or failed before."""
        found = self.call(key, "time_steps", steps, skip)
        return None if found is None else [StepTimes(**one) for one in found]

    def fingerprints(self, key: str) -> list[tuple[int, str]] | None:
        """Return the steps that each rank of an arm has taken, and a hash of its parameters after
        them; None if it fails or failed before. With local SGD it takes those up to an average.
        """
        if self.arms[key].line:
            return self.call(key, "fingerprint")
        config = self.arms[key].config(self.options)
        return self.call(key, "fingerprint", config.sync_every, config.local_warmup)

    def on_this_host(self, key: str, ranks: Iterable[StepTimes]) -> list[StepTimes]:
        """Return those of an arm's times that were measured on this host."""
        places = self.live[key].hosts
        return [times for times, place in zip(ranks, places, strict=True) if place is None]

    def drop(self, key: str, status: str, reason: str) -> None:
        """Drop an arm that has failed or is refused, and end it. Its measurements are kept."""
        row = self.record.arms[key]
        if row.status != "measured":
            row.status, row.reason = status, reason
        if key in self.live:
            # It stays in `live` until it has ended, in case of Ctrl-C.
            self.live[key].end(gently=status == "refused")
            self.live.pop(key, None)
        self.show_activity(f"{key} {status}: {reason}")

    def end_all(self, gently: bool) -> None:
        """End all arms. `gently`: by a normal exit, else by SIGKILL."""
        if gently:  # ask all first, so that they exit in parallel
            for arm in self.live.values():
                arm.release()
        for arm in self.live.values():
            arm.end(gently)
        self.live.clear()

    def _attempt(self, key: str, action: Callable[[ArmProcess], T]) -> T | None:
        """Return `action(process)` for an arm; None if the arm fails now or has failed before."""
        if key not in self.live:
            return None
        try:
            return action(self.live[key])
        except ArmFailed as error:
            self.drop(key, "failed", str(error))
            return None

    def _launch(self, key: str) -> ArmProcess:
        """Start the launcher of an arm. Raise ArmFailed if the program cannot be started."""
        arm, env = self.arms[key], self._environment(self.arms[key])
        self._num_started += 1
        address = self._sockets / str(self._num_started)
        log = Path("logs") / f"{''.join(c if c.isalnum() else '-' for c in key)}.log"
        self.record.arms[key].log = str(log)
        command = arm.command(ARM_SCRIPT)
        if arm.line:
            env = probe.environment(env, address, self.options.pin, self.options.optimizer)
        else:
            command.append(str(address))
        return ArmProcess(
            command,
            None if arm.line else arm.ranks,
            env,
            address,
            self.folder / log,
            has_launcher=arm.launcher != "none",
            remote=self._remote,
        )

    def _request(self, arm: Arm) -> tuple[Any, ...]:
        """Return the arguments of the call "open": see `arm_script.open_loop`; none for a
        command.
        """
        if arm.line:
            return ()
        config = self.options.training(arm.ranks, arm.options)
        if arm.c10d_transport:  # Horovod's controller follows from the launcher
            config["transport"] = arm.c10d_transport
        loop = "by hand" if arm.role == "by hand" else "trainer"
        per_host = self.options.ranks_of_a_host(arm.ranks)
        return arm.backend, loop, config, self.options.pin, per_host

    def _record_facts(self, key: str, facts: list[RankFacts]) -> None:
        """Put the settings in force in an arm's ranks into the record."""
        first, row = facts[0], self.record.arms[key]
        row.in_force = [rank.settings for rank in facts]
        row.describe, row.samples_per_step = first.describe, first.samples_per_step or None
        row.gradient_bytes, row.parameters = first.gradient_bytes, first.parameters
        row.status = "running"
        self.record.config.lr, self.record.config.data = first.lr, first.data

    def _record_sizes(self) -> None:
        """Record how many ranks the commands have, and drop those with more or fewer than the
        baseline.
        """
        base = next(key for key, arm in self.arms.items() if arm.role == "baseline")
        if base not in self.live:
            return
        size = self.live[base].size
        self.sizes, self.record.config.ranks = (size,), [size]
        for key, arm in self.arms.items():
            self.arms[key] = replace(arm, ranks=size)
            self.record.arms[key].ranks = size
        for key in [key for key, arm in self.live.items() if arm.size != size]:
            text = f"{self.live[key].size} ranks, and {base} has {size}: that is other work"
            self.drop(key, "refused", text)

    def _environment(self, arm: Arm) -> dict[str, str]:
        """Return this environment without launcher variables, plus the settings of all arms."""
        env = launch_environment()
        if arm.line:
            return {**env, **self._settings_of_command()}
        threads = self.options.threads_of(arm.ranks)
        if arm.launcher == "torchrun":  # it leaves a folder there per job
            env["TMPDIR"] = str(self._sockets)
        # Two mpiruns of one user that start together can fail to create their common folder.
        env["OMPI_MCA_orte_tmpdir_base"] = tempfile.mkdtemp(dir=self._sockets)
        if not arm.hosts:
            env["GLOO_SOCKET_IFNAME"] = "lo"
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            env.pop(name, None)
            if threads is not None:
                env[name] = str(threads)
        env.update(
            # Horovod's Gloo times out on stopped ranks, and all arms but one are stopped.
            HOROVOD_GLOO_TIMEOUT_SECONDS="36000",
            PYTHONUNBUFFERED="1",
        )
        return env

    def _settings_of_command(self) -> dict[str, str]:
        """Return what a command needs to be stopped for a while, and the threads that were asked
        for: all else is as a user would run it.
        """
        threads = self.options.threads
        return {
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "36000",
            "PYTHONUNBUFFERED": "1",
            **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
        }


def _new_row(arm: Arm, options: CompareOptions) -> ArmRecord:
    return ArmRecord(
        name=arm.name,
        ranks=arm.ranks,
        key=arm.key,
        role=arm.role,
        backend=arm.backend,
        transport=arm.transport,
        launcher=arm.launcher,
        command=shlex.join(arm.command(ARM_SCRIPT)).replace(sys.executable, "python"),
        options=dict(arm.options),
        period=1 if arm.line else arm.period(options),
        status="waiting",
    )


def launch_environment() -> dict[str, str]:
    """Return this environment as any launcher accepts it: without the variables of another one."""
    env = without_launcher(own_environment())
    # Allow more ranks than cores, and root: mpirun refuses both by default, others do not.
    env.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
    if os.geteuid() == 0:
        for name in ALLOW_ROOT:
            env.setdefault(name, "1")
    return env


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that a launcher sets for its ranks, and without
    the options of `hvdtrain train`.
    """
    return {
        name: value
        for name, value in env.items()
        if name == "HVDTRAIN_EXACT_HOROVOD" or not name.startswith(_LAUNCHER_VARIABLES)
    }


def temporary_folder_for_sockets() -> str:
    """Return $TMPDIR, or /tmp if its path is so long that sockets in it could have no address."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= _LONGEST_FOLDER else "/tmp"
