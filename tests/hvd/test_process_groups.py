"""Waiting for an operation, in slices."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hvdtrain.hvd.engine.process_groups import ConnectionBroken, ProcessGroups


class Work:
    """An operation of which the first waits time out; it ends right after the last of these."""

    def __init__(self, slices: int, error: str = "", timeout: str = "Operation timed out!") -> None:
        self.slices, self.error, self.timeout = slices, error, timeout

    def is_completed(self) -> bool:
        return self.slices == 0

    def wait(self, timeout: timedelta | None = None) -> None:
        if self.slices:
            self.slices -= 1
            raise RuntimeError(self.timeout)
        if self.error:
            raise RuntimeError(self.error)


@pytest.mark.parametrize("slices", [0, 1, 3])
def test_an_operation_that_ends_as_a_slice_does_has_not_failed(slices: int) -> None:
    groups = ProcessGroups(HashStore(), 0, "gloo", 5.0, lambda: None)
    groups.wait(Work(slices))
    groups.wait(Work(slices, timeout="the same in other words, as torch may have them one day"))
    for error in ("Operation timed out!", "Connection closed by peer"):
        with pytest.raises(ConnectionBroken, match=error):
            groups.wait(Work(slices, error))
    with pytest.raises(ConnectionBroken, match="rank 1 has left"):
        groups.wait(Work(2), give_up=lambda: "rank 1 has left")
