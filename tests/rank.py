"""One live rank of a pool: see tests/ranks.py. `python -m tests.rank SOCKET BACKEND`."""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Client

from hvdtrain import BackendOptions, detect, open_backend
from tests.ranks import Raised, receive, send


def raised(error: BaseException) -> Raised:
    return Raised(type(error).__name__, str(error), traceback.format_exc())


def main() -> None:
    address, name = sys.argv[1:]
    with Client(address, "AF_UNIX") as connection:
        try:
            backend = open_backend(name, detect(), BackendOptions(timeout_s=30))
        except BaseException as error:
            send(connection, raised(error))
            raise
        send(connection, backend.world.rank)
        while (call := receive(connection)) is not None:
            function, args, kwargs = call
            try:
                result = function(backend, *args, **kwargs)
            except Exception as error:
                result = raised(error)
            send(connection, result)
        try:
            backend.close()
            send(connection, None)
        except Exception as error:
            send(connection, raised(error))


if __name__ == "__main__":
    main()
