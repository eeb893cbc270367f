"""`horovod.ray` on hvdtrain: `RayExecutor`, whose ranks are actors of Ray.

For drivers that were written for Horovod's; also as `import horovod.ray`, where `horovod` means
hvdtrain.hvd. Ray is an extra: `pip install 'hvdtrain[ray]'`. Nothing is scheduled here:

    start()       a placement group, and in it one actor for each rank, as `placement` numbers them
    run(fn)       each actor calls fn, which calls `hvd.init()`; results in the order of the ranks
    an error      of the first rank to fail, or its death, ends all actors, and is raised
    shutdown()    ends the actors; so does the end of the driver

The number of ranks is fixed; examples/ray_cluster.py has elastic jobs on the nodes of a cluster.
"""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hvdtrain.errors import WorldError, first_line
from hvdtrain.hvd.alias import install, installed
from hvdtrain.job import job_secret
from hvdtrain.launch.function_call import LOST_A_PEER
from hvdtrain.launch.placement import Place, free_port, number_ranks
from hvdtrain.launch.remote import interface_variables

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError(f"horovod.ray needs Ray: pip install 'hvdtrain[ray]' ({error})") from None

_ELASTIC = (
    "horovod.ray runs a fixed number of ranks; instead of min_workers, max_workers, "
    "override_discovery and ElasticRayExecutor, run hvdrun on the nodes of Ray: see hvdtrain's "
    "examples/ray_cluster.py"
)
_DEATH_S = 5.0  # Ray reports a dead actor later than the ranks that have lost it


@dataclass
class MiniSettings:
    """Settings of a RayExecutor, with the names of Horovod's."""

    nics: Any = None
    """Network interfaces for Gloo and NCCL."""
    verbose: int = 1
    key: str = field(default_factory=lambda: secrets.token_hex(32))
    """The secret of the job, which its ranks prove to each other."""
    ssh_identity_file: str | None = None
    timeout_s: int = 300
    """The time in which the actors must start."""
    placement_group_timeout_s: int = 100
    elastic: bool = False


class _Rank:
    """One rank: an actor."""

    def __init__(self, rank: int, alias: bool) -> None:
        if alias:  # `horovod` means here what it does in the driver
            install()
        self._rank = rank
        self._executable: Any = None

    def __repr__(self) -> str:
        """Return what Ray puts before each line of output, and into errors."""
        return f"rank {self._rank}"

    def place(self) -> Place:
        """Return where this actor runs."""
        context = ray.get_runtime_context()
        gpus = map(str, context.get_accelerator_ids().get("GPU", []))
        address = ray.util.get_node_ip_address()
        return Place(context.get_node_id(), address, free_port(), list(gpus))

    def set_variables(self, variables: Mapping[str, str]) -> None:
        """Set environment variables, RANK among them."""
        os.environ.update(variables)
        self._rank = int(variables["RANK"])

    def make(self, make: Callable[[], Any]) -> None:
        """Make the object that `execute` passes on. Its modules are imported before the call."""
        self._executable = make()

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        """Return `fn(executable)`."""
        return fn(self._executable)


class RayExecutor:
    """Runs functions on ranks that Ray starts. The arguments are those of Horovod 0.28.1.

    `num_workers` ranks are packed onto the nodes; `num_hosts` nodes have `num_workers_per_host`
    each. `use_current_placement_group`: take the one that the driver is in, if it is in one.
    Raises ValueError for arguments that exclude each other, and for those of an elastic job.
    """

    def __init__(
        self,
        settings: MiniSettings,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: list[int] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
    ) -> None:
        if (min_workers, max_workers, override_discovery) != (None, None, True):
            raise ValueError(_ELASTIC)
        if (num_workers is None) == (num_hosts is None):
            raise ValueError("give exactly one of num_workers and num_hosts")
        if gpus_per_worker is not None and (not use_gpu or gpus_per_worker < 1):
            raise ValueError(
                f"gpus_per_worker={gpus_per_worker} must be 1 or more, with use_gpu=True"
            )
        self.settings = settings
        # Bundles of resources, the ranks in each, and how Ray places bundles on nodes.
        self._bundles = num_workers or 0, 1, "PACK"
        if num_hosts:
            self._bundles = num_hosts, num_workers_per_host, "STRICT_SPREAD"
        self._resources = {"CPU": cpus_per_worker, "GPU": int(use_gpu) * (gpus_per_worker or 1)}
        self._uses_own_group = not use_current_placement_group
        self._made_group: Any = None
        self._ranks: list[Any] = []
        self._nodes: list[str] = []

    @classmethod
    def create_settings(
        cls,
        timeout_s: int = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: int = 100,
        nics: Any = None,
    ) -> MiniSettings:
        """Return settings. The arguments for ssh have no effect: Ray starts the ranks."""
        return MiniSettings(
            nics=nics,
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
        )

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: list[Any] | None = None,
        executable_kwargs: dict[str, Any] | None = None,
        extra_env_vars: dict[str, str] | None = None,
    ) -> None:
        """Start the ranks, and make an `executable_cls(...)` on each, if one is given.

        Raises TimeoutError if Ray does not provide the resources in time.
        """
        settings = self.settings
        shared = {job_secret.VARIABLE: settings.key, **interface_variables(settings.nics)}
        given = {name: str(value) for name, value in (extra_env_vars or {}).items()}
        try:
            self._ranks = self._start_actors()
            variables = self._number_ranks()
            self._wait(
                [
                    one.set_variables.remote({**shared, **own, **given})
                    for one, own in zip(self._ranks, variables, strict=True)
                ]
            )
            if executable_cls is not None:
                make = partial(
                    executable_cls, *(executable_args or ()), **(executable_kwargs or {})
                )
                self._wait([one.make.remote(make) for one in self._ranks])
        except BaseException:
            self.shutdown()
            raise

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        callbacks: list[Callable[..., Any]] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank; return the results in rank order.

        If a rank raises, the same error is raised here, with the rank in its text; WorldError names
        a rank that has died. All ranks are then ended. `callbacks` are never called.
        """
        return self.execute(lambda _: fn(*(args or ()), **(kwargs or {})), callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank; return the references for `ray.get` at once."""
        return self._call(lambda _: fn(*(args or ()), **(kwargs or {})))

    def execute(
        self, fn: Callable[[Any], Any], callbacks: list[Callable[..., Any]] | None = None
    ) -> list[Any]:
        """Call `fn(executable)` on every rank; return the results in rank order, as `run` does."""
        if callbacks:
            warnings.warn("callbacks are not called; nor does Horovod call them", stacklevel=2)
        return self._wait(self._call(fn))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call `fn(executable)` on rank 0; return its result."""
        return self._wait(self._call(fn, 1))[0]

    def shutdown(self) -> None:
        """End the ranks, and give their resources back. Twice is safe."""
        for one in self._ranks:
            ray.kill(one)
        self._ranks = []
        if self._made_group is not None:
            ray.util.remove_placement_group(self._made_group)
            self._made_group = None

    def _call(self, fn: Callable[[Any], Any], count: int | None = None) -> list[Any]:
        """Call `fn(executable)` on the first `count` ranks, or on all; return the references."""
        if not self._ranks:
            raise ValueError("there are no ranks; call start() first")
        return [one.execute.remote(fn) for one in self._ranks[:count]]

    def _number_ranks(self) -> list[dict[str, str]]:
        """Sort the ranks node by node; return the environment variables of each.

        Raises TimeoutError for actors that have not started in time.
        """
        requests = [one.place.remote() for one in self._ranks]
        size = len(requests)
        _, late = ray.wait(requests, num_returns=size, timeout=self.settings.timeout_s)
        if late:
            raise TimeoutError(
                f"{len(late)} of {size} actors have not started within "
                f"{self.settings.timeout_s} s; give create_settings a longer timeout_s"
            )
        places: list[Place] = self._wait(requests)
        order, variables = number_ranks(places)
        self._ranks = [self._ranks[k] for k in order]
        self._nodes = [places[k].address for k in order]
        return variables

    def _start_actors(self) -> list[Any]:
        """Start the actors, by rank, in a placement group: the current one, else a new one."""
        group = None if self._uses_own_group else ray.util.get_current_placement_group()
        count, per_bundle, strategy = self._bundles
        resources = self._resources
        bundles = [-1] * (count * per_bundle)  # any
        if group is None:
            wanted = {kind: number * per_bundle for kind, number in resources.items() if number}
            group = ray.util.placement_group([wanted] * count, strategy=strategy)
            self._made_group = group
            if not group.wait(self.settings.placement_group_timeout_s):
                raise TimeoutError(
                    f"Ray has not provided {count} times {wanted} ({strategy}) within "
                    f"{self.settings.placement_group_timeout_s} s; it has now: "
                    f"{ray.available_resources()}"
                )
            nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
            bundles = [*range(count)] * per_bundle
            bundles.sort(key=lambda bundle: (nodes[bundle], bundle))
        return [
            ray.remote(_Rank)
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources["GPU"],
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
            )
            .remote(rank, installed())
            for rank, bundle in enumerate(bundles)
        ]

    def _wait(self, calls: list[Any]) -> list[Any]:
        """Return the results of calls, one for each rank; at the first error end all ranks.

        If a rank has lost a peer, the death or error that caused it is raised, if Ray reports that
        in time.
        """
        waiting = calls
        lost: RayTaskError | None = None
        timeout_s: float | None = None
        try:
            while waiting:
                ready, waiting = ray.wait(waiting, timeout=timeout_s)
                if not ready:
                    break
                try:
                    ray.get(ready)
                except RayTaskError as error:
                    if not isinstance(error.cause, LOST_A_PEER):
                        raise
                    lost, timeout_s = lost or error, _DEATH_S
                except RayError as error:  # its actor, its node, or for want of memory
                    rank = calls.index(ready[0])
                    where = self._nodes[rank] if rank < len(self._nodes) else "its node"
                    why = f"rank {rank} on {where} died: {first_line(error)}"
                    raise WorldError(why) from None
            if lost is not None:
                raise lost
            return list(ray.get(calls))
        except BaseException:
            self.shutdown()
            raise


def __getattr__(name: str) -> Any:
    """Raise ImportError, which says what to do instead, for the names of Horovod's elastic jobs."""
    if name in ("ElasticRayExecutor", "ElasticSettings"):
        raise ImportError(_ELASTIC)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
