"""`python -m hvdtrain.launch.supervisor`: run one host's agent, and leave no process behind.

`hvdtrain launch` starts one on each host, on other hosts by ssh:

    launcher  --- stdin: variables in a line of JSON,
                  SIGINT, SIGTERM; its end ends all ---------->  supervisor ---> agent ---> ranks
              <-- stdout: [rank]<stream>:line ----------------              <--- pipes ------
                  [host]<signal>:15, for its own SIGTERM

The agent is torch's; it can be killed, and its ranks lead sessions of their own. So this process
adopts the orphans of its host: every process that the ranks have started, at any depth, stays its
descendant. The supervisor ends them when the agent has exited, or 5 s after stdin was closed; stdin
is also closed when the launcher or ssh dies. If the supervisor is killed, the agent ends the ranks.
A stopped agent (SIGSTOP) is continued once a rank has ended. Imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

import psutil

from hvdtrain.system import signals
from hvdtrain.system.cores import BINDINGS
from hvdtrain.system.processes import adopt_orphans, end_descendants, is_running

GRACE_S = 5.0  # from SIGTERM to SIGKILL, once stdin has closed or the agent has ended
_RELAY_S = 5.0  # for the rest of the output, once all processes have ended
_MAX_PIECE = 1 << 16  # of a line, in bytes
_POLL_S = 1.0  # whether the agent is stopped


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of supervisor and agent, named as torchrun's, and the command."""
    parser = argparse.ArgumentParser(prog="python -m hvdtrain.launch.supervisor")
    parser.add_argument("--nproc-per-node", required=True, metavar="N,N,...", help="of every host")
    parser.add_argument("--node-rank", type=int, required=True, help="this host")
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", type=int, required=True)
    parser.add_argument("--start-timeout", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--bind-to", choices=BINDINGS, required=True)
    parser.add_argument("--error-files", metavar="DIR", help="DIR/rank.N/error.json, by @record")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    slots = [int(text) for text in options.nproc_per_node.split(",")]
    first = sum(slots[: options.node_rank])
    options.slots = slots
    options.ranks = range(first, first + slots[options.node_rank])
    return options


def main(arguments: Sequence[str]) -> int:
    """Run the agent to its end; return its exit code, 128 + number if a signal has killed it."""
    options = parse(arguments)
    os.environ.update(read_variables())

    def start(ends: Sequence[int]) -> subprocess.Popen[bytes]:
        own = [str(os.getpid()), ",".join(map(str, ends))]
        agent = subprocess.Popen(
            [sys.executable, "-m", "hvdtrain.launch.agent", *own, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=ends,
        )

        def report_signal(number: int, frame: FrameType | None) -> None:
            """Tell the launcher, which tells every supervisor: scancel signals each step of a
            job.
            """
            with contextlib.suppress(OSError):
                os.write(ends[-1], f"[{options.node_rank}]<signal>:{number}\n".encode())

        signals.set_handler(report_signal, signal.SIGTERM)
        threading.Thread(target=continue_if_stopped, args=(agent.pid,), daemon=True).start()
        return agent

    def report(code: int) -> str:
        signals.set_handler(signal.SIG_IGN, signal.SIGTERM)
        return f"[{options.node_rank}]<agent>:{code}\n" if code < 0 else ""

    heads = [f"[{rank}]<{name}>" for rank in options.ranks for name in ("stdout", "stderr")]
    return supervise(heads, start, report)


def read_variables() -> dict[str, str]:
    """Return the variables that the launcher writes to stdin, in a line of JSON."""
    found: dict[str, str] = json.loads(sys.stdin.buffer.readline() or b"{}")
    return found


def supervise(
    heads: Sequence[str],
    start: Callable[[Sequence[int]], subprocess.Popen[bytes]],
    report: Callable[[int], str],
) -> int:
    """Run a child to its end, and end all that it has started; return its exit code.

    `start` gets the write ends of the pipes whose lines are relayed, each after its head; and of
    one whose lines have marks of their own, to which the text of `report(code)` goes, too.
    """
    adopt_orphans()
    prefixes: dict[int, bytes] = {}  # by the read end of a pipe: what its lines are marked with
    ends = []
    for head in (*heads, ""):
        read, write = os.pipe()
        prefixes[read] = head.encode()
        ends.append(write)
    child = start(ends)
    for end in ends[:-1]:
        os.close(end)
    relaying = threading.Thread(target=relay, args=(prefixes,), daemon=True)
    relaying.start()
    stdin_closed = threading.Event()
    threading.Thread(target=forward_signals, args=(child.pid, stdin_closed), daemon=True).start()
    code = wait_for_child(child)
    os.write(ends[-1], report(code).encode())
    os.close(ends[-1])
    end_descendants(signal.SIGKILL if stdin_closed.is_set() else signal.SIGTERM, GRACE_S)
    relaying.join(_RELAY_S)
    return code if code >= 0 else 128 - code


def wait_for_child(child: subprocess.Popen[bytes]) -> int:
    """Wait for the child; return its exit code. Also reap adopted orphans, as init does."""
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode


def continue_if_stopped(agent: int) -> None:
    """Continue the agent when it is stopped and a rank has ended, which only the agent reports."""
    with contextlib.suppress(psutil.Error):  # the agent has ended
        process = psutil.Process(agent)
        while True:
            time.sleep(_POLL_S)
            is_stopped = process.status() == psutil.STATUS_STOPPED
            if is_stopped and not all(map(is_running, process.children())):
                process.send_signal(signal.SIGCONT)


def forward_signals(child: int, stdin_closed: threading.Event) -> None:
    """Pass on the signals that stdin names. When it closes, end the child: agent or rank."""
    with contextlib.suppress(OSError):
        for line in sys.stdin.buffer:
            if line.strip() in (b"SIGINT", b"SIGTERM"):
                os.kill(child, signal.Signals[line.strip().decode()])
    stdin_closed.set()
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(child, signal.SIGTERM)
        time.sleep(GRACE_S)  # the main thread goes on when the child has ended
        os.kill(child, signal.SIGKILL)


def relay(prefixes: dict[int, bytes]) -> None:
    """Copy what the pipes hold to stdout, each line with the mark of its pipe, until all close."""
    rest = dict.fromkeys(prefixes, b"")
    with selectors.DefaultSelector() as selector:
        for fd in prefixes:
            selector.register(fd, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, _MAX_PIECE)
                lines, rest[key.fd] = mark_lines(prefixes[key.fd], rest[key.fd] + data, not data)
                try:
                    sys.stdout.buffer.write(lines)
                    sys.stdout.buffer.flush()
                except OSError:
                    return  # the launcher has ended: stdin closes, too
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)


def mark_lines(head: bytes, text: bytes, is_end: bool) -> tuple[bytes, bytes]:
    """Return the lines of `text` after `head` and ":", and the unfinished rest.

    A piece that ends with a carriage return (a progress bar), has no end, or is too long, is a line
    after "+" instead of ":". Without a head the text is returned as it is.
    """
    if not head:
        return text, b""
    *pieces, rest = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", text)
    if is_end or len(rest) > _MAX_PIECE:
        pieces, rest = [*pieces, rest], b""
    lines = [b":" + piece if piece.endswith(b"\n") else b"+" + piece + b"\n" for piece in pieces]
    return b"".join(head + line for line in lines if line != b"+\n"), rest


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # the threads may be blocked in stdin and stdout
