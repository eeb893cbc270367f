"""Call a function in several processes of this host, started by torch.distributed's launcher.

Used by `runner.run`. The processes receive the call and return its results in files of a temporary
folder: `call`, then `RANK.result` or `RANK.error` of every rank.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle

from hvdtrain.hvd.alias import install, installed
from hvdtrain.system import signals
from hvdtrain.system.files import write_atomically
from hvdtrain.system.processes import wait_for_end

# Once a rank has failed, the time between SIGTERM and SIGKILL for the other ranks.
_SHUTDOWN_S = 5


def run_job(
    call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]],
    num_proc: int,
    executable: str,
    output: str | None,
    variables: Mapping[str, str],
) -> list[Any]:
    """Make the call (function, arguments, keywords) on every rank; return the results by rank.

    `variables` are environment variables of the ranks. See `hvdtrain.hvd.runner.run`.
    """
    data = _dumps(call, "the function and its arguments")
    temporary = tempfile.TemporaryDirectory(prefix="hvdtrain-run-", ignore_cleanup_errors=True)
    with _own_signals(), temporary as name:
        folder = Path(name)
        (folder / "call").write_bytes(data)
        _launch(folder, num_proc, executable, output, variables)
        paths = [folder / f"{rank}.result" for rank in range(num_proc)]
        return [cloudpickle.loads(path.read_bytes()) for path in paths]


def _launch(
    folder: Path, num_proc: int, executable: str, output: str | None, variables: Mapping[str, str]
) -> None:
    """Run the ranks until they exit; their results are then in `folder`. Raises RuntimeError."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_proc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        shutdown_timeout=_SHUTDOWN_S,
        local_addr="localhost",
        logs_specs=_logs(folder, num_proc, output),
        log_line_prefix_template="[${rank}]:",
    )
    # A command, not a function: multiprocessing would import the caller's script once more.
    command = ["-c", _start_text(), str(folder), str(os.getpid())]
    try:
        with _environment(variables), warnings.catch_warnings():
            # torch leaves the log files of successful ranks open, for the garbage collector.
            warnings.simplefilter("ignore", ResourceWarning)
            elastic_launch(config, executable)(*command)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        raise RuntimeError(_failure(folder, codes)) from None
    if missing := [r for r in range(num_proc) if not (folder / f"{r}.result").exists()]:
        raise RuntimeError(f"rank {missing[0]} ended without returning from the function")


def _start_text() -> str:
    """Return a rank's `python -c` program: it takes over our sys.path, then calls `_rank_main`."""
    paths = [os.path.abspath(path) for path in sys.path]
    return (
        f"import sys; sys.path[:] = {json.dumps(paths)}; "
        f"from hvdtrain.hvd.job import _rank_main; _rank_main({installed()})"
    )


def _rank_main(alias: bool) -> None:
    """Run one rank: make the call that the folder holds, and write the result or error there."""
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    sys.argv = [""]
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    rank = os.environ["RANK"]
    try:
        if alias:
            install()
        func, args, kwargs = cloudpickle.loads((folder / "call").read_bytes())
        result = _dumps(func(*args, **kwargs), "the result")
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise
        trace = error.__traceback__
        if trace and trace.tb_next:  # without the frame of this file: it begins at the user's
            error.__traceback__ = trace.tb_next
        text = "".join(traceback.format_exception(error))
        write_atomically(folder / f"{rank}.error", json.dumps([time.time(), text]), sync=False)
        sys.exit(1)
    write_atomically(folder / f"{rank}.result", result, sync=False)


def _end_with(parent: int) -> None:
    """Kill this rank once the process that started the job has died. Runs in a daemon thread."""
    wait_for_end(parent)
    os.kill(os.getpid(), signal.SIGKILL)


def _failure(folder: Path, codes: Mapping[int, int]) -> str:
    """Return which rank failed first, and its exit code, signal or traceback."""
    errors = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.error")}
    killed = {rank: code for rank, code in codes.items() if rank not in errors}
    # The launcher stops the other ranks by SIGTERM, so any other exit marks the rank that failed.
    first = min(killed, key=lambda rank: (killed[rank] == -signal.SIGTERM, rank), default=None)
    if first is not None and (not errors or killed[first] != -signal.SIGTERM):
        code = killed[first]
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        return f"rank {first} {how}"
    rank = min(errors, key=lambda rank: float(errors[rank][0]))
    return f"rank {rank} failed:\n{errors[rank][1]}"


def _logs(folder: Path, num_proc: int, output: str | None) -> Any:
    """Return where torch sends the ranks' output: to ours, and to the folder `output` if given."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, LogsDest, Std

    # Without a log_dir torch makes a temporary folder and never removes it.
    if output is None:
        return DefaultLogsSpecs(log_dir=str(folder / "logs"))
    target = Path(output)

    class Logs(DefaultLogsSpecs):
        """Names the files as Horovod does: rank.RANK/stdout and stderr."""

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            dest = super().reify(envs)
            width = len(str(num_proc - 1))
            for kind in ("stdout", "stderr"):
                paths: dict[int, str] = {}
                for rank in range(num_proc):
                    path = target / f"rank.{rank:0{width}d}" / kind
                    path.parent.mkdir(parents=True, exist_ok=True)
                    paths[rank] = str(path)
                getattr(dest, f"{kind}s").update(paths)
                getattr(dest, f"tee_{kind}s").update(paths)
            return dest

    return Logs(log_dir=str(folder / "logs"), tee=Std.ALL)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the ranks; then restore our environment, whatever torch has set."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore the signal handlers that torch's launcher replaces; resend the signal it caught."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    caught = None
    try:
        with signals.restored(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            yield
    except SignalException as error:
        caught = error.sigval
    if caught is not None:
        os.kill(os.getpid(), caught)
        raise RuntimeError(f"the ranks were ended by {caught.name}")  # if our handler returns


def _dumps(value: object, what: str) -> bytes:
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise ValueError(f"{what} cannot be pickled: {error}") from error
