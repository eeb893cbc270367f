"""The backend `compat`: the backend `horovod` on `hvdtrain.hvd`, Horovod's API without Horovod."""

from __future__ import annotations

import os
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from hvdtrain import transports
from hvdtrain._torch.batch_norm import BatchNormBase
from hvdtrain.backends.backend_batch_norm import local_in_evaluation
from hvdtrain.backends.base import Backend
from hvdtrain.backends.horovod import Horovod, set_variables
from hvdtrain.backends.options import BackendOptions
from hvdtrain.errors import BackendUnavailable, InputError
from hvdtrain.job import elastic_world
from hvdtrain.job.world import World

if TYPE_CHECKING:
    from hvdtrain.hvd.engine.engine import Engine


class Compat(Horovod):
    """`hvdtrain.hvd.DistributedOptimizer`, under every launcher."""

    name: ClassVar[str] = "compat"
    compressions: ClassVar[tuple[str, ...]] = ("none", "fp16", "bf16")
    averages_thawed: ClassVar[bool] = True
    can_shard_optimizer: ClassVar[bool] = True

    def __init__(self, world: World, options: BackendOptions) -> None:
        super().__init__(world, options)
        self.transport, self.transport_reason = transports.choose(
            options.transport, self.device, world
        )
        if self.device.type == "cuda" and self.transport != "nccl":
            raise BackendUnavailable(
                f"compat sends CUDA tensors over nccl, not {self.transport}; leave --transport out"
            )

    @classmethod
    def module(cls) -> ModuleType:
        """Import and return `hvdtrain.hvd`."""
        from hvdtrain import hvd

        return hvd

    @classmethod
    def host_problem(cls) -> str | None:
        """Return None: it is part of hvdtrain."""
        return None

    @classmethod
    def launcher_problem(cls, world: World) -> str | None:
        """Return None: it works under every launcher."""
        return None

    def _init(self) -> None:
        """Initialise `hvd` with the timeout and transport of the options, or use the script's.
        Collective.

        Horovod's own variables override the options, as with the backend `horovod`.
        """
        from hvdtrain.hvd.basics import basics
        from hvdtrain.hvd.engine.settings import Settings

        if not self._is_own:
            self._use(basics.engine)
            return
        try:
            settings = Settings.from_env(os.environ)
        except ValueError as error:
            raise InputError(str(error)) from None
        timeout_s = self.options.timeout_s
        changes: dict[str, Any] = {"peer_limit_s": timeout_s}
        if not os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS"):
            changes["gloo_timeout_s"] = timeout_s
        if not os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"):
            changes["stall_shutdown_time_s"] = timeout_s
        if self.device.type == "cpu":
            changes["transport"] = self.transport
        basics.start(replace(settings, **changes))
        self.store = basics.engine.store

    def _use(self, engine: Engine) -> None:
        """Use the engine of the script's own `hvd.init`. Raises InputError if a transport was
        requested that it does not have.
        """
        self.store = engine.store
        if self.device.type == "cpu":
            running = engine.process_groups.transport
            if self.options.transport not in ("auto", running):
                raise InputError(
                    f"hvd.init() was called before with the transport {running}, not "
                    f"{self.transport}: set HVDTRAIN_TRANSPORT={self.transport} for both"
                )
            self.transport, self.transport_reason = running, "that of the script's hvd.init()"

    def close(self, failed: bool = False) -> None:
        """Close as `horovod` does. In an elastic job also stop the engine after a failure, which
        waits for no rank: this process joins another world.
        """
        hvd = self._hvd
        super().close(failed)
        if failed and hvd is not None and self._is_own and elastic_world.is_elastic():
            hvd.shutdown()

    def _sync_batch_norm(self) -> type[BatchNormBase]:
        """Return a subclass of `hvdtrain.hvd.SyncBatchNorm`, which works on every device."""
        return local_in_evaluation(self._hvd.SyncBatchNorm)

    def describe(self) -> dict[str, Any]:
        """Add the transport, and Horovod's settings from the environment."""
        return {
            **Backend.describe(self),
            "transport": self.transport,
            "transport_reason": self.transport_reason,
            "settings": set_variables("HOROVOD_FUSION_THRESHOLD"),
        }
