"""Checks of `hvdtrain doctor`: what is installed, and whether it is usable."""

from __future__ import annotations

import os
import re
import shutil
import sys

import hvdtrain
from hvdtrain.backends.engines import parse
from hvdtrain.doctor.finding import Finding
from hvdtrain.errors import BackendUnavailable, LaunchError, first_line
from hvdtrain.horovod_build import INSTALL, check, installed_horovod
from hvdtrain.job.world import World, detect
from hvdtrain.launch.real_launchers import (
    ALLOW_ROOT,
    INSTALL_COMMANDS,
    RSH_AGENT,
    launch_environment,
)
from hvdtrain.system import provenance
from hvdtrain.system.commands import last_line, own_environment, run
from hvdtrain.system.machine import gpus

_INSTALL = {
    **INSTALL_COMMANDS,
    "ssh": "apt-get install openssh-client",
}
# One rank under mpirun, as the transport starts MPI.
_MPI = """
from hvdtrain.transports.mpi_channel import init_mpi
library = init_mpi().Get_library_version().splitlines()[0].split(",")[0]
print("\\nhvdtrain-mpi", *library.split(), flush=True)
"""
_MPI_S = 60.0
COMMIT = "hvdtrain's commit"  # in `versions`, if hvdtrain is a checkout


def torch_itself(ranks: int) -> Finding:
    """Import torch, and name the versions."""
    try:
        import torch
    except (ImportError, OSError) as error:
        text = f"torch does not import: {first_line(error)}"
        return Finding("failure", text, f"{sys.executable} -m pip install torch")
    found = versions()
    commit = f" ({found[COMMIT]})" if COMMIT in found else ""
    own = f"hvdtrain {found['hvdtrain']}{commit}, Python {found['python']}"
    return Finding("ok", f"{torch.__version__}, {own}")


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all hosts of a job."""
    found = {"hvdtrain": hvdtrain.__version__, **provenance.versions()}
    if commit := provenance.commit():
        found[COMMIT] = commit
    if torch := sys.modules.get("torch"):  # with +cpu or +cu130, which the metadata may lack
        found["torch"] = str(torch.__version__)
    return found


def launch_variables(ranks: int) -> Finding:
    """Read the variables that a launcher or a cluster has set for this process."""
    try:
        world = detect()
    except LaunchError as error:
        return Finding("warning", f"training commands do not start here: {error}")
    return Finding("ok", world.source)


def launcher(name: str) -> Finding:
    """Find a launcher, or a program that launchers need."""
    path = shutil.which(name, path=own_environment()["PATH"])
    if path is not None:
        return Finding("ok", path)
    return Finding("note", f"{name} is not on the PATH", _INSTALL.get(name, ""))


def horovod(ranks: int) -> Finding:
    """Import the installed Horovod, and list its controllers."""
    import torch

    found = installed_horovod()
    if found is None:
        return Finding("note", "Horovod is not installed", INSTALL)
    if problem := found.problem(str(torch.__version__)):
        return Finding("failure", problem.rpartition(";")[0], INSTALL)
    built = check.probe()
    if isinstance(built, str):
        return Finding("failure", f"Horovod {found.version}: {built}", f"{INSTALL} --force")
    return Finding("ok", f"Horovod {found.version} for torch {found.torch}: {built.parts}")


def mpi(ranks: int) -> Finding:
    """Start one rank by mpirun, and initialise MPI there with threads."""
    engine = parse("ddp/mpi", 1, cuda=False)
    if why := engine.unavailable_reason():
        text, _, fix = why.partition("; ")
        return Finding("note", text, fix)
    command, env = engine.command(["-c", _MPI]), launch_environment()
    done = run(command, env=env, timeout_s=_MPI_S, cwd=os.getcwd())
    found = re.search(r"^hvdtrain-mpi (.*)$", done.stdout, re.MULTILINE)
    if done.code != 0 or found is None:
        how = f"did not end within {_MPI_S:.0f} s" if done.code is None else last_line(done.output)
        fix = _INSTALL["mpirun"].replace("install", "install --force-reinstall")
        return Finding("failure", f"one rank under mpirun: {how}", fix)
    text = f"{found[1]}, MPI_THREAD_MULTIPLE"
    if os.geteuid() == 0 and (missing := [name for name in ALLOW_ROOT if name not in os.environ]):
        sets = " ".join(f"{name}=1" for name in missing)
        return Finding("warning", f"{text}; mpirun refuses to run as root", f"export {sets}")
    agents = os.environ.get(RSH_AGENT, "ssh : rsh").split(":")
    if not any(shutil.which(agent.split()[0]) for agent in agents):
        why = f"{text}; mpirun refuses to start ranks without ssh, even on this host"
        return Finding("warning", why, f"{_INSTALL['ssh']}, or export {RSH_AGENT}=false")
    return Finding("ok", text)


def transport(name: str) -> Finding:
    """Check whether a transport is available; `mpi` has a check of its own."""
    import torch

    from hvdtrain import transports
    from hvdtrain.transports import page

    device = torch.device("cuda" if name == "nccl" else "cpu")
    try:
        transports.choose(name, device, World(0, 2, 0, 2, launcher="torchrun"))
    except BackendUnavailable as error:
        optional = name == "nccl"
        fix = "" if optional else "mount -t proc proc /proc"
        return Finding("note" if optional else "failure", first_line(error), fix)
    if name == "nccl":
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        return Finding("ok", f"NCCL {'.'.join(map(str, version))}")
    if name == "shm" and (why := page.unavailable()):
        why, _, fix = why.partition("; ")
        return Finding("note", f"available, with semaphores instead of C: {why}", fix)
    return Finding("ok", "available")


def gpu(ranks: int) -> Finding:
    """Compare the GPUs that the driver lists with those that torch can use."""
    import torch

    listed, usable = gpus(), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if usable:
        text = f"{usable}: {', '.join(dict.fromkeys(listed)) or torch.cuda.get_device_name(0)}"
        if usable < ranks:
            fix = f"torchrun --nproc-per-node {usable} -m hvdtrain  # or --device cpu"
            return Finding("warning", f"{text}; too few for {ranks} ranks", fix)
        return Finding("ok", text)
    if not listed:
        return Finding("note", "none")
    if torch.version.cuda is None:
        fix = f"{sys.executable} -m pip install --force-reinstall torch"
        text = f"{len(listed)} found, but torch {torch.__version__} is a CPU build"
        return Finding("warning", text, fix)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    text = f"{len(listed)} found, but torch {torch.__version__} can use none"
    if seen is not None:
        return Finding(
            "warning", f"{text}: CUDA_VISIBLE_DEVICES={seen}", "unset CUDA_VISIBLE_DEVICES"
        )
    return Finding(
        "warning", f"{text}; is the driver older than CUDA {torch.version.cuda}?", "nvidia-smi"
    )
