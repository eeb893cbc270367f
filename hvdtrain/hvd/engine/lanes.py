"""Lanes, the bucket channels of optimizers: they average gradients without negotiation.

The reducers use one per optimizer. A lane is the list of buckets that all ranks have agreed on, and
a process group of its own. All ranks send all buckets in the same order in every step, so no names
need to be matched. Rank 0 only receives a message when a step begins: for the stall inspector, and
for ranks that have joined, which send zeros (`hvd.join`).

    each rank                                           rank 0
      |---- plan: this rank's parameters --------------->|  merges the plans of all ranks
      |<--- done: the merged plan -----------------------|
    all ranks: lay out the buckets, make the process group; then in every step
      |---- step (lane, set, number) ------------------->|  no answer; "shadow" to joined ranks
    all ranks: all-reduce every bucket
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hvdtrain.hvd.engine.groups import Broken, all_reduce
from hvdtrain.hvd.engine.plan import DENSE, Plan
from hvdtrain.hvd.engine.request import AVERAGE, SUM, Key, Meta, dtype_of
from hvdtrain.hvd.engine.work import Work
from hvdtrain.hvd.exceptions import HorovodInternalError

if TYPE_CHECKING:
    from hvdtrain.hvd.engine.engine import Engine

FIRST_BYTES = 1 << 20  # a small first bucket starts the communication early, as DDP's does
BUCKET_BYTES = 25 << 20
# Larger gradients are reduced in place: copying them would cost a fifth of reducing them.
IN_PLACE_BYTES = 1 << 20
# Smaller tensors are copied by one call for all of them.
SMALL_NUMEL = 16 * 1024


@dataclass
class Layout:
    """One bucket: its parameters by name, small ones first, and its size in elements.

    `in_place`: it has one parameter, whose gradient is the buffer. `flag`: its last element reports
    that a rank's set of parameters has changed.
    """

    names: list[str]
    dtype: torch.dtype
    numel: int
    in_place: bool = False
    flag: bool = False
    op: int = SUM
    device: str = "CPU"


def lay_out(plan: Plan) -> list[Layout]:
    """Divide a plan's dense parameters into buckets.

    A pure function of the plan, so all ranks get the same buckets in the same order.
    """
    op, wire, bucket_bytes, device, groups, in_place = plan.options
    group_of = {name: at for at, group in enumerate(_groups(plan, groups)) for name in group}
    layouts: list[tuple[int, Layout]] = []
    open_buckets: dict[Any, list[str]] = {}
    seen: set[str] = set()

    def numel(name: str) -> int:
        return prod(plan.shapes[name])

    def num_bytes(name: str) -> int:
        return numel(name) * _wire(plan, name, wire).itemsize

    def close(at: int, names: list[str]) -> None:
        # `at`: the bucket's place in the order of sending, that of its last parameter.
        names = sorted(names, key=lambda name: numel(name) >= SMALL_NUMEL)
        dtype = _wire(plan, names[0], wire)
        layouts.append((at, Layout(names, dtype, sum(map(numel, names)), op=op, device=device)))

    dense = [name for name in plan.names if plan.kinds[name] == DENSE]
    for at, name in enumerate(dense):
        if name in seen:
            continue
        dtype = _wire(plan, name, wire)
        if name in group_of:  # one bucket per dtype, in the place of the group's last parameter
            members = [n for n in dense if group_of.get(n) == group_of[name]]
            seen.update(members)
            for d in dict.fromkeys(_wire(plan, n, wire) for n in members):
                last = max(dense.index(n) for n in members)
                close(last, [n for n in members if _wire(plan, n, wire) == d])
        elif (
            in_place
            and num_bytes(name) >= min(IN_PLACE_BYTES, bucket_bytes)
            and dtype == dtype_of(plan.dtypes[name])
        ):
            layout = Layout([name], dtype, numel(name), in_place=True, op=op, device=device)
            layouts.append((at, layout))
        else:
            # An open bucket per dtype, closed by the parameter that makes it large enough.
            names = open_buckets.setdefault(dtype, [])
            names.append(name)
            limit = bucket_bytes if layouts else min(FIRST_BYTES, bucket_bytes)
            if sum(map(num_bytes, names)) >= limit:
                close(at, open_buckets.pop(dtype))
    for names in open_buckets.values():
        close(len(dense), names)
    ordered = [layout for _, layout in sorted(layouts, key=lambda item: item[0])]
    return _with_flag(ordered, op, device)


def _groups(plan: Plan, groups: int | list[list[str]]) -> list[list[str]]:
    """Return lists of names that are sent together; a number means that many near-equal lists."""
    if not isinstance(groups, int):
        return groups
    dense = [name for name in plan.names if plan.kinds[name] == DENSE]
    ends = [len(dense) * i // groups for i in range(groups + 1)] if groups else []
    return [dense[a:b] for a, b in zip(ends, ends[1:], strict=False) if b > a]


def _with_flag(layouts: list[Layout], op: int, device: str) -> list[Layout]:
    """Add the flag to a bucket that is copied anyway, which costs nothing, else as its own bucket.

    It must be summed; on CUDA, reading it would need a copy from the device.
    """
    for layout in layouts:
        floating = layout.dtype.is_floating_point and not layout.in_place
        if device == "CPU" and op in (AVERAGE, SUM) and floating:
            layout.flag = True
            layout.numel += 1
            return layouts
    return [Layout([], torch.float32, 1, flag=True), *layouts]


def _wire(plan: Plan, name: str, wire: str | None) -> torch.dtype:
    dtype = dtype_of(plan.dtypes[name])
    return dtype_of(wire) if wire is not None and dtype.is_floating_point else dtype


class Lane:
    """The lane of one optimizer on one rank. Its steps are numbered from 1, alike on all ranks."""

    def __init__(self, engine: Engine, name: str, set_id: int) -> None:
        self.engine = engine
        self.name = name
        self.set_id = set_id
        self.plan: Plan | None = None
        self.version = 0
        self.layouts: list[Layout] = []
        self.step = 0
        self.launched = 0
        """The last step whose buckets this rank has all sent."""
        self._members: list[int] = []
        self._running: deque[tuple[int, Any, Tensor]] = deque()
        self._connected = threading.Event()
        self._groups: dict[str, Any] = {}

    def buffer(self, layout: Layout, device: torch.device) -> Tensor:
        """Return zeros for a bucket, in the transport's own memory if it has any."""
        num_bytes = layout.numel * layout.dtype.itemsize
        transport = getattr(self._groups.get(layout.device), "transport", None)
        shared: Tensor | None = transport.allocate(num_bytes) if transport is not None else None
        if shared is not None:
            return shared.view(layout.dtype)
        return torch.zeros(layout.numel, dtype=layout.dtype, device=device)

    def ask(self, mine: Plan) -> Work:
        """Start merging the ranks' plans into a new one. Collective; does not block.

        Never raises, but returns a failed work: a rank that needs no further step may have left,
        and the current step does not need the new plan.
        """
        name = f"plan.{self.set_id}.{self.name}/{self.version + 1}"
        try:
            return self.engine.ask(name, "plan", payload=mine.to_wire(), set_id=self.set_id)
        except HorovodInternalError as error:
            work = Work(Key(self.set_id, name), Meta("plan"))
            work.fail(error)
            return work

    def has_settled(self, work: Work) -> bool:
        """Return whether `settle` would return, or raise, at once."""
        return work.done() and self._connected.is_set()

    def settle(self, work: Work) -> None:
        """Wait for the plan and its connections. Raises HorovodInternalError if plans mismatch."""
        work.wait()
        self.await_connection()

    def await_connection(self) -> None:
        """Wait for the plan's process groups. Raises HorovodInternalError once the job is over."""
        while not self._connected.wait(1.0):
            if self.engine.failure is not None:
                raise HorovodInternalError(self.engine.failure)

    def adopt(self, fields: list[Any]) -> None:
        """Switch to a new plan. Runs in the control thread, also on ranks that have joined."""
        self._connected.clear()
        self.plan = Plan.from_wire(fields)
        self._members = self.engine.sets[self.set_id]
        self.layouts = lay_out(self.plan)
        self.version += 1

    def connect(self) -> None:
        """Make the process groups. Collective; runs in the executor."""
        for device in dict.fromkeys(["CPU", *(layout.device for layout in self.layouts)]):
            if device not in self._groups:
                group = self.engine.groups.get(f"lane/{self.name}", self._members, device)
                self._groups[device] = group
        self._connected.set()

    def disconnect(self) -> None:
        """Drop the process groups, so that no reference keeps their connections open."""
        self._groups.clear()

    def begin(self) -> None:
        """Begin the next step, and report it to rank 0, which does not answer."""
        self.step += 1
        self.engine.control.send(0, ["step", self.name, self.set_id, self.step])

    def send(self, layout: Layout, flat: Tensor) -> Any:
        """Start the in-place reduction of a bucket; return the work for `wait`.

        Raises HorovodInternalError once the job is over, unless the rank that left had sent all of
        this step: then the peers still wait for this rank's part.
        """
        failure = self.engine.failure
        if failure is not None and (
            self.engine.broken is not None or self.engine.waits_in_vain(self.name, self.step)
        ):
            raise HorovodInternalError(failure)
        tensor = torch.view_as_real(flat) if flat.dtype.is_complex else flat
        try:
            work = all_reduce(self._groups[layout.device], tensor, layout.op)
        except (RuntimeError, KeyError) as error:
            raise HorovodInternalError(self.engine.news(3.0) or str(error)) from None
        self._running.append((self.step, work, flat))  # `drain` waits for it; keeps `flat` alive
        if self.engine.timeline.is_open:
            activity = self.engine.groups.activity("allreduce", layout.device)
            for name in layout.names:
                self.engine.timeline.start(f"allreduce.{name}", "allreduce")
                self.engine.timeline.activity_start(f"allreduce.{name}", activity)
        while self._running and self._running[0][1].is_completed():
            self._running.popleft()
        return work

    def wait(self, layout: Layout, work: Any) -> None:
        """Wait for a bucket of this rank's step.

        Raises HorovodInternalError if a peer is lost, or left before it had sent all of this step.
        """
        try:
            on_cuda = layout.device == "GPU"
            self.engine.groups.wait(work, on_cuda, give_up=lambda: self._in_vain(self.step))
        except Broken as error:
            self.engine.break_down(str(error))
            raise HorovodInternalError(self.engine.news(3.0) or str(error)) from None
        if self.engine.timeline.is_open:
            for name in layout.names:
                self.engine.timeline.activity_end(f"allreduce.{name}")
                self.engine.timeline.end(f"allreduce.{name}")

    def _in_vain(self, step: int) -> str | None:
        left = self.engine.waits_in_vain(self.name, step)
        return self.engine.failure if left else None

    def drain(self) -> None:
        """Wait for the buckets that all ranks have sent, before shutdown. Runs in the executor."""
        for step, work, flat in list(self._running):
            if not self.engine.waits_in_vain(self.name, step):
                if flat.is_cuda:  # NCCL would take the limit of a timed wait as the operation's own
                    while not work.is_completed() and self.engine.broken is None:
                        time.sleep(0.01)
                    continue
                try:
                    self.engine.groups.wait(work, give_up=lambda: None)
                except Broken:
                    return

    def shadow(self, step: int) -> Callable[[], None]:
        """Return a task that sends zeros in a step of the other ranks, once this rank has joined.

        The task does not wait: the others may be busy with other things between two buckets.
        """
        layouts = self.layouts  # now: a later plan may change them before the task runs
        self.step = self.launched = step

        def send_zeros() -> None:
            for layout in layouts:
                gpu = torch.device("cuda", self.engine.zeros_on)
                device = torch.device("cpu") if layout.device == "CPU" else gpu
                self.send(layout, torch.zeros(layout.numel, dtype=layout.dtype, device=device))

        return send_zeros
