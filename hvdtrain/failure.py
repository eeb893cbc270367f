"""How a rank that fails ends the whole job: once said, named, and without leaving the others
waiting.

torchrun and horovodrun stop the other ranks when one exits with an error. Under a plain mpirun they
would wait for ever: the failed rank waits for them in MPI_Finalize, they for it in a collective.
There it must call MPI_Abort.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from hvdtrain.errors import HvdtrainError, WorldError
from hvdtrain.world import World

# Ranks that fail together speak in turn; the first to speak ends the job before the next one does.
_TURN_S = 0.5
_LONGEST_TURN_S = 3.0
# A rank that merely lost a peer lets that one say why.
_WITNESS_S = 3.0


def exit_code(error: BaseException) -> int:
    """The exit code that `error` ends a command with: see `hvdtrain.errors`."""
    if isinstance(error, HvdtrainError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        return 1
    return 1


@contextmanager
def guard(world: World) -> Iterator[None]:
    """End the job, with one report, where the block raises or exits with an error. Not collective.

    SIGTERM raises SystemExit(143) inside the block, so that what is open is closed and its end
    recorded.
    """
    previous = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        yield
    except BaseException as error:
        if exit_code(error) == 0:
            raise
        end_job(world, error)
    finally:
        signal.signal(signal.SIGTERM, previous)


def end_job(world: World, error: BaseException) -> NoReturn:
    """Report `error` as this rank's; end the process and, under MPI, the job."""
    code = exit_code(error)
    if world.size == 1:
        report(world, error)
        sys.exit(code)
    turn_s = min(_TURN_S * world.rank, _LONGEST_TURN_S)
    time.sleep(turn_s + (_WITNESS_S if isinstance(error, WorldError) else 0))
    report(world, error)
    sys.stdout.flush()
    sys.stderr.flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
    # Not sys.exit: the exit handlers of Horovod and MPI wait for the other ranks.
    os._exit(code)


def report(world: World, error: BaseException) -> None:
    """Print one line for an error of ours, the traceback for any other, with the rank, to stderr.

    What every rank knows is printed by rank 0 alone.
    """
    if isinstance(error, HvdtrainError):
        if error.everywhere and world.rank > 0:
            return
        where = "" if error.everywhere or world.size == 1 else f"[{world}] "
        text = f"{where}error: {error}\n"
    elif isinstance(error, KeyboardInterrupt):
        text = "interrupted\n" if world.rank == 0 else ""
    elif isinstance(error, SystemExit):
        text = f"[{world}] exits with code {exit_code(error)}\n" if world.size > 1 else ""
    else:
        head = f"[{world}] failed:\n" if world.size > 1 else ""
        text = head + "".join(traceback.format_exception(error))
    sys.stderr.write(text)  # one write, so that the lines of two ranks do not mix


def _on_sigterm(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)
