"""The checks of `hvdtrain doctor` on several hosts, and what must be equal on all of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from hvdtrain.doctor.finding import Finding
from hvdtrain.doctor.software import COMMIT
from hvdtrain.launch.host_list import Host
from hvdtrain.launch.remote import RemoteShell, is_this_host, travelling
from hvdtrain.system.commands import CommandResult, last_line, own_environment, run

_HOST_S = 120.0
_SSH = RemoteShell(connect_timeout_s=10)


def check_hosts(hosts: Sequence[Host]) -> Iterator[Finding]:
    """Run the checks on every host, by ssh; yield their findings, and whether versions are equal.

    The slots of `hosts` are their ranks.
    """
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = list(pool.map(_ask, hosts))
    versions: dict[str, dict[str, str]] = {}
    for host, done in zip(hosts, answers, strict=True):
        name, report = f"hvdtrain on {host.name}", _report(done)
        if report is None:
            how = f"no answer in {_HOST_S:.0f} s" if done.code is None else last_line(done.output)
            line = f"{sys.executable} -m hvdtrain doctor"
            fix = shlex.join(["ssh", *_SSH.options(), host.name, line])
            yield Finding("failure", f"hvdtrain doctor failed: {how}", fix, name)
            continue
        versions[host.name] = report["versions"]
        found = [Finding(**values) for values in report["findings"]]
        broken = sum(finding.status in ("warning", "failure") for finding in found)
        text = f"{report['host']}: {len(found)} checks, {broken} with a warning or failure"
        yield Finding("ok", text, name=name)
        yield from (replace(finding, name=f"{finding.name} on {host.name}") for finding in found)
    yield _compare(versions)


def _ask(host: Host) -> CommandResult:
    """Run the checks on a host, with this Python, in this working folder, and with the variables of
    `travelling`; on this host without ssh.
    """
    doctor = "-m hvdtrain doctor --json --no-collectives -np".split()
    command = [sys.executable, *doctor, str(host.slots)]
    if not is_this_host(host.name):
        command = _SSH.command(host.name, command, travelling(os.environ, ()))
    return run(command, env=own_environment(), timeout_s=_HOST_S, cwd=os.getcwd())


def _compare(versions: Mapping[str, Mapping[str, str]]) -> Finding:
    """Return a finding: a failure for the first version that differs from the first host's."""
    hosts = list(versions)
    if len(hosts) < 2:
        return Finding("note", "not compared: fewer than two hosts have reported", name="versions")
    for host in hosts[1:]:
        first, other = versions[hosts[0]], versions[host]
        for package in sorted({*first, *other}):
            here, there = first.get(package, "none"), other.get(package, "none")
            is_unknown = package == COMMIT and "none" in (here, there)  # no checkout there
            if here != there and not is_unknown:
                text = f"{package} is {here} on {hosts[0]} and {there} on {host}"
                line = f"{sys.executable} -m pip install {package}=={here}"
                fix = f"ssh {host} {line}" if package != COMMIT else ""
                return Finding("failure", text, fix, "versions")
    return Finding("ok", f"equal on {', '.join(hosts)}", name="versions")


def _report(done: CommandResult) -> dict[str, Any] | None:
    """Return what a host's doctor prints, without what a login shell prints before and after."""
    found = re.search(r"^\{\n.*^\}$", done.stdout, re.MULTILINE | re.DOTALL)
    try:
        return json.loads(found[0]) if found else None
    except ValueError:  # the shell has printed braces of its own
        return None
