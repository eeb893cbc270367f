"""Host discovery of elastic jobs: the hosts that a script prints, and the cooldowns of failed ones.

Used by `elastic`. The script is that of Horovod: it prints a line `host` or `host:slots` for each
host that the job may use now. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hvdtrain.errors import InputError
from hvdtrain.launch.host_list import Host, parse_host_list
from hvdtrain.system.commands import run

_SCRIPT_S = 60.0


def find_hosts(source: str | Callable[[], list[Host]], slots: int) -> list[Host]:
    """Return the hosts that may be used now, by a script or a function; of a script [] if it prints
    nothing. A host that is printed without a number has `slots`.

    Raises InputError if the script fails, or prints anything but hosts.
    """
    if not isinstance(source, str):
        return source()
    done = run(["/bin/sh", "-c", source], env=os.environ, timeout_s=_SCRIPT_S, cwd=os.getcwd())
    if done.code is None:
        raise InputError(f"{source} did not end within {_SCRIPT_S:g} s")
    if done.code:
        why = done.stderr.strip().splitlines()[-1:] or ["it printed no error"]
        raise InputError(f"{source} ended with code {done.code}: {why[0]}")
    found = {}
    for line in dict.fromkeys(map(str.strip, done.stdout.splitlines())):
        if not line or line.endswith(":0"):  # a host without a free slot
            continue
        try:
            hosts = parse_host_list(line)
        except InputError as error:
            raise InputError(f"{source} printed {line!r}: {error}") from None
        for host in hosts:
            found[host.name] = host if str(host) in line else Host(host.name, slots)
    return list(found.values())


@dataclass
class FailedHosts:
    """The cooldowns of hosts: until its cooldown ends, a host with a failed rank gets no new ranks.

    The first cooldown lasts `shortest_s`; each further failure doubles it, up to `longest_s`. A
    failure more than `longest_s` after the end of a cooldown starts with `shortest_s` again.
    """

    shortest_s: float
    longest_s: float
    _cooldowns: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The end and the length of the last one, by host."""

    def add(self, host: str) -> float:
        """Start the host's cooldown, unless one runs; return the seconds until its end."""
        now = time.monotonic()
        until, time_s = self._cooldowns.get(host, (0.0, 0.0))
        if now >= until:
            is_first = not time_s or now > until + self.longest_s
            time_s = self.shortest_s if is_first else min(2 * time_s, self.longest_s)
            until = now + time_s
            self._cooldowns[host] = until, time_s
        return until - now

    def has(self, host: str) -> bool:
        """Return whether a host is in a cooldown."""
        return time.monotonic() < self._cooldowns.get(host, (0.0, 0.0))[0]
