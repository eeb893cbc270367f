"""`hvdtrain launch`, also installed as `hvdrun`."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.command_options import count, option
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
_ELASTIC_ONLY = "min_np max_np timeout_s reset_limit cooldown_s".split()
_FIXED_ONLY = "hosts hostfile nnodes max_restarts master_port".split()
_SSH_ONLY = "port identity_file".split()

# Kinds of options.
_number = partial(option, type=click.IntRange(min=0), metavar="N")
_port = partial(option, type=click.IntRange(1, 65535), metavar="PORT")
_seconds = partial(option, type=click.FloatRange(min=0, min_open=True), metavar="SECONDS")


@click.command(
    "launch",
    # What follows the command's name belongs to the command.
    context_settings={"allow_interspersed_args": False, "show_default": True},
    epilog="Exit code: that of the first rank that failed, or 128 + the number of its signal; "
    "2: bad input, or a host that did not start; 4: a lost host; 129: SIGHUP; 130: Ctrl-C; "
    "143: SIGTERM.",
    params=[
        count("-np --num-proc", "Start N ranks."),
        option("-H --hosts", "Hosts, and how many ranks each can run.", metavar="HOST:SLOTS,..."),
        option("--hostfile", "A file of lines `host slots=4`, `host:4` or `host`.", metavar="FILE"),
        count("--nnodes", "Use the first N hosts."),
        count("--nproc-per-node", "Start N ranks on each host."),
        option("-m --module", "Run COMMAND as a module: python -m COMMAND.", is_flag=True),
        option("-x named", "Set a variable for all ranks.", multiple=True, metavar="NAME[=VALUE]"),
        option(
            "--bind-to",
            "core: bind each rank to its share of the physical cores, on the NUMA node of its GPU "
            "if it has one; to all if there are more ranks than cores. numa: to all of that node.",
            type=click.Choice(BINDINGS),
            default=CORE,
        ),
        option(
            "--rsh",
            "How to reach other hosts: ssh, srun, kubectl, or a command with {host} in it, such as "
            "'docker exec -i {host}'.",
            default=SSH,
            metavar="COMMAND",
        ),
        _port("-p --ssh-port port"),
        option("-i --ssh-identity-file identity_file", metavar="FILE"),
        _seconds(
            "--start-timeout start_timeout_s",
            "End the job if its ranks have not all started after this time.",
            default=120.0,
        ),
        option(
            "--output-filename output",
            "Also write DIR/rank.N/stdout and stderr, and error.json if torch's @record is used.",
            metavar="DIR",
        ),
        option(
            "--network-interfaces --network-interface",
            "Interfaces for Gloo, NCCL and Horovod. [default: by the route to rank 0]",
            metavar="NAME,...",
        ),
        option(
            "--master-addr",
            "The address of rank 0's host, or of hvdrun in an elastic job. [default: by the route "
            "to it]",
            metavar="ADDRESS",
        ),
        _port("--master-port", "[default: a free one]"),
        _number(
            "--max-restarts",
            "Start all ranks again, up to N times, when one fails or a host is lost. A lost host "
            "is left out if the others have slots for -np ranks.",
            default=0,
        ),
        option(
            "--host-discovery-script",
            "Elastic: a command that prints `host:slots` lines, run each second.",
            metavar="COMMAND",
        ),
        count(
            "--min-np --min-num-proc",
            "Elastic: the fewest ranks. [default: -np, else 1]",
        ),
        count("--max-np --max-num-proc", "Elastic: the most ranks. [default: all slots]"),
        _seconds(
            "--elastic-timeout timeout_s",
            "Elastic: time to wait for --min-np ranks, and for a late rank when the number of "
            "ranks changes.",
            default=600.0,
        ),
        _number(
            "--reset-limit",
            "Elastic: end the job when its ranks have changed more than N times. [default: no "
            "limit]",
        ),
        option(
            "--blacklist-cooldown-range cooldown_s",
            "Elastic: seconds without new ranks on a host that failed; doubled by each failure.",
            nargs=2,
            type=click.FloatRange(min=0),
            default=(10.0, 300.0),
            metavar="MIN MAX",
        ),
        option("--verbose", "Print the command lines that reach the hosts.", is_flag=True),
        click.Argument(
            ["arguments"], nargs=-1, required=True, metavar="COMMAND ...", type=click.UNPROCESSED
        ),
    ],
)
def command(
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

    Without -H and --hostfile it uses the hosts of the PBS, LSF, SGE or Slurm job, or this host.
    """
    if detect().size > 1:
        raise InputError("hvdtrain launch starts the ranks itself; run it without a launcher")
    remote = RemoteShell(rsh, port, identity_file, int(of_job["start_timeout_s"]) or 1)
    env = environment(of_job["named"], network_interfaces)
    env.setdefault("PYTHONUNBUFFERED", "1")
    of_world = {name: of_job.pop(name) for name in _ELASTIC_ONLY}
    elastic = None
    of_job["hosts"] = ()
    if host_discovery_script is not None:
        _refuse(_FIXED_ONLY, "has no effect with --host-discovery-script")
        of_world["min_np"] = of_world["min_np"] or num_proc or 1
        elastic = ElasticOptions(
            hosts=host_discovery_script, first_np=num_proc, slots=nproc_per_node or 1, **of_world
        )
    else:
        _refuse(_ELASTIC_ONLY, "needs --host-discovery-script")
        found = _hosts(hosts, hostfile, num_proc or nproc_per_node)
        of_job["slots"] = choose_slots(found, None, nnodes, nproc_per_node)
        of_job["hosts"] = choose_slots(found, num_proc, nnodes, nproc_per_node)
    if rsh != SSH:
        _refuse(_SSH_ONLY, f"has no effect with --rsh {rsh}")
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


def _refuse(names: list[str], why: str) -> None:
    """Raise InputError if one of the options is given, with another value than its default."""
    context = click.get_current_context()
    for param in context.command.params:
        if param.name in names and context.params[param.name] not in (None, param.default):
            raise InputError(f"{param.opts[0]} {why}; leave it out")


def _hosts(hosts: str | None, hostfile: str | None, num_ranks: int | None) -> list[Host]:
    """Return the hosts that are named, else the scheduler's, else this one."""
    if hosts is not None:
        if hostfile is not None:
            raise InputError("-H and --hostfile both name the hosts; give one of them")
        return parse_host_list(hosts)
    if hostfile is not None:
        return read_host_file(hostfile)
    if found := hosts_of_scheduler(os.environ):
        return found
    if num_ranks is None:
        raise InputError("the number of ranks is not given; give -np N, or hosts with -H")
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
