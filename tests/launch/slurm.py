"""A real Slurm for tests: on the test hosts, or on this machine alone."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.environments import require
from tests.launching import free_ports, run, started, wait_until

# The daemons need no keys, as all are root's, and no control groups. They bind no task: the hosts
# share this machine's cores, and each of them would give its first task the same one. A job that
# goes back to the queue may start again after `cred_expire` seconds.
CONF = """\
ClusterName=test
SlurmctldHost={controller}
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
JobRequeue=1
KillWait=3
SchedulerParameters=batch_sched_delay=0,sched_interval=2
NodeName={names} NodeAddr={addresses} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
CGROUP = "CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n"


@contextlib.contextmanager
def running_slurm(
    folder: Path,
    addresses: dict[str, str] | None = None,
    on: Callable[..., list[str]] = lambda host, *line: list(line),
) -> Iterator[dict[str, str]]:
    """Run a cluster of hosts; of this machine alone without `addresses`, which has their names.

    Yields the variables with which srun, salloc and the like find it.
    `on(host, *line)` returns the command that runs a line on a host; the first is the controller.
    Skip the test without Slurm, or fail it in CI.
    """
    require("slurmctld", "slurmd", "srun", root=True)
    hosts = addresses or {socket.gethostname(): "127.0.0.1"}
    ports = (6817, 6818) if addresses else free_ports(2)
    controller, at = next(iter(hosts.items()))
    for made in ("state", "cgroup", *hosts):
        (folder / made).mkdir(parents=True)
    conf = CONF.format(
        folder=folder,
        controller=f"{controller}({at})",
        ports=ports,
        names=",".join(hosts),
        addresses=",".join(hosts.values()),
    )
    (folder / "slurm.conf").write_text(conf)
    (folder / "cgroup.conf").write_text(CGROUP.format(folder=folder))
    env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def are_idle() -> bool:
        ask = on(controller, "sinfo", "--noheader", "--format=%T %D")
        return run(ask, env=env).output.strip() == f"idle {len(hosts)}"

    with contextlib.ExitStack() as stack:
        daemons = [on(controller, "slurmctld", "-D", "-i")]
        daemons += [on(host, "slurmd", "-D", "-N", host) for host in hosts]
        logs = [stack.enter_context(started(line, env=env))[1] for line in daemons]
        wait_until(are_idle, "idle hosts in Slurm", log=logs[0])
        yield env
