"""One live rank of a pool: see tests/ranks.py. `python -m tests.rank SOCKET BACKEND TRANSPORT`."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import TypeVar

from hvdtrain import Backend, BackendOptions, detect, open_backend
from tests.ranks import Raised, receive, send

S = TypeVar("S")


def raised(error: BaseException) -> Raised:
    return Raised(type(error).__name__, str(error), traceback.format_exc())


def serve(address: str, opened: Callable[[], tuple[S, int]], close: Callable[[S], object]) -> None:
    """Open the subject, send the rank, then call each received function on it, until None."""
    with Client(address, "AF_UNIX") as connection:
        try:
            subject, rank = opened()
        except BaseException as error:
            send(connection, raised(error))
            raise
        send(connection, rank)
        while (call := receive(connection)) is not None:
            function, args, kwargs = call
            try:
                result = function(subject, *args, **kwargs)
            except Exception as error:
                result = raised(error)
            send(connection, result)
        try:
            close(subject)
            send(connection, None)
        except Exception as error:
            send(connection, raised(error))


def main() -> None:
    address, name, transport = sys.argv[1:]

    def opened() -> tuple[Backend, int]:
        backend = open_backend(name, detect(), BackendOptions(timeout_s=30, transport=transport))
        return backend, backend.world.rank

    serve(address, opened, lambda backend: backend.close())


if __name__ == "__main__":
    main()
