"""`hvdtrain launch`, also installed as `hvdrun`."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

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
_ELASTIC_ONLY = ("min_np", "max_np", "timeout_s", "reset_limit", "cooldown_s")
_FIXED_ONLY = ("hosts", "hostfile", "nnodes", "max_restarts", "master_port")
_SSH_ONLY = ("port", "identity_file")

# Kinds of options.
_count = partial(click.option, type=click.IntRange(min=1), metavar="N")
_number = partial(click.option, type=click.IntRange(min=0), metavar="N")
_port = partial(click.option, type=click.IntRange(1, 65535), metavar="PORT")
_seconds = partial(click.option, type=click.FloatRange(min=0, min_open=True), metavar="SECONDS")


@click.command(
    "launch",
    # What follows the command's name belongs to the command.
    context_settings={"allow_interspersed_args": False, "show_default": True},
    epilog="Ends with the exit code of the first rank that failed, 128 + number for a signal; "
    "2 bad input, or a host that did not start; 4 a lost host; 129 SIGHUP, 130 Ctrl-C, "
    "143 SIGTERM.",
)
@_count("-np", "--num-proc", help="Ranks.")
@click.option(
    "-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts, and the ranks that fit there."
)
@click.option("--hostfile", metavar="FILE", help="Lines `host slots=4`, `host:4` or `host`.")
@_count("--nnodes", help="Use the first N hosts.")
@_count("--nproc-per-node", help="Ranks on each host.")
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
@_port("-p", "--ssh-port", "port")
@click.option("-i", "--ssh-identity-file", "identity_file", metavar="FILE")
@_seconds(
    "--start-timeout",
    "start_timeout_s",
    default=120.0,
    help="Time until the ranks of all hosts must have started.",
)
@click.option(
    "--output-filename",
    "output",
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
@_port("--master-port", help="[default: a free one]")
@_number(
    "--max-restarts",
    default=0,
    help="Start all ranks again, up to N times, when one fails or a host is lost; without the lost "
    "host, if the others have slots for -np ranks.",
)
@click.option(
    "--host-discovery-script",
    metavar="COMMAND",
    help="Elastic: a command that prints `host:slots` lines, run each second.",
)
@_count(
    "--min-np",
    "--min-num-proc",
    help="Elastic: the ranks that the job needs. [default: -np, else 1]",
)
@_count(
    "--max-np",
    "--max-num-proc",
    help="Elastic: the most ranks. [default: all slots]",
)
@_seconds(
    "--elastic-timeout",
    "timeout_s",
    default=600.0,
    help="Elastic: time to wait for --min-np ranks, and for a late rank at a change of the world.",
)
@_number(
    "--reset-limit",
    help="Elastic: the changes of the world that are allowed; the next one ends the job. [default: "
    "no limit]",
)
@click.option(
    "--blacklist-cooldown-range",
    "cooldown_s",
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
    /,
    arguments: tuple[str, ...],
    num_proc: int | None,
    nnodes: int | None,
    nproc_per_node: int | None,
    hosts: str | None,
    hostfile: str | None,
    host_discovery_script: str | None,
    module: bool,
    rsh: str,
    port: int | None,
    identity_file: str | None,
    network_interfaces: str | None,
    output: str | None,
    **of_job: Any,
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
    remote = RemoteShell(rsh, port, identity_file, int(of_job["start_timeout_s"]) or 1)
    env = environment(of_job["named"], network_interfaces)
    env.setdefault("PYTHONUNBUFFERED", "1")
    of_world = {name: of_job.pop(name) for name in _ELASTIC_ONLY}
    elastic: ElasticOptions | None = None
    of_job["hosts"] = ()
    if host_discovery_script is not None:
        _refuse(context, _FIXED_ONLY, "has no effect with --host-discovery-script")
        of_world["min_np"] = of_world["min_np"] or num_proc or 1
        elastic = ElasticOptions(
            hosts=host_discovery_script, first_np=num_proc, slots=nproc_per_node or 1, **of_world
        )
    else:
        _refuse(context, _ELASTIC_ONLY, "needs a --host-discovery-script that names the hosts")
        found = _hosts(hosts, hostfile, num_proc or nproc_per_node)
        of_job["slots"] = choose_slots(found, None, nnodes, nproc_per_node)
        of_job["hosts"] = choose_slots(found, num_proc, nnodes, nproc_per_node)
    if rsh != SSH:
        _refuse(context, _SSH_ONLY, f"has no effect with --rsh {rsh}")
        remote.check()  # even if all hosts turn out to be this one
    job = Job(
        command=_command(arguments, module, env["PATH"]),
        env=env,
        remote=remote,
        output=Path(output).absolute() if output else None,
        **of_job,
    )
    if elastic:
        ElasticJob(job, elastic).run()
    else:
        run(job)


def _refuse(context: click.Context, names: tuple[str, ...], why: str) -> None:
    """Raise InputError if one of the options is given, with another value than its default."""
    for option in context.command.params:
        name = option.name
        if name in names and context.params[name] not in (None, option.default):
            raise InputError(f"{option.opts[0]} {why}; leave it out")


def _hosts(hosts: str | None, hostfile: str | None, num_ranks: int | None) -> list[Host]:
    """Return the hosts that are named, else the scheduler's, else this one."""
    if hosts is not None:
        if hostfile is not None:
            raise InputError("-H and --hostfile both name the hosts; give one of them")
        return parse_host_list(hosts)
    if hostfile is not None:
        return read_host_file(hostfile)
    if found := hosts_of_scheduler(os.environ)[0]:
        return found
    if num_ranks is None:
        raise InputError("how many ranks? give -np N, or hosts with -H")
    return [Host("localhost", num_ranks)]


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
