"""`python -m hvdtrain.launch.agent`: torch.distributed's agent of one host, which starts its ranks.

Started by `supervisor`, with its process id and the write ends of its pipes: stdout and stderr of
each rank, then one for the lines "[rank]<start>:" (all hosts have met) and "[rank]<exit>:code" (a
rank has failed). The line "[0]<supervisor>:" (it was killed) goes to stderr, which is ssh's.
torchrun runs the same agent with the same static rendezvous: ranks are numbered in host order.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from hvdtrain._torch.elastic_agent import ReportingAgent
from hvdtrain.launch.output import rank_folder
from hvdtrain.launch.supervisor import GRACE_S, parse
from hvdtrain.system import cores
from hvdtrain.system.processes import adopt_orphans, end_descendants, wait_for_end

PORT_IS_BUSY = 75  # EX_TEMPFAIL of sysexits.h
# How long agents wait for each other at exit: host 0's agent serves the store of all hosts.
_EXIT_BARRIER_S = 30 * 24 * 3600


class _Pipes(LogsSpecs):
    """Connects the ranks to the supervisor's pipes, given by the numbers of their write ends.

    `error_files` are those in which torch's `@record` writes the exception of each rank.
    """

    def __init__(self, ends: Sequence[int], report: int, error_files: Sequence[Path]) -> None:
        super().__init__()
        self._ends = ends
        self._report = report
        self._error_files = error_files

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return a path of each rank's stdout and stderr. torch calls it as the ranks start."""
        os.write(self._report, f"[{envs[0]['RANK']}]<start>:\n".encode())
        paths = [f"/dev/fd/{end}" for end in self._ends]
        ranks = sorted(envs)
        error_files = dict.fromkeys(ranks, "")
        for rank, file in zip(ranks, self._error_files, strict=False):
            file.parent.mkdir(parents=True, exist_ok=True)
            error_files[rank] = envs[rank]["TORCHELASTIC_ERROR_FILE"] = str(file)
        return LogsDest(
            stdouts=dict(zip(ranks, paths[::2], strict=True)),
            stderrs=dict(zip(ranks, paths[1::2], strict=True)),
            error_files=error_files,
        )

    @property
    def root_log_dir(self) -> str:
        """Return "": nothing is written to files."""
        return ""


def main(arguments: Sequence[str]) -> int:
    """Run the ranks to their end; return the exit code of the first that failed, else 0.

    If a signal killed that rank, or ended this agent, it is 128 + the signal's number.
    """
    # Not os.getppid(): the supervisor may have ended while this process imported torch.
    supervisor = int(arguments[0])
    threading.Thread(target=_end_with, args=(supervisor,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until torch handles it: no traceback
    *ends, report = (int(end) for end in arguments[1].split(","))
    options = parse(arguments[2:])
    if not options.verbose:  # the launcher says in one line what failed
        logging.disable()
    if len(options.ranks) > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    codes: list[int] = []

    def report_failure(rank: int, code: int) -> None:
        os.write(report, f"[{rank}]<exit>:{code}\n".encode())
        _continue(supervisor)
        codes.append(code)

    agent = ReportingAgent(
        _specification(options),
        _Pipes(ends, report, _error_files(options)),
        exit_barrier_timeout=_EXIT_BARRIER_S,
        on_failure=report_failure,
    )
    try:
        try:
            failed = agent.run().is_failed()
        finally:
            # From here on torch's handler would print a traceback, for a second signal, too.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
    except SignalException as error:
        end_descendants(signal.SIGKILL)
        return 128 + error.sigval
    except DistNetworkError as error:
        if "EADDRINUSE" in str(error) and options.node_rank == 0:
            return PORT_IS_BUSY
        raise
    _continue(supervisor)
    first = codes[0] if codes else int(failed)
    return first if first >= 0 else 128 - first


def _error_files(options: argparse.Namespace) -> list[Path]:
    """Return the error file of each rank of this host, none without --error-files."""
    if not options.error_files:
        return []
    size, folder = sum(options.slots), Path(options.error_files)
    return [folder / rank_folder(rank, size) / "error.json" for rank in options.ranks]


def _specification(options: argparse.Namespace) -> WorkerSpec:
    """Return what the agent starts, and where it meets the agents of other hosts."""
    address, port = options.master_addr, options.master_port
    rendezvous = RendezvousParameters(
        backend="static",
        endpoint=f"[{address}]:{port}" if ":" in address else f"{address}:{port}",
        run_id="hvdtrain",
        min_nodes=len(options.slots),
        max_nodes=len(options.slots),
        rank=options.node_rank,
        timeout=options.start_timeout,
    )
    # torch replaces ${local_rank} in the arguments of each rank.
    place = f"${{local_rank}}/{len(options.ranks)}"
    entrypoint, *arguments = cores.command(options.bind_to, place, options.command)
    return WorkerSpec(
        role="default",
        local_world_size=len(options.ranks),
        entrypoint=entrypoint,
        args=tuple(arguments),
        rdzv_handler=get_rendezvous_handler(rendezvous),
        max_restarts=0,
        monitor_interval=0.1,
        master_addr=address,
        master_port=port,
    )


def _continue(supervisor: int) -> None:
    """Continue the supervisor, if it is stopped: it must relay what has been reported."""
    with contextlib.suppress(OSError):
        os.kill(supervisor, signal.SIGCONT)


def _end_with(supervisor: int) -> None:
    """End the ranks, all that they have started, and this agent, once the supervisor has ended.

    First report it to the launcher, over stderr: ranks of other hosts fail without these ranks.
    """
    wait_for_end(supervisor)
    with contextlib.suppress(OSError):  # the launcher has ended, too
        if select.select([], [2], [], 0)[1]:  # a full pipe must not block this thread
            os.write(2, b"[0]<supervisor>:\n")
    adopt_orphans()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)  # the main thread ends this process if the ranks end before
    end_descendants(signal.SIGKILL)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # torch's teardown takes half a second
