"""Hosts and their slots: from the command line, a hostfile, or the variables of a scheduler.

Used by `hvdtrain launch`. A slot is room for one rank. Hosts that are named twice have the sum of
their slots. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import InputError
from hvdtrain.job.slurm import expand_node_list, expand_tasks_per_node

# Of PBS, LSF and SGE: a variable with the path of a file that lists the hosts of the job.
_SCHEDULER_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")
# host, host:2, user@host, [fe80::1]:2; a bare IPv6 address has no slots. ssh would read a name
# that begins with "-" as an option.
_HOST = re.compile(
    r"(?!\[*-)((?:[^\s\[\]:,@]+@)?\[[^\s\]]+\]|[^\s\[\]:,]+)(?::(\d{1,6}))?"
    r"|([0-9a-fA-F]*:[0-9a-fA-F]*:[\w:.]*)"
)


@dataclass(frozen=True)
class Host:
    """A host, and the number of ranks on it."""

    name: str
    slots: int

    def __str__(self) -> str:
        name = re.sub("[^@]*:[^@]*$", r"[\g<0>]", self.name)  # an IPv6 address, but not its user
        return f"{name}:{self.slots}"


def parse_host_list(text: str) -> list[Host]:
    """Return the hosts of "a:4,b:4"; a host without a number has one slot. Raises InputError."""
    return _merge(_parse_host(part.strip(), f"-H {text}") for part in text.split(","))


def read_host_file(path: str | Path) -> list[Host]:
    """Return the hosts of a file. Raises InputError if it cannot be read or names no host.

    A line is `host`, `host slots=4` (horovodrun, Open MPI), `host:4` (MPICH), or `host 4 QUEUE ...`
    (SGE); what follows `#` is a comment. PBS and LSF repeat the line of a host for each slot.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the hostfile {path}: {error}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words, where = line.partition("#")[0].split(), f"{path}, line {number}"
        if not words:
            continue
        host = _parse_host(words[0], where)
        slots = [word[6:] for word in words[1:] if word.startswith("slots=")]
        slots += [word for word in words[1:2] if word.isdigit()]
        for given in slots[:1]:
            host = _parse_host(f"{str(host).rpartition(':')[0]}:{given}", where)
        found.append(host)
    if not found:
        raise InputError(f"the hostfile {path} lists no hosts")
    return _merge(found)


def hosts_of_scheduler(env: Mapping[str, str]) -> list[Host]:
    """Return the hosts that a scheduler has allocated; none without one. Raises InputError."""
    for name in _SCHEDULER_FILES:
        if name in env:
            return read_host_file(env[name])
    if "SLURM_JOB_NODELIST" not in env:
        return []
    try:
        names = expand_node_list(env["SLURM_JOB_NODELIST"])
    except ValueError as error:
        raise InputError(f"SLURM_JOB_NODELIST: {error}; give the hosts with -H") from None
    text = env.get("SLURM_TASKS_PER_NODE", f"1(x{len(names)})")
    slots = expand_tasks_per_node(text)
    if len(slots) != len(names):
        raise InputError(
            f"SLURM_TASKS_PER_NODE={text} does not fit the {len(names)} hosts of "
            f"SLURM_JOB_NODELIST={env['SLURM_JOB_NODELIST']}; give the hosts with -H"
        )
    return list(map(Host, names, slots))


def choose_slots(
    hosts: list[Host],
    num_proc: int | None,
    num_hosts: int | None = None,
    per_host: int | None = None,
) -> list[Host]:
    """Return the hosts to use, with the number of ranks on each: slots are filled in order.

    `num_hosts` takes the first hosts only; `per_host` replaces their slots. Raises InputError if
    there are fewer hosts or slots than asked for.
    """
    if num_hosts is not None and num_hosts > len(hosts):
        names = ",".join(map(str, hosts))
        raise InputError(f"--nnodes {num_hosts} is more than the hosts of {names}; add hosts")
    hosts = [Host(host.name, per_host or host.slots) for host in hosts[:num_hosts]]
    room = sum(host.slots for host in hosts)
    wanted = num_proc or room
    if wanted > room:
        raise InputError(
            f"-np {wanted} is more than the slots of {','.join(map(str, hosts))}; give more, such "
            f"as -H {hosts[0].name}:{wanted}"
        )
    chosen = []
    for host in hosts:
        if taken := min(host.slots, wanted):
            chosen.append(Host(host.name, taken))
        wanted -= taken
    return chosen


def _parse_host(text: str, where: str) -> Host:
    match = _HOST.fullmatch(text)
    if match is None or not int(match[2] or 1):
        raise InputError(
            f"{where}: {text!r} is not a host; write host or host:slots, such as gpu01:4"
        )
    return Host(re.sub(r"[\[\]]", "", match[1] or match[3]), int(match[2] or 1))


def _merge(hosts: Iterable[Host]) -> list[Host]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(*item) for item in slots.items()]
