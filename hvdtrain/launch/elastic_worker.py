"""`python -m hvdtrain.launch.elastic_worker COMMAND`: run one elastic rank; end its descendants.

The counterpart of `supervisor` for elastic jobs, in which every rank comes and goes by itself: it
starts the command without an agent. The launcher writes to stdin, in this order: one line of JSON
with the variables of the rank (among them a secret, which a command line would show to others), and
the names of signals. It receives the rank's lines, and "[0]<exit>:code" when the rank has ended.
Imports no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from hvdtrain.launch.supervisor import read_variables, supervise
from hvdtrain.system.processes import end_with_parent


def main(command: Sequence[str]) -> int:
    """Run the command to its end, and end all that it has started; return its exit code."""
    variables = read_variables()
    if error_file := variables.get("TORCHELASTIC_ERROR_FILE"):
        os.makedirs(os.path.dirname(error_file), exist_ok=True)

    def start(ends: Sequence[int]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=ends[0],
            stderr=ends[1],
            env={**os.environ, **variables},
            start_new_session=True,
            preexec_fn=end_with_parent,  # no thread has been started yet
        )

    return supervise(["[0]<stdout>", "[0]<stderr>"], start, lambda code: f"[0]<exit>:{code}\n")


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # the threads may be blocked in stdin and stdout
