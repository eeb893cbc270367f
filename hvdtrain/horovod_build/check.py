"""Check an installed Horovod: it imports, and two real ranks agree under each of its launchers.

Used by `install`. Every check runs in child processes, so a crash of Horovod is one failed row.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod_build import InstalledHorovod
from hvdtrain.horovod_build.build_plan import Built
from hvdtrain.system.commands import CommandResult, last_line, own_environment, run

TIME_LIMIT_S = 60.0

PROBE = """
import json, torch, horovod.torch as hvd
print("probe" + json.dumps({
    "torch": str(torch.__version__),
    "mpi": bool(hvd.mpi_built()), "gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built()),
    "gpus": torch.cuda.device_count(),
}))
"""

# Both ranks test every number. Only rank 0 prints, in one write: launchers interleave output.
ALLREDUCE = """
import os, sys, torch, horovod.torch as hvd
hvd.init()
where = f"cuda:{hvd.local_rank()}" if sys.argv[1] == "cuda" else "cpu"
values = torch.arange(1000.0, device=where) * (hvd.rank() + 1)
total = hvd.allreduce(values, op=hvd.Sum).cpu()
if hvd.size() != 2 or not torch.equal(total, torch.arange(1000.0) * 3):
    raise ValueError(f"rank {hvd.rank()} of {hvd.size()}: a wrong sum: {total[:4].tolist()}")
if hvd.rank() == 0:
    os.write(1, b"\\nhvdtrain-allreduce-ok\\n")
hvd.shutdown()
"""

LAUNCHERS = {
    "gloo": ("horovodrun", "-np", "2", "--gloo"),
    "mpi": ("mpirun", "-np", "2"),
}


class CheckFailed(HvdtrainError):
    """The installed Horovod does not import, or fails a computation."""


@dataclass(frozen=True)
class Row:
    """One line of the table: what was checked, whether it passed (None: information), details."""

    name: str
    ok: bool | None
    detail: str

    def __str__(self) -> str:
        verdict = {True: "ok      ", False: "FAILED  ", None: ""}[self.ok]
        return f"{self.name:<12} {verdict}{self.detail}".rstrip()


def probe() -> Built | str:
    """Import Horovod in a child process; return what it reports, or why it does not import."""
    done = run([sys.executable, "-c", PROBE], env=check_environment(), timeout_s=TIME_LIMIT_S)
    match = re.search(r"^probe(\{.*\})$", done.stdout, re.MULTILINE)
    if done.code != 0 or match is None:
        return _reason(done)
    return Built(**json.loads(match[1]))


def check(installed: InstalledHorovod) -> list[Row]:
    """Run every check, one after the other, and return the table."""
    built = probe()
    about = f"{installed.version}, built for torch {installed.torch}"
    if isinstance(built, str):
        return [Row("horovod", None, about), Row("import", False, built)]
    problem = installed.problem(built.torch)
    names = [name for name, has in (("Gloo", built.gloo), ("MPI", built.mpi)) if has]
    rows = [
        Row("torch", None, built.torch),
        Row("horovod", False if problem else None, problem or about),
        Row("controllers", None if names else False, ", ".join(names) or "none is built"),
        Row("gpu", None, _gpu(built)),
        Row("import", True, "horovod.torch"),
    ]
    rows += [allreduce(name) for name in LAUNCHERS if getattr(built, name)]
    # NCCL is tested once, under Gloo's launcher.
    if built.nccl and built.gloo and built.gpus >= 2:
        rows.append(allreduce("gloo", "cuda"))
    return rows


def allreduce(controller: str, device: str = "cpu") -> Row:
    """Run a sum over two ranks under the real launcher of one controller; return its row."""
    env = check_environment()
    launcher, *options = LAUNCHERS[controller]
    name = "nccl" if device == "cuda" else controller
    path = shutil.which(launcher, path=env["PATH"])
    if path is None:
        return Row(name, False, f"{launcher} is not on PATH")
    start = time.monotonic()
    command = [path, *options, sys.executable, "-c", ALLREDUCE, device]
    done = run(command, env=env, timeout_s=TIME_LIMIT_S)
    if done.code == 0 and "hvdtrain-allreduce-ok" in done.stdout:
        took = time.monotonic() - start
        return Row(name, True, f"allreduce of 2 ranks under {launcher}, {took:.1f} s")
    return Row(name, False, f"allreduce of 2 ranks under {launcher}: {_reason(done)}")


def failures(rows: list[Row]) -> str:
    """Return the names and reasons of the rows that failed; empty if none did."""
    return "; ".join(f"{row.name}: {row.detail}" for row in rows if row.ok is False)


def _gpu(built: Built) -> str:
    if not built.nccl:
        return "none, CPU operations only"
    return "NCCL" if built.gpus >= 2 else f"NCCL, not tried: it takes 2 GPUs, here are {built.gpus}"


def check_environment() -> Mapping[str, str]:
    """Return an environment in which the checks do not depend on the user or the machine.

    The shell's HOROVOD_ variables would configure the ranks. mpirun refuses more ranks than cores,
    and refuses root, unless variables allow it.
    """
    env = {k: v for k, v in own_environment().items() if not k.startswith("HOROVOD_")}
    env["OMPI_MCA_rmaps_base_oversubscribe"] = "1"
    if os.geteuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return env


def _reason(done: CommandResult) -> str:
    """Return why a child failed, in one line."""
    if done.code is None:
        return f"no end after {TIME_LIMIT_S:.0f} s"
    # horovodrun prefixes each line with its rank, and appends an error of its own.
    lines = [re.sub(r"^\[\d+\]<std(out|err)>:", "", li) for li in done.output.splitlines()]
    own = [line for line in lines if "one or more processes exited" not in line]
    return last_line("\n".join(own))
