"""Fork Python programs from a process that has imported torch: 1.5 s of CPU less for each.

`warm(command)` replaces, in a command, the interpreter by a small client; so too torchrun,
horovodrun and hvdtrain, which are Python scripts. The client sends its arguments, environment,
working folder and stdio to the fork server; the server forks, and the child runs the program as
Python would. What the program starts by `sys.executable`, as torchrun starts ranks, is forked too.
So are torchrun, horovodrun and hvdtrain, which it finds on PATH.

    test -- subprocess --> client -- Unix socket --> fork server -- fork --> keeper
                                                                               | fork
                           signals ------------- the same socket -----------> program
                           <--------------------------------------------- its exit code

A child enters the network and mount namespaces of its client (`ip netns exec HOST python ...`).
The client lives as long as the program and ends as it does, so a launcher or a test that waits for
it, or kills it, sees no difference. What does differ: the program's parent is its keeper, its
/proc/PID/environ is the server's, and all ranks have the same hash seed. Tests of starting, ending,
importing and of signals therefore start real processes.

It stays for what it saves: eight tests of launch/test_rendezvous.py with 18 processes take 8 s of
CPU (20 s on two busy cores) with it, and 35 s (70 s) without, where `warm` returns its argument.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import psutil

from tests.launching import BIN, ROOT, clean_env, command_of

SCRIPTS = ("torchrun", "horovodrun", "hvdtrain")  # that a command names without a path
# Modules that most ranks import. No module that is run by `-m`: Python would warn.
IMPORTED = (
    "torch",
    "torch._dynamo",  # the first optimizer imports it
    "torch.distributed.run",
    "torch.nn.parallel",
    "click",
    "sklearn.datasets",
    "hvdtrain.cli",
    "hvdtrain.hvd",
    "hvdtrain.tasks",
    "hvdtrain.transports",
    "tests.ranks",
)
# Read by libraries as they are loaded: a program with other values gets a new interpreter. Not so
# for what a child can still change, and for what scikit-learn sets at its import.
AT_IMPORT = ("ATEN_", "GOMP_", "KMP_", "LD_", "MKL_", "OPENBLAS_", "PYTHON", "TORCH_CPP_")
NOT_AT_IMPORT = ("PYTHONPATH", "MKL_NUM_THREADS", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")

CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys

read = (name for name in os.environ if name.startswith({prefixes!r}) and name not in {others!r})
at_import = {{name: os.environ[name] for name in read}}
arguments = sys.argv[1:]
if (name := os.path.basename(sys.argv[0])) != "python":
    arguments.insert(0, f"{folder}/{{name}}")
given = list(arguments)
while arguments[:1] == ["-u"]:
    del arguments[0]
option = arguments[0] if arguments else ""
if at_import != {values!r} or (option not in ("-m", "-c") and not os.path.isfile(option)):
    os.execv({python!r}, [{python!r}, *given])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [request], [0, 1, 2])
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
status = server.recv(4)
if not status:
    os._exit(70)  # the server has ended
code = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def warm(command: Iterable[str | Path]) -> list[str]:
    """Return the command with its Python programs forked from one server, which this starts."""
    client = _client()
    replaced: list[str] = []
    for part in map(str, command):
        if part in SCRIPTS and replaced[-1:] != ["-m"]:
            replaced += [client, str(BIN / part)]
        else:
            replaced.append(client if part in (sys.executable, "python") else part)
    return replaced


_running: list[tuple[subprocess.Popen[bytes], tempfile.TemporaryDirectory[str], str]] = []


def _client() -> str:
    """Start the server at the first call; return the path of the client program."""
    if not _running:
        folder = tempfile.TemporaryDirectory(prefix="hvdtrain-fork-")
        address, client = f"{folder.name}/socket", Path(folder.name, "python")
        env = clean_env()
        read = (n for n in env if n.startswith(AT_IMPORT) and n not in NOT_AT_IMPORT)
        values = {name: env[name] for name in read}
        client.write_text(
            CLIENT.format(
                python=sys.executable,
                folder=BIN,
                prefixes=AT_IMPORT,
                others=NOT_AT_IMPORT,
                values=values,
                address=address,
            )
        )
        client.chmod(0o700)
        for name in SCRIPTS:
            client.with_name(name).symlink_to(client)
        line = [sys.executable, "-m", "tests.forkserver", address, str(client)]
        server = subprocess.Popen(
            line,
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,  # the server ends when this process does
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n", "the fork server did not start: see above"
        _running.append((server, folder, str(client)))
        atexit.register(stop)
    return _running[0][2]


def stop() -> None:
    """End the server and all its programs, if it runs."""
    while _running:
        server, folder, _ = _running.pop()
        assert server.stdin is not None
        server.stdin.close()
        try:
            server.wait(10)
        finally:
            server.kill()
            if server.stdout is not None:
                server.stdout.close()
            folder.cleanup()


# The server


def _serve(address: str, executable: str) -> Any:
    """Fork a keeper and a program for each request: return its arguments in the program. Return
    None when stdin closes.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the keepers
    print("ready", flush=True)
    while select.select([listener, sys.stdin], [], [])[0] == [listener]:
        client, _ = listener.accept()
        if os.fork():
            client.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        request, stdio, _, _ = socket.recv_fds(client, 1 << 20, 3)
        if not request:  # the client has gone
            os._exit(0)
        if pid := os.fork():
            _keep(pid, client, stdio)
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4)
        client.close()
        arguments, environment, folder = json.loads(request)
        _join_namespaces(int.from_bytes(credentials, sys.byteorder))
        _become(environment, folder, stdio, executable)
        return arguments
    return None


def _keep(pid: int, client: socket.socket, stdio: list[int]) -> NoReturn:
    """Pass signals on from the client to its program, and the program's end to the client. Kill the
    program when the client ends, or the test session: stdin closes.
    """
    for fd in stdio:
        os.close(fd)
    pidfd = os.pidfd_open(pid)
    while pidfd not in (ready := select.select([pidfd, client, sys.stdin], [], [])[0]):
        numbers = b"" if sys.stdin in ready else client.recv(64)
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)
        if not numbers:
            break
    _, status = os.waitpid(pid, 0)
    _kill(pid)  # the rest of its process group
    with contextlib.suppress(OSError):
        client.sendall(status.to_bytes(4, "little"))
    os._exit(0)


def _kill(group: int) -> None:
    """Kill what is left of a program's process group, but for multiprocessing's resource tracker.

    The tracker ends by itself after the others, and then removes their semaphores.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while True:
            os.killpg(group, 0)  # it raises when nothing is left, which is the usual case
            left = 0
            for pid in psutil.pids():
                with contextlib.suppress(ProcessLookupError):
                    in_group = os.getpgid(pid) == group and command_of(pid)  # and no zombie
                    if in_group and "resource_tracker" not in in_group:
                        os.kill(pid, signal.SIGKILL)
                        left += 1
            if not left:
                return


# The child


def _join_namespaces(pid: int) -> None:
    """Move this process into the network and mount namespaces of another, if they differ."""
    for kind in ("net", "mnt"):
        theirs = f"/proc/{pid}/ns/{kind}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{kind}"):
            with open(theirs) as file:
                if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter {theirs}")


def _become(environment: dict[str, str], folder: str, stdio: list[int], executable: str) -> None:
    """Make this forked process what a process of this environment, folder and stdio is."""
    import random

    import numpy as np
    import torch

    os.setsid()
    for target, fd in enumerate(stdio):
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(folder)
    ours, theirs = (env.get("PYTHONPATH", "") for env in (os.environ, environment))
    for part in filter(None, ours.split(os.pathsep)):
        sys.path.remove(part)
    sys.path[1:1] = filter(None, theirs.split(os.pathsep))
    os.environ.clear()
    os.environ.update(environment)
    warm_first = f"{Path(executable).parent}{os.pathsep}"
    path = environment.get("PATH", "")
    os.environ["PATH"] = warm_first + path.removeprefix(warm_first)
    sys.executable = executable
    random.seed()
    np.random.seed()
    if threads := environment.get("MKL_NUM_THREADS", environment.get("OMP_NUM_THREADS")):
        torch.set_num_threads(int(threads))


def _run(arguments: list[str]) -> Any:
    """Run `-m MODULE ARGUMENTS`, `-c CODE ARGUMENTS` or `SCRIPT ARGUMENTS` as __main__."""
    import runpy

    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = ["-m", *arguments[2:]]
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    elif arguments[0] == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _run_to_its_end(arguments: list[str]) -> NoReturn:
    """Run as `_run` does, and end as Python does, but for the teardown of modules.

    An exception is reported without this module's frames.
    """
    code: Any = None
    interrupted = False
    try:
        _run(arguments)
    except SystemExit as end:
        code = end.code
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # which the teardown would do
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)  # the teardown would touch, and so copy, all the server's memory


if __name__ == "__main__":
    import gc

    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    if arguments := _serve(*sys.argv[1:]):
        _run_to_its_end(arguments)
