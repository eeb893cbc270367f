"""Check an installed Horovod: it imports, and two real ranks agree under each of its launchers.

Used by `install`. Every check runs in child processes, so a crash of Horovod is one failed row.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator

from hvdtrain.errors import HvdtrainError
from hvdtrain.horovod_build import InstalledHorovod
from hvdtrain.horovod_build.build_plan import Built
from hvdtrain.launch.real_launchers import command_line, launch_environment
from hvdtrain.system.commands import CommandResult, last_line, run

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

LAUNCHER_OF = {"gloo": "horovodrun", "mpi": "mpirun"}


class CheckFailed(HvdtrainError):
    """The installed Horovod does not import, or fails a computation."""


def probe() -> Built | str:
    """Import Horovod in a child process; return what it reports, or why it does not import."""
    done = _run([sys.executable, "-c", PROBE])
    match = re.search(r"^probe(\{.*\})$", done.stdout, re.MULTILINE)
    if done.code != 0 or match is None:
        return _reason(done)
    return Built(**json.loads(match[1]))


def check(installed: InstalledHorovod, echo: Callable[[str], None]) -> str:
    """Run every check, one after the other, and print a row for each; return which failed and why,
    or "".
    """
    failed = []
    for name, works, text in _checks(installed):
        echo(f"{name:<12} {'ok' if works else 'FAILED':<8}{text}")
        if not works:
            failed.append(f"{name}: {text}")
    return "; ".join(failed)


def _checks(installed: InstalledHorovod) -> Iterator[tuple[str, bool, str]]:
    """Yield of each check its name, whether it passed, and details."""
    built = probe()
    if isinstance(built, str):
        yield "import", False, built
        return
    problem = installed.problem(built.torch)
    about = f"Horovod {installed.version} for torch {built.torch}: {built.parts}"
    yield "import", not problem, problem or about
    for controller in LAUNCHER_OF:
        if getattr(built, controller):
            yield controller, *_allreduce(controller, "cpu")
    # NCCL is tested once, under Gloo's launcher.
    if built.nccl and built.gloo and built.gpus >= 2:
        yield "nccl", *_allreduce("gloo", "cuda")


def _allreduce(controller: str, device: str) -> tuple[bool, str]:
    """Run a sum over two ranks under the real launcher of a controller."""
    launcher = LAUNCHER_OF[controller]
    done = _run(command_line(launcher, ["-c", ALLREDUCE, device], 2))
    works = done.code == 0 and "hvdtrain-allreduce-ok" in done.stdout
    return works, f"allreduce of 2 ranks under {launcher}" + ("" if works else f": {_reason(done)}")


def _run(command: list[str]) -> CommandResult:
    """Run a command without the shell's HOROVOD_ variables, which would configure the ranks."""
    env = {k: v for k, v in launch_environment().items() if not k.startswith("HOROVOD_")}
    return run(command, env=env, timeout_s=TIME_LIMIT_S)


def _reason(done: CommandResult) -> str:
    """Return why a child failed, in one line."""
    if done.code is None:
        return f"did not end within {TIME_LIMIT_S:.0f} s"
    # horovodrun prefixes each line with its rank, and appends an error of its own.
    noise = r"^\[\d+\]<std(out|err)>:|.*one or more processes exited.*"
    return last_line(re.sub(noise, "", done.output, flags=re.MULTILINE))
