"""Elastic training, `--elastic`: one run in one process, in worlds that come one after another.

`hvdtrain train` calls `run` under an elastic launcher, hvdrun or horovodrun. A lost rank, or a
change of hosts, ends a world: the Trainer's `fit` raises, and the process stays. In the next world
another Trainer goes on from the newest commit, as a run that resumes does from a checkpoint:

    launcher      rank, size  ->  each process that is left, and each new one
    all ranks     open the backend, agree on the newest commit        (commits.Commits)
    its rank      model, optimizer, position  ->  all                 (resumption.Resumption)
    all ranks     Trainer.fit, which takes commits
"""

from __future__ import annotations

import gc
import os
import time

from hvdtrain.backends import open_backend
from hvdtrain.errors import InputError, first_line
from hvdtrain.hvd.elastic.common import notification_manager
from hvdtrain.hvd.engine.settings import Settings
from hvdtrain.job import elastic_world
from hvdtrain.liveness.failure import print_stderr
from hvdtrain.training.commits import LOST_PEER, Commits
from hvdtrain.training.config import TrainConfig
from hvdtrain.training.run_report import Result
from hvdtrain.training.task import Task, load_task
from hvdtrain.training.trainer import Trainer


def run(config: TrainConfig, origins: dict[str, str] | None = None) -> Result:
    """Train to the end, through all changes of the world. Collective: every rank calls it.

    Raises what `open_backend` and `Trainer.fit` do, unless a lost peer has caused it, and
    SystemExit(0) in a process that has no place in the next world.
    """
    try:
        timeout_s = Settings.from_env(os.environ).elastic_timeout_s
    except ValueError as error:
        raise InputError(str(error)) from None
    worlds = _Worlds(config, origins or {}, timeout_s)
    notification_manager.init()
    notification_manager.register_listener(worlds.commits.hosts)
    try:
        while (result := worlds.train_in_next()) is None:
            gc.collect()  # the model of the world before
    finally:
        notification_manager.remove_listener(worlds.commits.hosts)
    return result


class _Worlds:
    """What a process keeps from world to world."""

    def __init__(self, config: TrainConfig, origins: dict[str, str], timeout_s: float) -> None:
        self._config, self._origins, self._timeout_s = config, origins, timeout_s
        self.commits = Commits(config.commit_every)
        self._task: Task | None = None
        self._no_world_since = time.monotonic()

    def train_in_next(self) -> Result | None:
        """Train in the next world; return None if that ends before the run is done. Collective."""
        config, commits = self._config, self.commits
        commits.hosts.on_reset()  # a notice from now on is about the next world
        try:
            elastic_world.enter(self._timeout_s)
        except elastic_world.RemovedFromJob as removed:
            print_stderr(f"elastic  {removed}; this process ends")
            raise SystemExit(0) from None
        try:
            backend = open_backend(
                config.backend, options=config.backend_options(), agree_on=config.agreed()
            )
        except LOST_PEER as error:  # a rank has been lost before all had met
            if time.monotonic() > self._no_world_since + self._timeout_s:
                raise
            print_stderr(f"elastic  requesting the next world, after: {first_line(error)}")
            return None
        with backend:
            trainer = None
            try:
                commits.agree(backend)
                with backend.share_errors():
                    self._task = self._task or load_task(config.task, config.set)
                trainer = Trainer(self._task, backend, config, self._origins, commits=commits)
                return trainer.fit()
            except Exception as error:
                if not commits.ends_world(error):
                    raise
                has_begun = trainer is not None and trainer.meter is not None
                commits.leave(error, trainer.progress.step if trainer and has_begun else None)
                # Not by leaving the block: that would first ask all ranks which one was late.
                backend.close(failed=True)
        self._no_world_since = time.monotonic()
        return None
