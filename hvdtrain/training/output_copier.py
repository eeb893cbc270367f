"""A program that copies the output of a rank, line by line, into the rank's log.

`--rank-logs` starts it by its path, without hvdtrain or torch:

    python -IS output_copier.py LOG PREFIX IN:OUT ...

It writes "ready" when it has begun. Then it reads each pipe IN to its end, passes the bytes on to
the file descriptor OUT, and appends them to LOG, each line after PREFIX. It is a process of its
own, so that it also writes the last output of a rank that crashes or is killed.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import sys


def copy(log: int, prefix: bytes, outputs: dict[int, int]) -> None:
    """Copy until all pipes are closed. `outputs`: the file descriptor of each pipe's output."""
    rests = dict.fromkeys(outputs, b"")  # of each pipe, the line that has not ended
    with selectors.DefaultSelector() as selector:
        for pipe in outputs:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                pipe = key.fd
                data = os.read(pipe, 1 << 16)
                if data:
                    _write(outputs[pipe], data)
                else:
                    selector.unregister(pipe)
                    data = b"\n" if rests[pipe] else b""
                *lines, rests[pipe] = (rests[pipe] + data).split(b"\n")
                _write(log, b"".join(prefix + line + b"\n" for line in lines))


def _write(fd: int, data: bytes) -> None:
    """Write all bytes. A closed terminal or a full disk must not stop the rank."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]


if __name__ == "__main__":
    pairs = (pair.split(":") for pair in sys.argv[3:])
    opened = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
    os.write(1, b"ready\n")
    copy(opened, os.fsencode(sys.argv[2]), {int(pipe): int(output) for pipe, output in pairs})
