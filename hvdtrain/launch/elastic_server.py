"""The server of an elastic job: ranks ask for their place, rank 0 publishes its store.

Used by `elastic`; `hvdtrain.job.elastic_world` has the requests. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from hvdtrain.launch.value_server import ValueServer

_MAX_BYTES = 1 << 16


@dataclass
class RankRequest:
    """A rank that waits for its place in the next generation."""

    worker: str
    asked_at: float = field(default_factory=time.monotonic)
    reply: SimpleQueue[str | None] = field(default_factory=SimpleQueue)
    """Takes the text of the response; None closes the connection instead: the rank has exited, or
    asks again.
    """


class ElasticServer(ValueServer):
    """Serves on all interfaces at a free port until `stop`. Its threads call `ask(request)`."""

    def __init__(self, ask: Callable[[RankRequest], object]) -> None:
        self.ask = ask
        self.generation = 0
        self.is_broken = False
        """Whether the current generation has lost a rank."""
        self.update = ""
        """The change of hosts that rank 0 reads when it polls, as "timestamp,kind"; "" for none."""
        super().__init__(max_bytes=_MAX_BYTES)

    def begin(self, generation: int) -> None:
        """Start a generation: drop the values of older ones, and clear both flags."""
        self.values.clear()
        self.generation, self.is_broken, self.update = generation, False, ""

    def get(self, path: str) -> tuple[int, bytes] | None:
        """Block a request for a rank until the launcher assigns one; answer others at once."""
        if path.startswith("rank_and_size/"):
            request = RankRequest(path.partition("/")[2])
            self.ask(request)
            text = request.reply.get()
            return None if text is None else (200, text.encode())
        if path == "hosts/update":
            return 200, self.update.encode()
        return (410, b"") if self._is_over(path) else super().get(path)

    def put(self, path: str, value: bytes) -> int:
        """Store a value of the present generation."""
        return 410 if self._is_over(path) else super().put(path, value)

    def _is_over(self, path: str) -> bool:
        """Return whether a store's key is of an old generation, or of one that has lost a rank."""
        present = path == f"hvdtrain/store.{self.generation}" and not self.is_broken
        return path.startswith("hvdtrain/store") and not present
