"""BucketChannel: averages the gradients of one optimizer without negotiation.

The reducer of an optimizer uses one. It has the buckets that all ranks have agreed on and
process groups of its own. In every step all ranks send all buckets in the same order, so no names
need to be matched. Rank 0 receives one message per step and rank: for the stall inspector, and for
ranks that have joined, which send zeros (`hvd.join`).

    each rank                                           rank 0
      |---- exchange: this rank's proposal of a plan --->|
      |<--- exchanged: the proposals of all ranks -------|
    all ranks: merge them, lay out the buckets, make the process groups; then in every step
      |---- step (channel, set, number) ---------------->|  no answer; "send_zeros" to joined
    all ranks: all-reduce every bucket
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hvdtrain.hvd.engine.engine import Engine
from hvdtrain.hvd.engine.gpu import await_event, record_event
from hvdtrain.hvd.engine.operation import GLOBAL_SET
from hvdtrain.hvd.engine.process_groups import ConnectionBroken, all_reduce
from hvdtrain.hvd.exceptions import HorovodInternalError
from hvdtrain.hvd.gradients.plan import (
    UNLIKE_ORDER,
    BucketLayout,
    BucketPlan,
    lay_out,
    merge_plans,
    orders_differ,
)

BUILT = itertools.count()
"""Numbers this process's optimizers and channels in the order in which they are made."""


class Channels:
    """The channels of one engine, by name. Its methods are `engine.BucketChannels`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._channels: dict[str, BucketChannel] = {}
        self._num_made: Counter[str] = Counter()  # by the parameters that they are for

    def claim(self, kind: str, set_id: int, built: int) -> BucketChannel:
        """Return the channel of an optimizer that begins its first step: that of the next number.

        If this rank had joined when its peers began to use the optimizer, the channel exists
        already. `built`: the optimizer's number in `BUILT`. Raises HorovodInternalError if the
        peers' optimizer cannot be this one.
        """
        with self._engine.lock:
            alike = [c for c in self._channels.values() if c.name.rpartition(".")[0] == kind]
            waiting = (c for c in alike if c.owner is None and c.made > built)
            channel = next(waiting, None) or self._get(f"{kind}.{self._num_made[kind] + 1}", set_id)
            channel.follows = {c.name: c.owner < built for c in alike if c.owner is not None}
            channel.owner = built
        if channel.plan is not None and orders_differ(channel.plan.follows, channel.follows):
            raise HorovodInternalError(UNLIKE_ORDER)
        return channel

    def _get(self, name: str, set_id: int) -> BucketChannel:
        with self._engine.lock:
            if name not in self._channels:
                kind, _, number = name.rpartition(".")
                self._num_made[kind] = max(self._num_made[kind], int(number))
                self._channels[name] = BucketChannel(self._engine, name, set_id)
            return self._channels[name]

    def _all(self) -> list[BucketChannel]:
        with self._engine.lock:
            return list(self._channels.values())

    def adopt(self, set_id: int, name: str, proposals: list[str]) -> str | None:
        """Use the plan that follows from the ranks' proposals; return why there is none."""
        plan = merge_plans(proposals)
        if isinstance(plan, str):
            return plan
        self._get(name, set_id).adopt(plan)
        return None

    def send_zeros(self, name: str, step: int) -> None:
        """Make the executor send zeros in a step of the other ranks: this one has joined."""
        self._get(name, GLOBAL_SET).send_zeros(step)

    def tensors(self, name: str) -> list[str]:
        """Return the names of a channel's gradients."""
        channel = self._channels.get(name)
        return [] if channel is None or channel.plan is None else [*channel.plan.gradients]

    def sent_steps(self) -> dict[str, int]:
        """Return the last step that this rank has sent as a whole, by channel."""
        return {channel.name: channel.last_sent_step for channel in self._all()}

    def remove(self, matches: Callable[[str, int], bool]) -> None:
        """Remove the channels of which `matches(name, set_id)`."""
        for channel in self._all():
            if matches(channel.name, channel.set_id):
                with self._engine.lock:  # a caller may be looking for its channel
                    self._channels.pop(channel.name, None)
                self._engine.executor.put(channel.close)

    def drain(self) -> None:
        """Wait for the buckets that all ranks have sent, before shutdown. Runs in the executor."""
        for channel in self._all():
            channel.drain()

    def disconnect(self) -> None:
        """Drop all connections."""
        for channel in self._all():
            channel.disconnect()


class SentBucket(NamedTuple):
    """A bucket whose reduction has begun. `sent_us`: when, for the timeline."""

    layout: BucketLayout
    step: int
    flat: Tensor
    work: Any
    sent_us: int | None


class BucketChannel:
    """One optimizer's buckets on one rank. Its steps are numbered from 1, alike on all ranks."""

    def __init__(self, engine: Engine, name: str, set_id: int) -> None:
        self.engine = engine
        self.name = name
        self.set_id = set_id
        self.made = next(BUILT)
        self.owner: int | None = None  # this rank's optimizer, by its number of BUILT
        self.follows: dict[str, bool] = {}  # see `BucketPlan`
        self.plan: BucketPlan | None = None
        self.layouts: list[BucketLayout] = []
        self.gpus: list[int] = []  # of this rank: see `PlannedGradient`
        self.step = 0
        self.last_sent_step = 0  # the last one whose buckets this rank has all sent
        self._members: list[int] = []
        self._in_flight: deque[SentBucket] = deque()
        self._connected = threading.Event()
        self._groups: dict[str, Any] = {}
        self._label = f"channel/{name}"

    def buffer(self, layout: BucketLayout, device: torch.device) -> Tensor:
        """Return zeros for a bucket, in the transport's own memory if it has any."""
        transport = getattr(self._groups.get(layout.device), "transport", None)
        if transport is not None:
            shared: Tensor | None = transport.allocate(layout.numel * layout.dtype.itemsize)
            if shared is not None:
                return shared.view(layout.dtype)
        return torch.zeros(layout.numel, dtype=layout.dtype, device=device)

    def agree(self, proposal: BucketPlan) -> None:
        """Exchange proposals with the other ranks, and use the plan that follows from them.
        Collective. Raises HorovodInternalError if they mismatch.
        """
        payload = json.dumps(proposal).encode()
        self.engine.request(self.name, "exchange", payload=payload, set_id=self.set_id).wait()
        self.await_connection()

    def await_connection(self) -> None:
        """Wait for the plan's process groups. Raises HorovodInternalError once the job is over."""
        while not self._connected.wait(1.0):
            self.engine.check_running()

    def adopt(self, plan: BucketPlan) -> None:
        """Switch to a new plan. Runs in the control thread, also on ranks that have joined."""
        self._connected.clear()
        self._members = self.engine.sets[self.set_id]
        self.layouts = lay_out(plan)
        self.plan = plan
        self.engine.executor.put(self._connect)

    def _connect(self) -> None:
        """Make the process groups. Collective; runs in the executor."""
        for device in dict.fromkeys(["CPU", *(layout.device for layout in self.layouts)]):
            if device not in self._groups:
                group = self.engine.process_groups.get(self._label, self._members, device)
                self._groups[device] = group
        self._connected.set()

    def disconnect(self) -> None:
        """Drop the process groups, so that no reference keeps their connections open, and the
        buckets in flight, which are copies of the gradients.
        """
        self._groups.clear()
        self._in_flight = deque()  # a new one: `send` may be using the other in its thread

    def close(self) -> None:
        """Disconnect for good. Runs in the executor."""
        self.disconnect()
        self.engine.process_groups.drop(self._label)

    def begin_step(self) -> None:
        """Begin the next step, and report it to rank 0, which does not answer."""
        self.step += 1
        self.engine.control.send(0, ["step", self.name, self.set_id, self.step])

    def send(self, layout: BucketLayout, flat: Tensor) -> SentBucket:
        """Start the in-place reduction of a bucket, for `wait`.

        Raises HorovodInternalError once the job is over, unless the rank that left had sent all of
        this step: then the peers still wait for this rank's part.
        """
        engine, in_flight = self.engine, self._in_flight
        if (reason := self._reason_to_stop(self.step)) is not None:
            raise HorovodInternalError(reason, lost_peer=True)
        tensor = torch.view_as_real(flat) if flat.dtype.is_complex else flat
        try:
            work = all_reduce(self._groups[layout.device], tensor, layout.op)
        except (RuntimeError, KeyError) as error:
            raise engine.failure(str(error)) from None
        sent_us = engine.timeline.now_us() if engine.timeline.is_open else None
        sent = SentBucket(layout, self.step, flat, work, sent_us)
        in_flight.append(sent)  # `drain` waits for it; keeps `flat` alive
        while in_flight and in_flight[0].work.is_completed():
            in_flight.popleft()
        return sent

    def wait(self, sent: SentBucket) -> None:
        """Wait for a bucket of this rank's step, on a GPU until it is complete there.

        Raises HorovodInternalError if a peer is lost, or left before it had sent all of this step.
        """
        engine, (layout, step, flat, work, sent_us) = self.engine, sent
        engine.waits += 1
        engine.send_submitted()
        reason_to_stop = partial(self._reason_to_stop, step)
        try:
            engine.process_groups.wait(work, flat.is_cuda, reason_to_stop)
            if flat.is_cuda:
                await_event(record_event(flat.device).query, reason_to_stop)
        except ConnectionBroken as error:
            engine.report_broken(str(error))
            raise engine.failure(str(error)) from None
        if engine.timeline.is_open and sent_us is not None:
            activity = engine.process_groups.activity("allreduce", layout.device)
            for name in layout.names:
                engine.timeline.ran(f"allreduce.{name}", ("ALLREDUCE", activity), sent_us)

    def _reason_to_stop(self, step: int) -> str | None:
        """Return why a step cannot complete any more, or None."""
        left = self.engine.peer_left_before(self.name, step)
        return self.engine.shutdown_reason if left else self.engine.abort_reason

    def drain(self) -> None:
        """Wait for the buckets that all ranks have sent, before shutdown. Runs in the executor."""
        engine = self.engine
        for sent in list(self._in_flight):
            # Not a timed wait, whose limit NCCL would take as the operation's own.
            while not (
                sent.work.is_completed()
                or engine.peer_left_before(self.name, sent.step)
                or engine.abort_reason
            ):
                time.sleep(0.001)

    def send_zeros(self, step: int) -> None:
        """Make the executor send zeros in a step of the other ranks: this one has joined.

        It does not wait: the others may be busy with other things between two buckets.
        """
        self.step = self.last_sent_step = step
        # The layouts now: a later plan may change them before the task runs.
        self.engine.executor.put(partial(self._send_zeros, self.layouts))

    def _send_zeros(self, layouts: list[BucketLayout]) -> None:
        for layout in layouts:
            device = torch.device("cpu")
            if layout.gpu is not None:
                known = layout.gpu < len(self.gpus)
                gpu = self.gpus[layout.gpu] if known else self.engine.executor_gpu
                device = torch.device("cuda", gpu)
            self.send(layout, torch.zeros(layout.numel, dtype=layout.dtype, device=device))
