"""The server of an elastic job: ranks ask for their place, rank 0 publishes its store.

Used by `elastic`; `hvdtrain.job.elastic_world` has the requests. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from hvdtrain.launch.value_server import ValueServer

_MAX_BYTES = 1 << 16
_STORE = "hvdtrain/store"
HOSTS_UPDATE = "hosts/update"
"""The path of the change of hosts that rank 0 reads when it polls: "timestamp,kind", or nothing."""
Reply: TypeAlias = "SimpleQueue[str | None]"
"""Takes the text of the response to a request for a rank; None closes the connection instead: the
rank has exited, or asks again.
"""


class ElasticServer(ValueServer):
    """Serves on all interfaces at a free port until `stop`. Its threads call `ask(worker, reply)`
    for a worker that requests its rank in the next generation.
    """

    def __init__(self, ask: Callable[[str, Reply], object]) -> None:
        self.ask = ask
        self.store = ""
        """The path of the current generation's store; "" once it has lost a rank."""
        super().__init__(max_bytes=_MAX_BYTES)

    def begin(self, generation: int) -> None:
        """Start a generation: drop the values of older ones, also the change of hosts."""
        self.values.clear()
        self.values[HOSTS_UPDATE] = b""
        self.store = f"{_STORE}.{generation}"

    def get(self, path: str) -> tuple[int, bytes] | None:
        """Block a request for a rank until the launcher assigns one; answer others at once."""
        if path.startswith("rank_and_size/"):
            reply: Reply = SimpleQueue()
            self.ask(path.partition("/")[2], reply)
            text = reply.get()
            return None if text is None else (200, text.encode())
        return (410, b"") if self._is_over(path) else super().get(path)

    def put(self, path: str, value: bytes) -> int:
        """Store a value of the present generation."""
        return 410 if self._is_over(path) else super().put(path, value)

    def _is_over(self, path: str) -> bool:
        """Return whether a store's key is of an old generation, or of one that has lost a rank."""
        return path.startswith(_STORE) and path != self.store
