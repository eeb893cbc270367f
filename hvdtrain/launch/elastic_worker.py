"""`python -m hvdtrain.launch.elastic_worker COMMAND`: run one elastic rank; end its descendants.

The counterpart of `supervisor` for elastic jobs, in which every rank comes and goes by itself: it
starts the command without an agent. The launcher writes to stdin, in this order: one line of JSON
with the variables of the rank (among them a secret, which a command line would show to others), and
the names of signals. It receives the rank's lines, and "[0]<exit>:code" when the rank has ended.
Imports no torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

from hvdtrain.launch.supervisor import GRACE_S, forward_signals, relay, wait_for_child
from hvdtrain.system.processes import adopt_orphans, end_descendants, end_with_parent


def main(command: Sequence[str]) -> int:
    """Run the command to its end, and end all that it has started; return its exit code."""
    variables = json.loads(sys.stdin.buffer.readline() or b"{}")
    if error_file := variables.get("TORCHELASTIC_ERROR_FILE"):
        os.makedirs(os.path.dirname(error_file), exist_ok=True)
    adopt_orphans()
    prefixes: dict[int, bytes] = {}
    ends = []
    for head in (b"[0]<stdout>", b"[0]<stderr>", b""):
        read, write = os.pipe()
        prefixes[read] = head
        ends.append(write)
    rank = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=ends[0],
        stderr=ends[1],
        env={**os.environ, **variables},
        start_new_session=True,
        preexec_fn=end_with_parent,  # no thread has been started yet
    )
    os.close(ends[0])
    os.close(ends[1])
    relaying = threading.Thread(target=relay, args=(prefixes,), daemon=True)
    relaying.start()
    stdin_closed = threading.Event()
    threading.Thread(target=forward_signals, args=(rank.pid, stdin_closed), daemon=True).start()
    code = wait_for_child(rank)
    os.write(ends[2], f"[0]<exit>:{code}\n".encode())
    os.close(ends[2])
    end_descendants(signal.SIGKILL if stdin_closed.is_set() else signal.SIGTERM, GRACE_S)
    relaying.join(GRACE_S)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # the threads may be blocked in stdin and stdout
