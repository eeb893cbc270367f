"""`python -m hvdtrain.hvd SCRIPT`: run a Horovod script with hvdtrain.hvd imported as `horovod`.

Started by users, also under torchrun, mpirun or horovodrun. `alias` provides the modules; this file
starts the script as `python` itself would, and ends the job if the script fails.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType
from typing import NoReturn

from hvdtrain.errors import InputError, LaunchError
from hvdtrain.hvd.alias import install
from hvdtrain.job.launcher_watch import end_with_launcher
from hvdtrain.job.world import World, detect, guess_world, is_mpi
from hvdtrain.liveness.failure import end_job, exit_code

USAGE = """\
usage: python -m hvdtrain.hvd SCRIPT [ARGUMENT ...]
       python -m hvdtrain.hvd -m MODULE [ARGUMENT ...]

Run a script or a module in which `import horovod.torch` gives hvdtrain.hvd. On two ranks:

  torchrun --nproc-per-node 2 -m hvdtrain.hvd SCRIPT [ARGUMENT ...]
  mpirun -np 2 python -m hvdtrain.hvd SCRIPT [ARGUMENT ...]
  horovodrun -np 2 python -m hvdtrain.hvd SCRIPT [ARGUMENT ...]
"""


def main(arguments: list[str]) -> None:
    """Run the script or module that the command line names, as `python` would.

    Exit with 2 if there is none or it cannot be run.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return
    if not arguments:
        sys.stderr.write(USAGE)
        sys.exit(2)
    try:
        run = _target(arguments)
        end_with_launcher(_world())
        install()
        run()
    except BaseException as error:
        _fail(error)


def _target(arguments: list[str]) -> Callable[[], object]:
    """Set sys.argv and sys.path for the script or module; return the function that runs it."""
    name, *rest = arguments
    if name == "-m":
        if not rest:
            raise InputError("-m needs the name of a module")
        module, *rest = rest
        sys.argv = [module, *rest]  # runpy replaces argv[0] by the file's path
        return lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)
    if name.startswith("-"):
        raise InputError(f"no such option: {name}; see python -m hvdtrain.hvd --help")
    if not os.path.isfile(name):
        raise InputError(f"no such file: {name}")
    sys.argv = arguments
    if not getattr(sys.flags, "safe_path", False):  # with -P, -m puts nothing there
        sys.path[0] = os.path.dirname(os.path.realpath(name))  # not the working directory
    return lambda: _run_file(os.path.abspath(name))


def _run_file(path: str) -> None:
    """Run a file as `__main__`, and leave it in sys.modules as `python` does.

    Exit handlers and multiprocessing's children look it up there. runpy.run_path would restore the
    previous `__main__`, and set sys.argv[0] to the full path.
    """
    main = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = SourceFileLoader("__main__", path)
    vars(main)["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _fail(error: BaseException) -> NoReturn:
    """Exit as `python` does after `error`; under MPI also end the other ranks, or they block."""
    error.__traceback__ = trace = _without_own_frames(error.__traceback__)
    world = _world()
    if trace is None and isinstance(error, ImportError | InputError):  # nothing has run
        end_job(world, InputError(str(error)))
    if exit_code(error) != 0 and world.size > 1 and is_mpi(world):
        end_job(world, error)
    if not isinstance(error, Exception):  # SystemExit, KeyboardInterrupt
        raise error
    sys.excepthook(type(error), error, error.__traceback__)
    sys.exit(1)


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without its first frames, which are of this file and runpy."""
    ours = (__file__, "<frozen runpy>", runpy.__file__)
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _world() -> World:
    """Return the launcher's world, or a guess if its variables are incomplete."""
    try:
        return detect()
    except LaunchError:
        return guess_world()


if __name__ == "__main__":
    main(sys.argv[1:])
