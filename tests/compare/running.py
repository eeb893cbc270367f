"""An arm that runs: a command under the probe, which ends with the block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.compare import probe
from hvdtrain.compare.run.arm_process import ArmProcess
from hvdtrain.launch.placement import free_port
from tests.launching import clean_env


@contextmanager
def running(
    folder: Path,
    command: Sequence[object],
    env: Mapping[str, str] | None = None,
    optimizer: int = 1,
) -> Iterator[ArmProcess]:
    """Start a command, whose socket and log are in a folder of its own."""
    folder.mkdir(exist_ok=True)
    at = folder / "socket"
    settings = probe.environment(clean_env(env), at, free_port(), optimizer=optimizer)
    made = ArmProcess([*map(str, command)], settings, at, folder / "log")
    try:
        yield made
    finally:
        made.end(gently=False)
