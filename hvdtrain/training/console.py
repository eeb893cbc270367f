"""The output of a training run: lines, printed by rank 0 alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdtrain.errors import printable

if TYPE_CHECKING:
    from hvdtrain.backends.base import Backend


class Console:
    """Prints the lines of rank 0; on the other ranks nothing."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def print_line(self, text: str) -> None:
        """Print a line, at once."""
        self._backend.print(printable(text))  # some is from checkpoints that others have made


def describe(record: dict[str, Any]) -> str:
    """Return the numbers of one record in a line, with four significant digits; without `step`,
    `time` and `data_ms`. Leave out other values, such as lists and texts.
    """
    formats = {
        "lr": "lr {:.3g}",
        "samples_per_s": "{:.0f} samples/s",
        "step_ms": "{:.1f} ms/step",
        "epoch": "epoch {}",
        "loss_scale": "loss_scale {:g}",
    }
    skipped = {"step", "data_ms"}
    return "  ".join(
        formats.get(key, key + (" {:d}" if isinstance(value, int) else " {:.4g}")).format(value)
        for key, value in record.items()
        if key not in skipped and isinstance(value, (int, float))
    )
