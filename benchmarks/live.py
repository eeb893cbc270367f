"""Live ranks for interleaved measurements: those of `hvdtrain compare`, for any script.

Every arm is started once, by its own real launcher, and serves calls. While one arm works the
others' ranks are stopped.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from hvdtrain.compare.analysis import stats
from hvdtrain.compare.run.arm_process import ArmProcess
from hvdtrain.system import machine as host
from hvdtrain.system import provenance

START_S = 180.0
LAUNCHERS = {
    "torchrun": "torchrun --nproc-per-node {n}",
    "mpirun": "mpirun -np {n} {python}",  # binds each of two ranks to a core
    "mpirun unbound": "mpirun --bind-to none -np {n} {python}",  # as Horovod's manual has it
    "horovodrun-gloo": "horovodrun -np {n} --gloo {python}",
    "mpich": "{mpich}/mpiexec -n {n} {mpich}/python",
}
# The environment that `make` installs for the tests: mpi4py loads the MPI of its Python's prefix.
MPICH = Path(__file__).resolve().parent.parent / ".venv-mpich" / "bin"
MPICH_ENV = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if "site-packages" in path)}


@contextlib.contextmanager
def arms(
    script: str, names: dict[str, tuple[str, dict[str, str]]], ranks: int
) -> Iterator[dict[str, ArmProcess]]:
    """Start `script NAME SOCKET` for each name, under its launcher and with its own variables; end
    them all at the end.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    live: dict[str, ArmProcess] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, (launcher, own) in names.items():
                paths = {"python": sys.executable, "mpich": MPICH}
                line = LAUNCHERS[launcher].format(n=ranks, **paths).split()
                socket, log = Path(folder) / f"{len(live)}", Path(folder) / f"{len(live)}.log"
                line += [script, name, str(socket)]
                live[name] = ArmProcess(line, {**env, **own}, socket, log)
                live[name].meet(START_S)
                live[name].pause()
            yield live
        finally:
            for arm in live.values():
                arm.end(gently=sys.exc_info()[0] is None)


def serve(address: str, rank: int, size: int, calls: dict[str, Callable[..., Any]]) -> None:
    """Answer calls until the driver ends. In the ranks."""
    with Client(address, "AF_UNIX") as connection:
        connection.send_bytes(pickle.dumps((rank, size, os.getpid(), "")))
        while (call := pickle.loads(connection.recv_bytes())) is not None:
            name, *arguments = call
            connection.send_bytes(pickle.dumps((True, calls[name](*arguments))))


def write_summary(path: Path, record: dict[str, Any]) -> None:
    """Write results as JSON: see `summary_text`."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(summary_text(record))


def summary_text(record: dict[str, Any]) -> str:
    """Return results as JSON, a line for what fits in one: of three and more measurements only
    their [median, lowest, highest], of floats four digits.
    """
    return _lines(_summary(record)) + "\n"


def _summary(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _summary(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        if len(value) > 2 and all(type(item) in (int, float) for item in value):
            value = [statistics.median(value), min(value), max(value)]
        return [_summary(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _lines(value: Any, indent: str = "") -> str:
    text = json.dumps(value)
    if len(indent + text) <= 100 or not isinstance(value, dict):
        return text
    inner = f"{indent} "
    items = [f"{inner}{json.dumps(name)}: {_lines(v, inner)}" for name, v in value.items()]
    return "{\n" + ",\n".join(items) + f"\n{indent}}}"


def machine() -> dict[str, Any]:
    """Where, when and with what: what every result is stored with."""
    return {
        **vars(host.facts()),
        **provenance.versions(),
        "commit": provenance.commit(),
        "time": provenance.now(),
    }


def interval(ratios: list[float]) -> dict[str, float]:
    """The median of paired ratios, and its 95 % interval over blocks (order statistics)."""
    found = stats.ratio(dict(enumerate(ratios)), dict.fromkeys(range(len(ratios)), 1.0), {})
    limits = {"median": found.value, "low": found.low, "high": found.high}
    return {name: math.nan if value is None else value for name, value in limits.items()}
