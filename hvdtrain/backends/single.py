"""The backend of one process. It is a full backend, so that callers need no case for one rank."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from torch import Tensor

from hvdtrain.backends.base import Backend, Op, check_op
from hvdtrain.job.world import World

T = TypeVar("T")


class Single(Backend):
    """A world of one: the gradient is its own mean."""

    name: ClassVar[str] = "single"
    one_process: ClassVar[bool] = True

    @classmethod
    def launcher_problem(cls, world: World) -> str | None:
        """Refuse any world but one process."""
        if world.size > 1:
            return (
                f"{world.launcher} started {world.size} ranks, and {cls.name} is one process; "
                f"use --backend ddp"
            )
        return None

    def open(self) -> None:
        """Do nothing: there are no peers. Collective."""

    def all_reduce(self, t: Tensor, op: Op = "mean") -> Tensor:
        check_op(t, op)
        return t.clone()

    def broadcast_(self, t: Tensor, root: int = 0) -> Tensor:
        return t

    def broadcast_object(self, obj: T, root: int = 0) -> T:
        return obj

    def all_gather_object(self, obj: T) -> list[T]:
        return [obj]

    def barrier(self) -> None:
        """Return at once. Collective."""
