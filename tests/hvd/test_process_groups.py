"""Waiting for an operation, in slices."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hvdtrain.hvd.engine.process_groups import ConnectionBroken, ProcessGroups


class Work:
    """An operation of which the first waits time out; it ends right after the last of these."""

    def __init__(
        self, slices: int, error: str | None = None, timeout: str = "Operation timed out!"
    ) -> None:
        self.slices, self.error, self.timeout = slices, error, timeout

    def is_completed(self) -> bool:
        return self.slices == 0

    def wait(self, timeout: timedelta | None = None) -> None:
        if self.slices:
            self.slices -= 1
            raise RuntimeError(self.timeout)
        if self.error is not None:
            raise RuntimeError(self.error)


def groups(failure: str | None = None) -> ProcessGroups:
    return ProcessGroups(HashStore(), 0, "gloo", 5.0, lambda: failure)


@pytest.mark.parametrize("slices", [0, 1, 3])
def test_an_operation_that_ends_as_a_slice_does(slices: int) -> None:
    """It was taken for one that had failed, and the whole job with it."""
    groups().wait(Work(slices))
    groups().wait(Work(slices, timeout="the same in other words, as torch may have them one day"))


@pytest.mark.parametrize("slices", [0, 1])
@pytest.mark.parametrize("error", ["Operation timed out!", "Connection closed by peer"])
def test_an_operation_that_fails(slices: int, error: str) -> None:
    with pytest.raises(ConnectionBroken, match=error):
        groups().wait(Work(slices, error))


def test_nobody_waits_once_the_job_is_over() -> None:
    with pytest.raises(ConnectionBroken, match="rank 1 has gone"):
        groups("rank 1 has gone").wait(Work(2))
    with pytest.raises(ConnectionBroken, match="rank 1 has left"):
        groups().wait(Work(2), give_up=lambda: "rank 1 has left")
