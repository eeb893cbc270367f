"""Checks of `hvdtrain doctor`: shared memory, open files, cores and threads of this machine."""

from __future__ import annotations

import os
import resource
import tempfile

from hvdtrain.backends import descriptors_needed
from hvdtrain.doctor.finding import Finding
from hvdtrain.system.machine import cpu_quota

SHM = "/dev/shm"
_SHM_BYTES = (
    256 << 20
)  # Docker's 64 MiB are too little for DataLoader workers with batches of images
_USUAL_FILES = 1024
_MOUNT = f"mount -t tmpfs -o size=50% tmpfs {SHM}"


def shared_memory(ranks: int) -> Finding:
    """Write to /dev/shm, and read its size."""
    users = "DataLoader workers, NCCL, MPI and real Horovod share memory there"
    try:
        with tempfile.TemporaryFile(dir=SHM) as file:
            file.write(b"x")
        system = os.statvfs(SHM)
    except OSError as error:
        fix = (
            f"mount -o remount,rw,size=50% {SHM}"
            if os.path.ismount(SHM)
            else f"mkdir -p {SHM} && {_MOUNT}"
        )
        return Finding("failure", f"{SHM} cannot be written ({error.strerror}): {users}", fix)
    if not os.path.ismount(SHM):
        return Finding("warning", f"{SHM} is not a file system of its own: {users}", _MOUNT)
    size, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    text = f"{free >> 20} MiB free of {size >> 20}"
    if free >= _SHM_BYTES:
        return Finding("ok", text)
    text += f": {users}; in Docker: --shm-size=8g, in Kubernetes: emptyDir {{medium: Memory}}"
    return Finding("warning", text, f"mount -o remount,size=8g {SHM}")


def open_files(ranks: int) -> Finding:
    """Compare the limits of open files with what each rank needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = descriptors_needed(ranks)
    unlimited = resource.RLIM_INFINITY
    text = f"{soft} (at most {'unlimited' if hard == unlimited else hard}), a rank needs {needed}"
    if hard != unlimited and hard < max(needed, _USUAL_FILES):
        wanted = max(_USUAL_FILES, 2 * needed)
        fix = f"ulimit -n {wanted}"
        if os.geteuid():  # only root may raise the hard limit
            fix = f"echo '* - nofile {wanted}' | sudo tee -a /etc/security/limits.conf"
        return Finding("failure" if hard < needed else "warning", f"ulimit -n is {text}", fix)
    return Finding("ok", text)


def cores(ranks: int) -> Finding:
    """Compare the cores that this process may use, and its CPU quota, with the machine's."""
    usable, all_cores, quota = len(os.sched_getaffinity(0)), os.cpu_count() or 1, cpu_quota()
    text = f"{usable} of {all_cores}"
    if quota is not None:
        text += f", and the cgroup's quota is {quota:g}"
    available = min(usable, quota or usable)
    if quota is not None and quota < usable:
        # hvdtrain counts the cores, as OpenMP does: more threads than the quota are throttled.
        threads = max(1, int(available / ranks))
        return Finding(
            "warning", f"{text}: threads are throttled", f"export OMP_NUM_THREADS={threads}"
        )
    if available < ranks:
        allow = "OMPI_MCA_rmaps_base_oversubscribe"
        fix = "" if os.environ.get(allow) else f"export {allow}=1"
        return Finding(
            "warning", f"{text}, and {ranks} ranks: mpirun refuses more ranks than cores", fix
        )
    return Finding("ok", text)


def threads(ranks: int) -> Finding:
    """Compare OMP_NUM_THREADS with the cores."""
    usable = len(os.sched_getaffinity(0))
    share = max(1, usable // ranks)
    given = os.environ.get("OMP_NUM_THREADS", "")
    if not given:
        return Finding("ok", f"hvdtrain sets OMP_NUM_THREADS={share} for each of {ranks} ranks")
    text = f"OMP_NUM_THREADS={given}, {ranks} ranks, {usable} cores"
    if not given.isdecimal() or int(given) < 1:
        return Finding("warning", f"{text}: not a number of threads", "unset OMP_NUM_THREADS")
    if int(given) * ranks > max(usable, ranks):
        return Finding(
            "warning", f"{text}: threads wait for each other", f"export OMP_NUM_THREADS={share}"
        )
    return Finding("ok", text)
