"""The arms of a comparison over its lifetime: started, called one at a time, failed, ended.

`runner` and `tuning` use it; it keeps each arm's row of the record up to date. An arm that fails is
dropped with its reason, and the others continue. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.compare.compare_options import CompareOptions
from hvdtrain.compare.record import Record
from hvdtrain.compare.run.arm_pool import Cast
from hvdtrain.compare.run.arm_process import Ranks
from hvdtrain.compare.run.arms import Arm, Role, search_path
from hvdtrain.compare.run.messages import Job, Window
from hvdtrain.signals import uninterrupted

WORKER = ["-m", "hvdtrain.compare.run.worker"]
TRIAL_STEPS = 10
SKIPPED_STEPS = 2  # untimed, in each window: caches and CPU frequency recover from other arms
# Prefixes of the variables that launchers set for their ranks.
_LAUNCHERS = tuple(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_ MASTER_ "
    "TORCHELASTIC_ OMPI_COMM_ PMIX_ PMI_ MPI_LOCAL MV2_COMM_ HOROVOD_RANK HOROVOD_SIZE "
    "HOROVOD_LOCAL_ HOROVOD_CROSS_ HOROVOD_HOSTNAME HOROVOD_GLOO_ HOROVOD_CONTROLLER "
    "HOROVOD_CPU_OPERATIONS HVDTRAIN_".split()
)


class Screen(Protocol):
    """The display of progress: `table.Live`."""

    def say(self, text: str) -> None:
        """Print a line that stays."""

    def update(self, record: Record, doing: str) -> None:
        """Show the results so far, and the current activity."""


class Stage:
    """All arms by key, and the running ones in `live`. A context manager that ends them on exit."""

    def __init__(
        self, options: CompareOptions, record: Record, screen: Screen, folder: Path
    ) -> None:
        self.options, self.record, self.screen, self.folder = options, record, screen, folder
        self.arms: dict[str, Arm] = {}
        self._cast = Cast(lambda key, reason: self.lose(key, "failed", reason))
        self.live = self._cast.live
        self.start_s = 0.0
        """Duration of the longest start."""
        self._started = 0
        self._sockets: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Stage:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        self._sockets = tempfile.TemporaryDirectory(prefix="hvdtrain-")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # This takes seconds, and a second Ctrl-C meanwhile must not leave ranks behind.
        with uninterrupted():
            try:
                self.end_all(gently=kind is None)
            finally:
                assert self._sockets is not None
                self._sockets.cleanup()

    def say(self, doing: str) -> None:
        """Show the current activity."""
        self.screen.update(self.record, doing)

    def key_of(self, role: Role, ranks: int) -> str:
        """Return the key of the only arm of a role at a world size."""
        arms = self.arms.items()
        return next(key for key, arm in arms if arm.role == role and arm.ranks == ranks)

    def add(self, arm: Arm) -> None:
        """Add an arm, and its row in the record."""
        self.arms[arm.key] = arm
        command = shlex.join(arm.command(WORKER))
        self.record["arms"][arm.key] = {
            "name": arm.name,
            "key": arm.key,
            "ranks": arm.ranks,
            "role": arm.role,
            "backend": arm.backend,
            "transport": arm.over,
            "launcher": arm.launcher,
            "command": command.replace(sys.executable, "python"),
            "level": "best found" if arm.tuned else "defaults",
            "settings": dict(arm.settings),
            "status": "waiting",
            "reason": None,
            "log": None,
        }

    def row(self, key: str) -> dict[str, Any]:
        """Return an arm's row in the record."""
        row: dict[str, Any] = self.record["arms"][key]
        return row

    def start(self, arms: list[Arm]) -> None:
        """Start arms in parallel, and open model and loop in each."""
        began = time.monotonic()
        self.say(f"starting {len(arms)} arms")
        for arm in arms:
            self.row(arm.key)["log"] = str(_log(arm.key))
        jobs = {arm.key: self._job(arm) for arm in arms}
        for key, facts in self._cast.start(
            lambda key: self._launch(key, self.arms[key]), jobs
        ).items():
            self._list(key, facts)
        self.start_s = max(self.start_s, time.monotonic() - began)

    def _launch(self, key: str, arm: Arm) -> Ranks:
        """Start the launcher of an arm. Raise ArmFailed if the program cannot be started."""
        assert self._sockets is not None
        self._started += 1
        address = Path(self._sockets.name) / str(self._started)
        log = self.folder / _log(key)
        launched = arm.launcher != "none"
        return Ranks(arm.command(WORKER), arm.ranks, self._env(arm), address, log, launched)

    def _list(self, key: str, facts: list[Any]) -> None:
        """Put the settings in force in an arm's ranks into the record."""
        first = facts[0]
        shared = ("describe", "samples_per_step", "gradient_bytes", "parameters")
        per_rank = ("threads", "interop_threads", "affinity", "variables")
        self.row(key).update(
            {name: first[name] for name in shared},
            in_force=[{name: rank[name] for name in per_rank} for rank in facts],
            status="running",
        )
        self.record["config"].update(lr=first["lr"], data=first["data"])

    def _job(self, arm: Arm) -> Job:
        options = self.options.training(arm.ranks)
        options.update({k: v for k, v in arm.settings.items() if not k.isupper()})
        if arm.transport:  # Horovod's controller follows from the launcher
            options["transport"] = arm.transport
        loop = "by hand" if arm.role == "by hand" else "trainer"
        return Job(arm.backend, loop, options, self._places(arm.ranks))

    def _places(self, ranks: int) -> tuple[tuple[int, ...], ...]:
        """Return the cores of each rank: an equal share for all its threads, or unpinned all."""
        cores = tuple(sorted(os.sched_getaffinity(0)))
        if not self.options.pin:
            return (cores,) * ranks
        share = len(cores) // ranks
        if share == 0:  # more ranks than cores
            return tuple((cores[rank % len(cores)],) for rank in range(ranks))
        return tuple(cores[rank * share : (rank + 1) * share] for rank in range(ranks))

    def _env(self, arm: Arm) -> dict[str, str]:
        """Return this environment without launcher variables, plus the settings of all arms."""
        env = without_launcher(os.environ)
        threads = str(self.options.threads_of(arm.ranks))
        env["PATH"] = search_path()
        # Allow more ranks than cores, and root: mpirun refuses both by default, others do not.
        env.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
        if os.geteuid() == 0:
            env.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
            env.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        assert self._sockets is not None
        if arm.launcher == "torchrun":  # it leaves a folder there per job
            env["TMPDIR"] = self._sockets.name
        # Two mpiruns of one user that start together can fail to create their common folder.
        env["OMPI_MCA_orte_tmpdir_base"] = tempfile.mkdtemp(dir=self._sockets.name)
        env.update(
            OMP_NUM_THREADS=threads,
            MKL_NUM_THREADS=threads,
            GLOO_SOCKET_IFNAME="lo",
            # Horovod's Gloo times out on stopped ranks, and all arms but one are stopped.
            HOROVOD_GLOO_TIMEOUT_SECONDS="36000",
            PYTHONUNBUFFERED="1",
        )
        env.update({k: str(v) for k, v in arm.settings.items() if k.isupper()})
        return env

    def call(self, key: str, what: str, *arguments: object) -> list[Any] | None:
        """Run the call `what` on the ranks of an arm; None if the arm fails or failed before."""
        timeout_s = self.options.timeout_s + 60  # ranks time out first: their errors say more
        return self._cast.attempt(
            key, lambda ranks: ranks.call(what, *arguments, timeout_s=timeout_s)
        )

    def lose(self, key: str, status: str, reason: str) -> None:
        """Drop an arm that has failed or is refused, and end it. Its measurements are kept."""
        if self.row(key)["status"] != "measured":
            self.row(key).update(status=status, reason=reason)
        self._cast.leave(key, gently=status == "refused")
        self.say(f"{key} {status}: {reason}")

    def end_all(self, gently: bool) -> None:
        """End all arms. `gently`: by a normal exit, else by SIGKILL."""
        self._cast.end(gently)

    @contextlib.contextmanager
    def trials(
        self, arms: Mapping[str, Arm], failed: dict[str, str]
    ) -> Iterator[Callable[[str], list[Window] | None]]:
        """Start arms that are not part of the comparison, and end them after the `with` block.

        Yield a function that times a window of one of them, or of an arm of the comparison, by
        name. The reasons of failed trials go to `failed`.
        """
        cast = Cast(failed.__setitem__)

        def window(name: str) -> list[Window] | None:
            if name not in arms:
                return self.call(name, "window", TRIAL_STEPS, SKIPPED_STEPS)
            return cast.attempt(
                name, lambda ranks: ranks.call("window", TRIAL_STEPS, SKIPPED_STEPS)
            )

        try:
            # A trial that fails is no failure of the arm: it has a pool and reasons of its own.
            self.say(f"tuning: {', '.join(arms)}")
            jobs = {name: self._job(arm) for name, arm in arms.items()}
            for name in cast.start(lambda name: self._launch(name, arms[name]), jobs):
                # Warm-up: the arms of the comparison have taken steps before.
                cast.attempt(name, lambda ranks: ranks.call("window", TRIAL_STEPS, 0))
            yield window
            cast.end(gently=True)
        except BaseException:
            with uninterrupted():
                cast.end(gently=False)
            raise


def _log(key: str) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in key)
    return Path("logs") / f"{name}.log"


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that a launcher sets for its ranks."""
    return {name: value for name, value in env.items() if not name.startswith(_LAUNCHERS)}
