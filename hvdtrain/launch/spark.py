"""`horovod.spark` on hvdtrain: `run`, whose ranks are tasks of Spark.

For programs that were written for Horovod's; also as `import horovod.spark`, where `horovod` means
hvdtrain.hvd. Spark is an extra: `pip install 'hvdtrain[spark]'`. All tasks form one barrier
stage: Spark starts all of them together, or none. Each runs its rank in a process of its own:

    driver                                    task of Spark
    barrier stage of num_proc tasks      ->   all-gather ports and GPUs; start the rank
                                         <-   PUT place/RANK, output/RANK/stdout ..., exit/RANK
                                              rank: GET call, PUT result/RANK (`function_call`)
    first error                          ->   cancel the stage: Spark ends its tasks and ranks

Horovod's estimators, and elastic jobs, are not here.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TextIO

from hvdtrain.errors import InputError, LaunchError, WorldError, first_line
from hvdtrain.job import job_secret
from hvdtrain.launch.event_loop import RankFailed
from hvdtrain.launch.function_call import Call, CallServer, rank_main
from hvdtrain.launch.output import RankOutput
from hvdtrain.launch.remote import interface_variables

try:
    from pyspark import InheritableThread, SparkContext
except ImportError as error:
    why = f"horovod.spark needs Spark: pip install 'hvdtrain[spark]' ({error})"
    raise ImportError(why) from None

_START_S = 600
_END_S = 60.0  # until Spark has ended the tasks of a cancelled stage
_CAUSE_S = 5.0  # Spark may report a dead task after other ranks report the lost peer


def run(
    fn: Callable[..., Any],
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    start_timeout: int | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Any = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `num_proc` ranks in tasks of Spark; return results by rank.

    `fn` calls `hvd.init()`. `num_proc` defaults to `spark.default.parallelism`. All tasks must have
    started within `start_timeout` seconds (HOROVOD_SPARK_START_TIMEOUT, 600). `env` is added to the
    environment of the ranks; their output is printed here, or to `stdout` and `stderr`, marked with
    the rank. `nics` are network interfaces, `executable` is the Python to run.

    Raises RuntimeError with the traceback of the first rank to raise, RankFailed for one that was
    killed, WorldError if Spark has lost a task, LaunchError if the tasks do not start, InputError
    without a SparkContext. The other ranks are then ended.
    """
    context = SparkContext._active_spark_context
    if context is None:
        raise InputError("no SparkContext is active; call SparkSession.builder.getOrCreate()")
    if use_mpi:
        raise InputError("use_mpi=True: Spark starts the ranks, not MPI; leave it out")
    if extra_mpi_args or prefix_output_with_timestamp:
        warnings.warn("extra_mpi_args and timestamps of the output are ignored", stacklevel=2)
    size = context.defaultParallelism if num_proc is None else num_proc
    output = RankOutput(None, streams={"stdout": stdout, "stderr": stderr})
    server = _Server((fn, tuple(args), dict(kwargs)), output)
    address = context.getConf().get("spark.driver.host") or "127.0.0.1"
    variables = {**interface_variables(nics), **(env or {}), **job_secret.variable_of({})}
    variables |= server.variable(address)
    group = f"hvdtrain-{uuid.uuid4().hex}"

    def run_stage() -> None:
        def run_task(_: Any) -> list[None]:  # sent by value: its module would import torch
            from hvdtrain.launch.spark_task import run_rank

            run_rank(program, variables, executable)
            return []

        program = rank_main()
        try:
            context.setJobGroup(group, f"hvdtrain: {size} ranks", interruptOnCancel=True)
            context.parallelize(range(size), size).barrier().mapPartitions(run_task).collect()
        except Exception as error:
            server.stage_error = error
        server.put("stage", b"")

    stage = InheritableThread(target=run_stage)
    try:
        stage.start()
        timeout_s = start_timeout or int(os.environ.get("HOROVOD_SPARK_START_TIMEOUT", _START_S))
        if not server.wait(lambda: len(server.below("place")) == size, timeout_s):
            count = len(server.below("place"))
            raise LaunchError(
                f"{count} of {size} tasks have started within {timeout_s} s; the "
                f"ranks need {size} free slots of Spark at a time, or a longer start_timeout"
            )
        server.wait(lambda: server.cause() or server.below("lost/0"))
        server.wait(server.cause, _CAUSE_S)
        server.raise_first()
        return server.results(size)
    finally:
        with contextlib.suppress(Exception):  # the context has been stopped, or its JVM has died
            context.cancelJobGroup(group)
            stage.join(_END_S)
        server.stop()
        output.close()


class _Server(CallServer):
    """Prints what the ranks write, and waits for what they report; "stage" is its end."""

    def __init__(self, call: Call, output: RankOutput) -> None:
        super().__init__(call)
        self._output = output
        self.stage_error: Exception | None = None
        """Spark's."""
        self._has_changed = threading.Condition()
        self._printing = threading.Lock()  # a terminal may block it, the values must not wait

    def put(self, path: str, value: bytes) -> int:
        """Store a value; print a piece of output."""
        kind, _, rest = path.partition("/")
        if kind == "output":
            rank, stream = rest.split("/")
            with self._printing:
                for line in value.splitlines(keepends=True):
                    self._output.print(rank, stream, line, "")
            return 200
        with self._has_changed:
            self._has_changed.notify()
            return super().put(path, value)

    def wait(self, is_met: Callable[[], object], timeout_s: float | None = None) -> object:
        """Wait for a condition, or the end of the stage; return a false value after the timeout."""
        with self._has_changed:
            return self._has_changed.wait_for(lambda: is_met() or "stage" in self.values, timeout_s)

    def cause(self) -> Exception | None:
        """Return the first failure of a rank for another reason than a lost peer."""
        lost, text = self.below("lost/0"), self.error_of(None)
        codes = {rank: int(value) for rank, value in self.below("exit").items() if int(value)}
        # A rank that was killed is the cause, even if those that have lost it report it first.
        for rank, code in sorted(codes.items(), key=lambda each: each[1] >= 0):
            if code < 0 or not (text or rank in lost):
                host, _ = json.loads(self.values[f"place/{rank}"])
                return RankFailed(f"rank {rank} on {host}", code, int(rank))
        return RuntimeError(text) if text else None

    def raise_first(self) -> None:
        """Raise the first failure of a rank, else the error of Spark, else the first lost peer."""
        if cause := self.cause():
            raise cause
        if error := self.stage_error:
            text = str(error)
            # The first sentence of the innermost exception that a Java exception's text names.
            named = re.findall(r"^[:\w. ]+(?:Exception|Error): .*", text, re.MULTILINE)
            why = named[-1].lstrip(": ").split(". ")[0] if named else first_line(error)
            task = re.search(r"ResultTask\(\d+, (\d+)\)", text)
            for rank, value in self.below("place").items():
                host, partition = json.loads(value)
                if task and partition == int(task[1]):
                    raise WorldError(f"rank {rank} on {host} died: {why}") from error
            raise LaunchError(f"Spark has ended the stage: {why}") from error
        for rank in self.below("lost/0"):
            raise RuntimeError(self.error_of(int(rank)))
