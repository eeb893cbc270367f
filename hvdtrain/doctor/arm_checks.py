"""Start real ranks under each launcher, and find which collectives work over which transport.

`hvdtrain doctor` uses it after its checks. The ranks are `collective_rank`; this process reads
their reports from the launcher's output, on one host or several, with a limit of time for each, so
that a hang is named. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from hvdtrain.backends.engines import LAUNCHER_OF, NCCL, NamedEngine, parse
from hvdtrain.compare.formatting import figures
from hvdtrain.doctor.finding import Finding
from hvdtrain.launch.host_list import Host
from hvdtrain.launch.real_launchers import (
    LAUNCHERS,
    error_line,
    first_to_end,
    launch_environment,
)
from hvdtrain.system.commands import started

REPORT = "hvdtrain-doctor-report "
_START_S = 90.0  # for ranks to import torch, and to exit
_MARGIN_S = 10.0  # waited beyond the ranks' own timeout, since their error names the late rank
Show = Callable[[str], None]


def all_arms(
    ranks: int, gpus: int, hosts: Sequence[Host] = ()
) -> tuple[list[NamedEngine], list[Finding]]:
    """Return every backend over every transport that can run here; and why others cannot.

    `hosts`: where the ranks run, with a slot for each rank; empty for this host.
    """
    arms, left_out = [], []
    for backend, transports in LAUNCHER_OF.items():
        for transport in transports:
            arm = parse(f"{backend}/{transport}", ranks, cuda=False, hosts=tuple(hosts))
            why = arm.unavailable_reason()
            if transport == NCCL and gpus < ranks:
                why = f"one GPU per rank: {ranks} needed, {gpus} found"
            if why is None:
                arms.append(arm)
            else:
                left_out.append(Finding("note", f"not tried: {why}", name=arm.name))
    # By launcher; real Horovod last, since it may take over MPI.
    arms.sort(key=lambda arm: list(LAUNCHERS).index(arm.launcher))
    return arms, left_out


def check_arms(arms: Sequence[NamedEngine], timeout_s: float, show: Show) -> Iterator[Finding]:
    """Yield a finding for each arm, with the time of every collective.

    Consecutive arms of one launcher run in the same ranks, which are restarted after a failure.
    `timeout_s` is the ranks' timeout in a collective. `show` is called with the current activity.
    """
    for _, group in groupby(arms, lambda arm: arm.launcher):
        left = list(group)
        while left:
            found = _run(left, timeout_s, show)
            yield from found
            left = left[len(found) :]


def _command(arms: Sequence[NamedEngine], timeout_s: float) -> list[str]:
    texts = [f"{arm.name}={arm.c10d_transport}" for arm in arms]
    return arms[0].command(["-m", "hvdtrain.doctor.collective_rank", f"{timeout_s:g}", *texts])


@dataclass
class _Progress:
    """What the ranks of one launcher have reported, and the rest of their output."""

    arm: str = ""
    doing: str = "start"
    problem: str | None = None
    times_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    text: str = ""

    def read(self, line: str) -> bool:
        """Read a line of output; return whether it is a report."""
        found = re.search(rf"{REPORT}(\[.*\])", line)
        if found is None:
            self.text += f"{line}\n"
            return False
        arm, doing, ms, self.problem = json.loads(found[1])
        if ms is not None:
            self.times_ms.setdefault(arm, {})[self.doing] = ms
        self.arm, self.doing = arm, doing
        if doing == "end":
            self.done.append(arm)
        return True


def _run(arms: Sequence[NamedEngine], timeout_s: float, show: Show) -> list[Finding]:
    """Run the arms of one launcher up to the first that fails; return a finding for each.

    If no rank has started, the failure is that of all.
    """
    names, progress = [arm.name for arm in arms], _Progress()
    command = _command(arms, timeout_s)
    # torchrun leaves a folder there.
    with tempfile.TemporaryDirectory(prefix="hvdtrain-", ignore_cleanup_errors=True) as folder:
        env = {**launch_environment(), "PYTHONUNBUFFERED": "1", "TMPDIR": folder}
        try:
            with started(command, env=env, cwd=os.getcwd()) as child:
                _follow(child, progress, timeout_s, show)
        except OSError as error:
            progress.problem = f"cannot start {command[0]}: {error.strerror}"
        except subprocess.TimeoutExpired as error:
            progress.problem = f"the launcher did not end within {error.timeout:.0f} s"
    if progress.problem is None and len(progress.done) < len(arms):
        progress.problem = "the launcher ended early without an error"
    found = []
    for name in progress.done:
        times = ", ".join(f"{what} {figures(ms)}" for what, ms in progress.times_ms[name].items())
        found.append(Finding("ok", f"ms: {times}", "", name, progress.times_ms[name]))
    if progress.problem is None:
        return found
    failed = [arm for arm in arms if arm.name not in progress.done] if progress.arm else arms
    if progress.arm:  # the arms after this one are tried again
        failed = failed[:1] or arms[-1:]
        found = found[: names.index(failed[0].name)]
    text = f"{progress.doing}: {progress.problem}"
    for arm in failed:
        line = shlex.join(_command([arm], timeout_s)).replace(sys.executable, "python")
        found.append(Finding("failure", text, line, arm.name))
    return found


def _follow(
    child: subprocess.Popen[str], progress: _Progress, timeout_s: float, show: Show
) -> None:
    """Read the reports until the launcher ends, or there is a problem; the caller then ends it."""
    assert child.stdout is not None
    rest, last = b"", time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while progress.problem is None:
            limit = _START_S if progress.doing in ("start", "end") else timeout_s + _MARGIN_S
            if not selector.select(max(0.0, last + limit - time.monotonic())):
                progress.problem = f"the ranks hang: no answer in {limit:.0f} s"
                return
            block = os.read(child.stdout.fileno(), 1 << 16)
            if not block:
                if code := child.wait(_START_S):
                    first, error = first_to_end(progress.text), error_line(progress.text)
                    if first is not None:
                        error = f"{first}: {error}" if "rror:" in error else first
                    progress.problem = f"{error} (exit code {code})"
                return
            *lines, rest = (rest + block).split(b"\n")
            for text in lines:
                if progress.problem is None and progress.read(text.decode(errors="replace")):
                    last = time.monotonic()
                    show(f"{progress.arm} {progress.doing}".strip())
