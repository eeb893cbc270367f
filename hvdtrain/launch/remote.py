"""The command line that runs a program on another host, and what travels there with it.

Used by `hvdtrain launch`: by ssh, or by what `--rsh` names. The working folder and some variables
travel; the interpreter is named by its absolute path, so a virtual environment must exist at the
same path. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from hvdtrain.errors import InputError
from hvdtrain.job import job_secret
from hvdtrain.system.commands import run

# Variables with these prefixes travel to other hosts, as horovodrun's and mpirun's users expect.
TRAVELLING = tuple(
    "HVDTRAIN_ HOROVOD_ CUDA_ NCCL_ GLOO_ OMP_ MKL_ TORCH_ HF_ WANDB_ PATH LD_LIBRARY_PATH "
    "PYTHON".split()
)
# What an interpreter needs as it starts.
_AT_START = ("PATH", "LD_LIBRARY_PATH", "PYTHON")

SSH = "ssh"
# What else --rsh names. A command here, or one that the user gives, passes its last arguments on to
# the other host as they are; ssh joins its own into one line for the user's shell.
_COMMANDS = {
    # A step beside the job's others, with all the cores and GPUs that the job has on that host.
    "srun": "srun --overlap --nodes=1 --ntasks=1 --cpu-bind=none --nodelist={host}",
    # Pods find each other as worker-0.workers, and kubectl knows that pod as worker-0.
    "kubectl": "kubectl exec --stdin {pod} --",
}


@dataclass(frozen=True)
class RemoteShell:
    """How to start programs on other hosts."""

    rsh: str = SSH
    """ssh, srun, kubectl, or a command with {host} (or {pod}: up to its first dot) in it."""
    port: int | None = None
    identity_file: str | None = None
    connect_timeout_s: int = 30

    @property
    def name(self) -> str:
        """The program's name, for messages."""
        return self.rsh.split()[0]

    def check(self) -> None:
        """Raise InputError if the command cannot be one, or its program is not on PATH."""
        try:
            names_host = self._words("a") != self._words("b")
        except (KeyError, IndexError, AttributeError, ValueError):  # {name}, {}, an open quote
            names_host = False
        if not names_host:
            known = ", ".join((SSH, *_COMMANDS))
            raise InputError(
                f"--rsh {self.rsh}: give {known}, or a command with {{host}} in it, such as "
                f"'docker exec -i {{host}}'"
            )
        if shutil.which(self.name) is None:
            hint = "; install OpenSSH, or give --rsh" if self.rsh == SSH else ""
            raise InputError(f"cannot reach other hosts: {self.name} is not on PATH{hint}")

    def options(self) -> list[str]:
        """Return ssh's options. A host that is not known yet is accepted, a changed key is not."""
        # ServerAliveInterval: after three missed replies ssh exits.
        text = (
            "-o BatchMode=yes -o StrictHostKeyChecking=accept-new "
            f"-o ConnectTimeout={self.connect_timeout_s} -o ServerAliveInterval=10"
        )
        options = text.split() + (["-p", str(self.port)] if self.port else [])
        return options + (["-i", self.identity_file] if self.identity_file else [])

    def command(self, host: str, command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """Return the command line that runs `command` on `host`, in this working folder. Raises
        InputError if that is not possible.
        """
        self.check()
        settings = [f"{name}={value}" for name, value in variables.items()]
        inner = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *settings, *command])}"
        shell = [] if self.rsh == SSH else ["sh", "-c"]
        return [*self._words(host), *shell, inner]

    def line(self, host: str, command: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """Return the command line that runs `command` on a host, this one or another."""
        if is_this_host(host):
            return list(command)
        # All users of a host can read a command line: only what the interpreter needs as it starts.
        at_start = {name: value for name, value in env.items() if name.startswith(_AT_START)}
        return self.command(host, command, at_start)

    def _words(self, host: str) -> list[str]:
        if self.rsh == SSH:
            return [SSH, *self.options(), host]
        words = shlex.split(_COMMANDS.get(self.rsh, self.rsh))
        return [word.format(host=host, pod=host.partition(".")[0]) for word in words]


def environment(names: Sequence[str], interfaces: str | None) -> dict[str, str]:
    """Return this environment as the ranks get it: this interpreter's folder first on PATH.

    `names` are of -x: NAME, or NAME=VALUE. Raises InputError for a NAME that is not set.
    """
    env = {**os.environ, **dict(name.split("=", 1) for name in names if "=" in name)}
    if missing := [name for name in names if "=" not in name and name not in env]:
        raise InputError(f"-x {missing[0]}: the variable is not set; give -x {missing[0]}=VALUE")
    env |= interface_variables(interfaces)
    folder = str(Path(sys.executable).parent)
    folders = [part for part in env.get("PATH", os.defpath).split(os.pathsep) if part != folder]
    env["PATH"] = os.pathsep.join([folder, *folders])
    return env


def interface_variables(names: str | Iterable[str] | None) -> dict[str, str]:
    """Return the variables that name network interfaces, "a,b" or several names, to Gloo, NCCL and
    Horovod.
    """
    text = names if isinstance(names, str) else ",".join(sorted(names or ()))
    variables = {
        "GLOO_SOCKET_IFNAME": text,
        "NCCL_SOCKET_IFNAME": text,
        "HOROVOD_GLOO_IFACE": text.partition(",")[0],
    }
    return variables if text else {}


def travelling(env: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return the variables that go to other hosts: those of the table above and of -x, but not the
    secret of the job.
    """
    named = {name.partition("=")[0] for name in names}
    wanted = (n for n in env if n.startswith(TRAVELLING) or n in named)
    return {name: env[name] for name in sorted(wanted) if name != job_secret.VARIABLE}


@cache
def is_this_host(name: str) -> bool:
    """Return whether a name is this host's: it resolves to one of its own addresses.

    `user@host`, and an alias of ssh's configuration, are reached over ssh, wherever they lead: to
    another user, or to a container behind a port of this host.
    """
    if name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    own = {a.address.partition("%")[0] for each in psutil.net_if_addrs().values() for a in each}
    return any(address in own or address.startswith("127.") for address in _addresses(name))


def master_address(names: Sequence[str]) -> str:
    """Return the address at which all these hosts reach the first one.

    On the first host its own name may resolve to loopback (Debian's 127.0.1.1), so names are
    resolved here. If the first host is this one, return its address on the route to another.
    """
    first, *rest = names
    if rest and not is_this_host(first):
        for address in _resolve(first) or [first]:
            if not _is_loopback(address):
                return address
        # It is this host by another name: `user@host`, or an alias.
    others = [name for name in rest if not is_this_host(name)]
    if not others:
        return "127.0.0.1"
    # Loopback last: another name of this host may be among them.
    addresses = [address for name in others for address in _resolve(name)]
    for address in sorted(addresses, key=_is_loopback):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: the kernel chooses the source address
            return str(probe.getsockname()[0])
    raise InputError(f"no route from {first} to {', '.join(others)}; is the name right?")


def own_address(names: Sequence[str]) -> str:
    """Return the address at which all these hosts reach this one; loopback if it is the only one.

    Raises InputError if there is none.
    """
    return master_address(["localhost", *names])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _resolve(name: str) -> list[str]:
    """Return the addresses of a host, which may be an alias of ssh's configuration; [] if none."""
    name = name.rpartition("@")[2]
    found = _addresses(name)
    if not found:
        settings = run(["ssh", "-G", name], env=os.environ, timeout_s=10).stdout
        for real in re.findall(r"^hostname (\S+)", settings, re.MULTILINE):
            found = _addresses(real)
    return found


def _addresses(name: str) -> list[str]:
    """Return the addresses of a name; [] if it has none, as `user@host`."""
    with contextlib.suppress(OSError):
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return [str(info[4][0]) for info in infos]
    return []
