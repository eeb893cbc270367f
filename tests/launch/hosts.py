"""Hosts for tests: network namespaces on a bridge, with a real sshd in each.

Each host has its own network, PID, UTS and mount namespace: its own name, /etc/hosts, /dev/shm
 and processes. /tmp, the interpreter and the sources are shared, as on a cluster with NFS.

    login 10.77.0.254 ---- bridge ---- eth0 10.77.0.1 a      `login` is a network namespace alone;
                              |------- eth0 10.77.0.2 b      commands run there, or on a host
                              `------- eth0 10.77.0.3 c
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.environments import missing, require
from tests.launching import command_of, wait_for, wait_until

NAMES = "abc"
START_S = 20

SSHD = """\
HostKey {folder}/key
AuthorizedKeysFile {folder}/user.pub
PasswordAuthentication no
StrictModes no
UseDNS no
PidFile none
"""
SSH = """\
IdentityFile {folder}/user
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking accept-new
"""
# What a host does first. The test's own /etc/ssh and /etc/hosts stay as they are.
ENTER = """\
set -e
mount --bind {folder}/etc-ssh /etc/ssh
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/resolv.conf /etc/resolv.conf
"""
BOOT = """\
hostname {name}
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
exec /usr/sbin/sshd -D -e -f {folder}/sshd
"""


# Commands of `ip`
LOGIN = """\
-n {0} link set lo up
-n {0} link add bridge type bridge
-n {0} addr add 10.77.0.254/24 dev bridge
-n {0} link set bridge up
"""
LINKED = """\
-n {login} link add {link} type veth peer eth0 netns {space}
-n {login} link set {link} master bridge up
-n {space} addr add 10.77.0.{number}/24 dev eth0
-n {space} link set eth0 up
-n {space} link set lo up
-n {space} route add default via 10.77.0.254
"""
LOSS = """\
table inet loss {
    chain arriving {
        type filter hook input priority 0
        iifname "eth0" numgen random mod 100 < 1 counter drop
    }
}
"""


@dataclass
class Hosts:
    """The running hosts, by name."""

    folder: Path
    space: str
    """The name of login's network namespace, with which those of the hosts begin."""
    sshd: dict[str, int]
    """The process of each host's sshd, which is process 1 there."""

    def on_login(self, *command: object) -> list[str]:
        """Return a command that runs beside the hosts, and resolves their names."""
        script = ENTER.format(folder=self.folder) + 'exec "$@"'
        enter = ["nsenter", f"--net=/run/netns/{self.space}", "unshare", "--mount"]
        return [*enter, "sh", "-c", script, "sh", *map(str, command)]

    def on(self, name: str, *command: object) -> list[str]:
        """Return a command that runs on a host. Signals do not reach it."""
        enter = f'exec nsenter --target {self.sshd[name]} -m -u -n -p --wdns="$PWD" -- "$@"'
        return ["sh", "-c", enter, "sh", *map(str, command)]

    def processes(self, name: str) -> dict[int, str]:
        """Return the processes on a host, sshd itself excluded, with their commands."""
        space = _pid_namespace(self.sshd[name])
        others = set(psutil.pids()) - {self.sshd[name]}
        found = {p: command_of(p) for p in others if space and _pid_namespace(p) == space}
        return {pid: line for pid, line in found.items() if line}

    def lose_packets(self) -> None:
        """Drop 1 % of the packets that reach a host."""
        require("nft")
        for name in self.sshd:
            done = subprocess.run(self.on(name, "nft", LOSS), capture_output=True, text=True)
            if done.returncode:
                missing(f"nft cannot drop packets here: {done.stderr}")

    def wait_until_gone(self, seconds: float = 60) -> None:
        """Fail unless all processes on all hosts end, and sshd's sessions with them."""
        deadline = time.monotonic() + seconds
        while left := [p for name in self.sshd for p in self.processes(name).items()]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


def _pid_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


@contextlib.contextmanager
def namespace(name: str) -> Iterator[None]:
    """Make a network namespace, and remove it at the end. Skip the test where none can be made."""
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        missing(f"no network namespaces here: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ip(commands: str) -> None:
    """Run a command of `ip` for each line."""
    for line in filter(None, commands.splitlines()):
        subprocess.run(["ip", *line.split()], check=True)


@contextlib.contextmanager
def running_hosts(count: int) -> Iterator[Hosts]:
    """Make hosts a, b, ... and remove them after it. Skip the test without root, fail it in CI."""
    require("ip", "setpriv", "unshare", "nsenter", "ssh", "ssh-keygen", "sshd", root=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdtrain-hosts-")))
        login = folder.name
        hosts = Hosts(folder, login, {})
        names = NAMES[:count]
        _write_files(folder, names)
        stack.enter_context(namespace(login))
        ip(LOGIN.format(login))
        for number, name in enumerate(names, start=1):
            _start_host(stack, hosts, name, number)
        for name in names:
            wait_for(folder / f"log-{name}", "Server listening on 0.0.0.0", seconds=START_S)
        yield hosts


def _write_files(folder: Path, names: str) -> None:
    (folder / "etc-ssh").mkdir()
    (folder / "etc-ssh" / "ssh_config").write_text(SSH.format(folder=folder))
    lines = [f"10.77.0.{number} {name}\n" for number, name in enumerate(names, start=1)]
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.254 login\n" + "".join(lines))
    # No DNS, and no waiting for it: torch looks up the name of every address that connects.
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    (folder / "sshd").write_text(SSHD.format(folder=folder))
    for key in ("user", "key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
        subprocess.run(make, check=True)


def _start_host(stack: contextlib.ExitStack, hosts: Hosts, name: str, number: int) -> None:
    boot = (ENTER + BOOT).format(folder=hosts.folder, name=name)
    space, link = f"{hosts.space}-{name}", f"to-{name}"
    stack.enter_context(namespace(space))
    ip(LINKED.format(login=hosts.space, link=link, space=space, number=number))
    ends_with_us = "setpriv --pdeathsig KILL".split()
    enter = f"ip netns exec {space} unshare --pid --fork --kill-child".split()
    enter += "--mount-proc --mount --uts".split()
    log = stack.enter_context((hosts.folder / f"log-{name}").open("wb"))
    # Without a terminal's session: Ctrl-C in it would end the hosts.
    process = subprocess.Popen(
        [*ends_with_us, *enter, "sh", "-c", boot],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)  # of process 1 of the namespace the kernel ends all others
    children = psutil.Process(process.pid).children
    wait_until(children, "the start of a host", START_S)
    hosts.sshd[name] = children()[0].pid
