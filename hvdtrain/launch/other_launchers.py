"""`hvdtrain launch --via`: the command line of mpirun or horovodrun for the same job.

The line replaces this process, so signals, output and exit code are the launcher's own.
Imports no torch.
"""

from __future__ import annotations

import shutil

from hvdtrain.errors import InputError
from hvdtrain.launch.launcher import Job
from hvdtrain.launch.remote import travelling

LAUNCHERS = ("torchrun", "mpirun", "horovodrun")


def command_line(via: str, job: Job, interfaces: str | None) -> list[str]:
    """Return the command line of a launcher. Raises InputError if it is not installed, or cannot
    start the ranks on these hosts.
    """
    program = shutil.which(via, path=job.env["PATH"])
    if program is None:
        raise InputError(f"--via {via}: there is no {via} on PATH")
    make = {"mpirun": _mpirun, "horovodrun": _horovodrun}[via]
    # By its absolute path: Open MPI then finds its daemon at the same path on other hosts.
    return [program, *make(job, interfaces), *job.command]


def _num_proc(job: Job) -> str:
    return str(sum(host.slots for host in job.hosts))


def _mpirun(job: Job, interfaces: str | None) -> list[str]:
    """Return the options of Open MPI's mpirun. Its default binds each of two ranks to one core."""
    line = ["-np", _num_proc(job), "-H", ",".join(map(str, job.hosts)), "--bind-to", "none"]
    line += ["--tag-output", "--mca", "plm_rsh_args", " ".join(job.remote.options())]
    if interfaces:
        line += [
            "--mca",
            "btl_tcp_if_include",
            interfaces,
            "--mca",
            "oob_tcp_if_include",
            interfaces,
        ]
    line += ["--output-filename", str(job.output)] if job.output else []
    for name in travelling(job.env, job.named):
        line += ["-x", name]
    return line


def _horovodrun(job: Job, interfaces: str | None) -> list[str]:
    """Return the options of horovodrun. Always --gloo: else horovodrun may choose mpirun, and its
    command line finds Open MPI's daemon on other hosts only if it is on the PATH of ssh.
    """
    line = ["--gloo", "-np", _num_proc(job), "-H", ",".join(map(str, job.hosts))]
    line += ["--start-timeout", f"{job.start_timeout_s:.0f}"]
    line += ["-p", str(job.remote.port)] if job.remote.port else []
    line += ["-i", job.remote.identity_file] if job.remote.identity_file else []
    line += ["--network-interfaces", interfaces] if interfaces else []
    line += ["--output-filename", str(job.output)] if job.output else []
    return line + (["--verbose"] if job.verbose else [])
