"""`hvdtrain launch`, also installed as `hvdrun`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click
from click.core import ParameterSource

from hvdtrain.errors import InputError
from hvdtrain.job.world import detect
from hvdtrain.launch.elastic import ElasticJob, ElasticOptions
from hvdtrain.launch.event_loop import Job
from hvdtrain.launch.host_list import (
    Host,
    choose_slots,
    hosts_of_scheduler,
    parse_host_list,
    read_host_file,
)
from hvdtrain.launch.launcher import run
from hvdtrain.launch.remote import SSH, RemoteShell, environment
from hvdtrain.system.cores import BINDINGS, CORE

# Options that have no effect, and are refused: in a job whose hosts are fixed, in an elastic job,
# and with an --rsh other than ssh.
_ELASTIC_ONLY = ("min_np", "max_np", "elastic_timeout", "reset_limit", "blacklist_cooldown_range")
_FIXED_ONLY = ("hosts", "hostfile", "nnodes", "max_restarts", "master_port")
_SSH_ONLY = ("ssh_port", "ssh_identity_file")


_COUNT = click.IntRange(min=1)
_NUMBER = click.IntRange(min=0)
_PORT = click.IntRange(1, 65535)
_SECONDS = click.FloatRange(min=0, min_open=True)


@click.command(
    "launch",
    # What follows the command's name belongs to the command.
    context_settings={"allow_interspersed_args": False, "show_default": True},
    epilog="Ends with the exit code of the first rank that failed, 128 + number for a signal; "
    "2 bad input, or a host that did not start; 4 a lost host; 129 SIGHUP, 130 Ctrl-C, "
    "143 SIGTERM.",
)
@click.option("-np", "--num-proc", type=_COUNT, metavar="N", help="Ranks.")
@click.option(
    "-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts, and the ranks that fit there."
)
@click.option("--hostfile", metavar="FILE", help="Lines `host slots=4`, `host:4` or `host`.")
@click.option("--nnodes", type=_COUNT, metavar="N", help="Use the first N hosts.")
@click.option("--nproc-per-node", type=_COUNT, metavar="N", help="Ranks on each host.")
@click.option("-m", "--module", is_flag=True, help="COMMAND is a module: python -m COMMAND.")
@click.option(
    "-x", "named", multiple=True, metavar="NAME[=VALUE]", help="A variable for all ranks."
)
@click.option(
    "--bind-to",
    type=click.Choice(BINDINGS),
    default=CORE,
    help="core: a rank's share of the host's physical cores, of the NUMA node of its GPU if it has "
    "one; all cores if the ranks are more than these. numa: all cores of that node.",
)
@click.option(
    "--rsh",
    default=SSH,
    metavar="COMMAND",
    help="What reaches other hosts: ssh, srun, kubectl, or a command with {host} in it, such as "
    "'docker exec -i {host}'.",
)
@click.option("-p", "--ssh-port", type=_PORT, metavar="PORT")
@click.option("-i", "--ssh-identity-file", metavar="FILE")
@click.option(
    "--start-timeout",
    type=_SECONDS,
    default=120.0,
    metavar="SECONDS",
    help="Time until the ranks of all hosts must have started.",
)
@click.option(
    "--output-filename",
    metavar="DIR",
    help="Also write DIR/rank.N/stdout and stderr, and error.json if torch's @record is used.",
)
@click.option(
    "--network-interfaces",
    "--network-interface",
    metavar="NAME,...",
    help="For Gloo, NCCL and Horovod. [default: by the route to rank 0]",
)
@click.option(
    "--master-addr",
    metavar="ADDRESS",
    help="At which the ranks reach rank 0's host, or, of an elastic job, hvdrun. [default: by the "
    "route to it]",
)
@click.option("--master-port", type=_PORT, metavar="PORT", help="[default: a free one]")
@click.option(
    "--max-restarts",
    type=_NUMBER,
    default=0,
    metavar="N",
    help="Start all ranks again, up to N times, when one fails or a host is lost; without the lost "
    "host, if the others have slots for -np ranks.",
)
@click.option(
    "--host-discovery-script",
    metavar="COMMAND",
    help="Elastic: a command that prints `host:slots` lines, run each second.",
)
@click.option(
    "--min-np",
    "--min-num-proc",
    type=_COUNT,
    metavar="N",
    help="Elastic: the ranks that the job needs. [default: -np, else 1]",
)
@click.option(
    "--max-np",
    "--max-num-proc",
    type=_COUNT,
    metavar="N",
    help="Elastic: the most ranks. [default: all slots]",
)
@click.option(
    "--elastic-timeout",
    type=_SECONDS,
    default=600.0,
    metavar="SECONDS",
    help="Elastic: time to wait for --min-np ranks, and for a late rank at a change of the world.",
)
@click.option(
    "--reset-limit",
    type=_NUMBER,
    metavar="N",
    help="Elastic: the changes of the world that are allowed; the next one ends the job. [default: "
    "no limit]",
)
@click.option(
    "--blacklist-cooldown-range",
    nargs=2,
    type=click.FloatRange(min=0),
    default=(10.0, 300.0),
    metavar="MIN MAX",
    help="Elastic: seconds without new ranks on a host after a failure; doubles with each.",
)
@click.option("--verbose", is_flag=True, help="Print the command lines that reach the hosts.")
@click.argument("arguments", nargs=-1, required=True, metavar="COMMAND ...", type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context,
    num_proc: int | None,
    hosts: str | None,
    hostfile: str | None,
    nnodes: int | None,
    nproc_per_node: int | None,
    module: bool,
    named: tuple[str, ...],
    bind_to: str,
    rsh: str,
    ssh_port: int | None,
    ssh_identity_file: str | None,
    start_timeout: float,
    output_filename: str | None,
    network_interfaces: str | None,
    master_addr: str | None,
    master_port: int | None,
    max_restarts: int,
    host_discovery_script: str | None,
    min_np: int | None,
    max_np: int | None,
    elastic_timeout: float,
    reset_limit: int | None,
    blacklist_cooldown_range: tuple[float, float],
    verbose: bool,
    arguments: tuple[str, ...],
) -> None:
    """Start a command on the ranks of one host or several.

    \b
    hvdrun -np 8 python train.py
    hvdrun -np 8 -H a:4,b:4 python train.py
    hvdrun -np 8 --hostfile hosts -m hvdtrain --task my.py:MyTask
    hvdrun --min-np 1 --max-np 8 --host-discovery-script ./hosts.sh python train.py

    Without -H or --hostfile the hosts are those of PBS, LSF, SGE or Slurm, else this host.
    """
    if detect().size > 1:
        raise InputError("hvdtrain launch starts the ranks itself; run it without a launcher")
    remote = RemoteShell(rsh, ssh_port, ssh_identity_file, int(start_timeout) or 1)
    env = environment(named, network_interfaces)
    env.setdefault("PYTHONUNBUFFERED", "1")
    elastic: ElasticOptions | None = None
    slots: list[Host] = []
    chosen: list[Host] = []
    if host_discovery_script is not None:
        _refuse(context, _FIXED_ONLY, "has no effect with --host-discovery-script")
        elastic = ElasticOptions(
            hosts=host_discovery_script,
            min_np=min_np or num_proc or 1,
            max_np=max_np,
            first_np=num_proc,
            slots=nproc_per_node or 1,
            timeout_s=elastic_timeout,
            reset_limit=reset_limit,
            cooldown_s=blacklist_cooldown_range,
        )
    else:
        _refuse(context, _ELASTIC_ONLY, "needs a --host-discovery-script that names the hosts")
        found = _hosts(hosts, hostfile, num_proc, nproc_per_node)
        slots = choose_slots(found, None, nnodes, nproc_per_node)
        chosen = choose_slots(found, num_proc, nnodes, nproc_per_node)
    if rsh != SSH:
        _refuse(context, _SSH_ONLY, f"has no effect with --rsh {rsh}")
        remote.check()  # even if all hosts turn out to be this one
    job = Job(
        hosts=chosen,
        command=_command(arguments, module, env["PATH"]),
        env=env,
        named=named,
        remote=remote,
        start_timeout_s=start_timeout,
        output=Path(output_filename).absolute() if output_filename else None,
        verbose=verbose,
        master_addr=master_addr,
        master_port=master_port,
        bind_to=bind_to,
        max_restarts=max_restarts,
        slots=slots,
    )
    if elastic is not None:
        ElasticJob(job, elastic).run()
        return
    run(job)


def _refuse(context: click.Context, names: tuple[str, ...], why: str) -> None:
    """Raise InputError if one of the options is given, with another value than its default."""
    for option in context.command.params:
        name = option.name or ""
        if name not in names or context.get_parameter_source(name) is ParameterSource.DEFAULT:
            continue
        if context.params[name] != option.get_default(context):
            raise InputError(f"{option.opts[0]} {why}; leave it out")


def _hosts(
    hosts: str | None, hostfile: str | None, num_proc: int | None, per_host: int | None
) -> list[Host]:
    """Return the hosts that are named, else the scheduler's, else this one."""
    if hosts is not None and hostfile is not None:
        raise InputError("-H and --hostfile both name the hosts; give one of them")
    if hosts is not None:
        return parse_host_list(hosts)
    if hostfile is not None:
        return read_host_file(hostfile)
    if found := hosts_of_scheduler(os.environ)[0]:
        return found
    if num_proc is None and per_host is None:
        raise InputError("how many ranks? give -np N, or hosts with -H")
    return [Host("localhost", num_proc or per_host or 1)]


def _command(arguments: tuple[str, ...], module: bool, path: str) -> list[str]:
    """Return the command of a rank: a module and a .py file are run by this interpreter."""
    name = arguments[0]
    if module:
        return [sys.executable, "-m", *arguments]
    if name.endswith(".py"):
        if not os.path.isfile(name):
            raise InputError(f"no such file: {name}")
        return [sys.executable, *arguments]
    program = shutil.which(name, path=path)
    if program is None:
        raise InputError(f"no such command: {name}")
    return [os.path.abspath(program), *arguments[1:]]
