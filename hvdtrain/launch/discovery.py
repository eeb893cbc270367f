"""Host discovery of elastic jobs: poll the source each second, and track cooldowns of failed hosts.

Used by `elastic`. The script is that of Horovod: it prints a line `host` or `host:slots` for each
host that the job may use now. Imports no torch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hvdtrain.errors import InputError, first_line
from hvdtrain.launch.host_list import Host, parse_host_list
from hvdtrain.system.commands import run

_PERIOD_S = 1.0
_SCRIPT_S = 60.0


@dataclass
class Discovery:
    """Runs the discovery script, or calls a function that returns hosts, each second in a thread.

    `report(hosts)` is called when the printed hosts change, `fail(text)` at the first of several
    consecutive failures. During failures the hosts stay as they were.
    """

    source: str | Callable[[], list[Host]]
    slots: int
    """The slots of a host that the script prints without a number."""
    report: Callable[[list[Host]], object]
    fail: Callable[[str], object]
    _stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Ask for the hosts once, in this thread, and then each second. Raises InputError."""
        hosts = self.find()
        self.report(hosts)
        threading.Thread(target=self._poll, args=(hosts,), daemon=True, name="discovery").start()

    def stop(self) -> None:
        """Stop polling."""
        self._stopped.set()

    def find(self) -> list[Host]:
        """Return the hosts that may be used now; of a script [] if it prints nothing.

        Raises InputError if the script fails, or prints anything but hosts.
        """
        if not isinstance(self.source, str):
            return self.source()
        command = ["/bin/sh", "-c", self.source]
        done = run(command, env=os.environ, timeout_s=_SCRIPT_S, cwd=os.getcwd())
        if done.code is None:
            raise InputError(f"{self.source} did not end within {_SCRIPT_S:g} s")
        if done.code:
            why = done.stderr.strip().splitlines()[-1:] or ["it printed no error"]
            raise InputError(f"{self.source} ended with code {done.code}: {why[0]}")
        lines = dict.fromkeys(map(str.strip, done.stdout.splitlines()))
        hosts = {host.name: host for line in lines if line for host in self._parse(line)}
        return list(hosts.values())

    def _parse(self, line: str) -> list[Host]:
        if line.endswith(":0"):  # a host without a free slot
            return []
        try:
            found = parse_host_list(line)
        except InputError as error:
            raise InputError(f"{self.source} printed {line!r}: {error}") from None
        return [host if str(host) in line else Host(host.name, self.slots) for host in found]

    def _poll(self, last: list[Host]) -> None:
        has_failed = False
        while not self._stopped.wait(_PERIOD_S):
            try:
                hosts = self.find()
            except (InputError, OSError) as error:
                if not has_failed:
                    self.fail(first_line(error))
                has_failed = True
                continue
            has_failed = False
            if hosts != last:
                last = hosts
                self.report(hosts)


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
