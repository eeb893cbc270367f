"""The optimizer of the backend `ps`: pushes gradients to the servers, and pulls parameters.

A server is a rank that owns parameters: rank 0 owns all of them, or each rank a share. Every rank
trains, servers too. Synchronous training (Li et al., OSDI 2014, with a barrier at each step):

    every rank   averaging         ["push"], gradients     ->  the server of each parameter
    server       averaging         p.grad becomes the mean of all living ranks, in rank order
    server       step              steps; ["fresh"], parameters  ->  every other rank

Asynchronous training: no rank waits for another one's gradient. The server has a copy of its
parameters and steps it in its thread, with one gradient at a time; meanwhile the model of its own
rank keeps the values that this rank has pulled last.

    rank r       step              ["push"], gradients     ->  the server
    server       in its thread     steps; ["fresh"], parameters  ->  rank r

The staleness of a gradient is the number of steps that the server has taken since rank r pulled the
parameters from which it was computed. With a maximum of K the server holds a gradient back if its
step would make that of another rank, which is still computing, older than K; the gradients that it
has held back are averaged and make one step. K = 0 is synchronous training, and runs as such.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hvdtrain.backends.ps_messages import Messages, decode, encode
from hvdtrain.system.trees import parameters_of

Grads = list[Tensor | None]
_HALVES = (torch.float16, torch.bfloat16)


def owners_of(parameters: list[Tensor], num_ranks: int) -> list[int]:
    """Return the owner of each parameter, so that all ranks own about as many elements.

    Parameters are not split, since some optimizers need a whole one. Assigns the largest first.
    """
    load = [0] * num_ranks
    owners = [0] * len(parameters)
    for i in sorted(range(len(parameters)), key=lambda i: (-parameters[i].numel(), i)):
        owners[i] = load.index(min(load))
        load[owners[i]] += parameters[i].numel()
    return owners


class ServerOptimizer(Optimizer):
    """Wraps an optimizer so that it steps at the servers. Its state is that of this rank's server.

    `owners`: the owner of each parameter, in the order of the groups. `number` distinguishes the
    optimizers of a job. With `is_asynchronous`, `max_staleness` None means any.
    """

    def __init__(
        self,
        inner: Optimizer,
        messages: Messages,
        owners: list[int],
        number: int,
        is_asynchronous: bool = False,
        max_staleness: int | None = None,
    ) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self._share_state()
        self.is_asynchronous = is_asynchronous
        self.staleness: Counter[int] = Counter()
        """How often each staleness occurred at this rank's server."""
        self.has_started = False
        """Whether the servers of all ranks have started."""
        self.steps = 0
        """Asynchronous steps of this rank."""
        self.after_step: Callable[[], None] = lambda: None
        self._messages = messages
        self._number = number
        self._max_staleness = max_staleness
        self._owned = {o: [i for i, at in enumerate(owners) if at == o] for o in sorted({*owners})}
        """The indices of the parameters of each server, by rank."""
        self._mine = self._owned.get(messages.rank, [])
        self._round = 0
        self._shared_round = 0
        """The last round of which every rank has the means."""
        self._server: _Server | None = None

    @property
    def servers(self) -> list[int]:
        """The ranks that own parameters."""
        return list(self._owned)

    # What an optimizer has

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Let the servers step, and take over their parameters. Collective if synchronous."""
        if closure is not None:
            raise ValueError("a parameter server evaluates no closure; call step() without one")
        if self.is_asynchronous:
            self._push_and_pull()
        else:
            self._step_and_publish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's server; see `Backend.synchronize`."""
        with self._messages.changed:
            self._share_hyperparameters()
            return (self._server.optimizer if self._server else self.inner).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self._share_state()
        if self._server is not None:
            with self._messages.changed:
                self._server.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "inner"):  # else called by the constructor
            raise ValueError("a parameter that is added after prepare has no server")
        super().add_param_group(param_group)

    def _share_state(self) -> None:
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def _share_hyperparameters(self) -> None:
        """Give the server's copy the learning rates and so on of this rank's groups."""
        if self._server is not None:
            groups = zip(self._server.optimizer.param_groups, self.param_groups, strict=True)
            for group, own in groups:
                group.update({name: value for name, value in own.items() if name != "params"})

    # Synchronous

    def reduce_to_servers(self) -> None:
        """Make p.grad the mean of all living ranks where this rank owns the parameter, else None.

        Collective.
        """
        self._round += 1
        parameters = parameters_of(self)
        for server, owned in self._owned.items():
            if server != self._messages.rank:
                self._send(server, "push", [parameters[i].grad for i in owned])
        if self._mine:
            pushed = self._receive_from_all("push")
            pushed[self._messages.rank] = [parameters[i].grad for i in self._mine]
            means = _means([grads for _, grads in sorted(pushed.items())])
            for i, mean in zip(self._mine, means, strict=True):
                parameters[i].grad = _to(parameters[i], mean)
        for i in {*range(len(parameters))} - {*self._mine}:
            parameters[i].grad = None

    def share_means(self) -> None:
        """Make p.grad the mean on every rank, after `reduce_to_servers`. Collective.

        Once a step: a second call, by a callback, finds it done.
        """
        if self._shared_round == self._round:
            return
        self._shared_round = self._round
        self._publish("mean", lambda p: p.grad, lambda p, mean: setattr(p, "grad", mean))

    def _step_and_publish(self) -> None:
        parameters = parameters_of(self)
        foreign = [parameters[i] for i in {*range(len(parameters))} - {*self._mine}]
        for p in foreign:
            p.grad = None  # so that the optimizer skips it
        if self._mine:
            self.inner.step()
        self._publish("fresh", lambda p: p, lambda p, value: p.copy_(value))

    @torch.no_grad()
    def _publish(
        self, kind: str, read: Callable[[Tensor], Any], write: Callable[[Tensor, Tensor], Any]
    ) -> None:
        """Send what this server has for each of its parameters to all, and take what others sent.

        Collective.
        """
        parameters = parameters_of(self)
        with self._messages.changed:
            others = sorted(self._messages.live - {self._messages.rank})
        if self._mine and others:
            mine = encode([read(parameters[i]) for i in self._mine])
            for rank in others:
                self._send(rank, kind, mine)
        for server in self._owned:
            if server != self._messages.rank:
                for i, value in zip(self._owned[server], self._take(kind, server), strict=True):
                    write(parameters[i], _to(parameters[i], value))

    def _receive_from_all(self, kind: str) -> dict[int, Grads]:
        """Return what all other living ranks have sent in this round, by rank."""
        inbox, live = self._messages.inbox, self._messages.live
        # A sorted copy: the thread of the messages removes lost ranks at any time.
        others = sorted(live - {self._messages.rank})
        keys = {rank: (f"{kind}/{self._number}", self._round, rank) for rank in others}

        def late() -> list[int]:
            return [rank for rank in others if rank in live and keys[rank] not in inbox]

        arrived = self._messages.wait(
            lambda: None if late() else [rank for rank in others if keys[rank] in inbox],
            lambda: f"the gradients of rank {', '.join(map(str, late()))}",
        )
        return {rank: decode(inbox.pop(keys[rank])) for rank in arrived}

    def _take(self, kind: str, server: int) -> list[Tensor]:
        """Return what a server sends in this round; wait for it."""
        key = f"{kind}/{self._number}", self._round, server
        data = self._messages.wait(
            lambda: self._messages.inbox.pop(key, None), lambda: f"the parameters of rank {server}"
        )
        values: list[Tensor] = decode(data)
        return values

    def _send(self, rank: int, kind: str, value: Any) -> None:
        payload = value if isinstance(value, bytes) else encode(value)
        self._messages.send(rank, [f"{kind}/{self._number}", self._round], payload)

    # Asynchronous

    def start_server(self) -> None:
        """Start this rank's server, if it is one, from the parameters and the state as they are.

        Not collective: all ranks call it before any rank pushes.
        """
        if not self._mine:
            return
        with self._messages.changed:
            server = _Server(copy.deepcopy(self.inner), self._mine, self._max_staleness)
            server.staleness = self.staleness
            server.share_hyperparameters = self._share_hyperparameters
            server.pulled = dict.fromkeys(self._messages.live, 0)
            # A rank has one request at a time, so that its round, 0, need not distinguish two.
            server.reply = lambda rank: self._send(rank, "fresh", server.values())
            self._server = server

            def serve(rank: int, header: list[Any], payload: bytes) -> None:
                server.receive(rank, header[0].partition("/")[0], decode(payload))

            for kind in ("push", "pull", "rest"):
                self._messages.handlers[f"{kind}/{self._number}"] = serve

    def _push_and_pull(self) -> None:
        parameters = parameters_of(self)
        for server, owned in self._owned.items():
            self._send(server, "push", [parameters[i].grad for i in owned])
        self._take_fresh()
        self.steps += 1
        self.after_step()

    def pull(self) -> None:
        """Take over the servers' parameters. Not collective."""
        for server in self._owned:
            self._send(server, "pull", [])
        self._take_fresh()

    def report_idle(self) -> None:
        """Report to the servers that this rank computes no gradient now. Not collective.

        A server then does not hold back gradients because of this rank.
        """
        for server in self._owned:
            self._send(server, "rest", [])

    @torch.no_grad()
    def _take_fresh(self) -> None:
        parameters = parameters_of(self)
        for server, owned in self._owned.items():
            for i, value in zip(owned, self._take("fresh", server), strict=True):
                parameters[i].copy_(value)

    def forget(self, rank: int) -> None:
        """Wait no longer for the gradients of a lost rank. In the thread of the messages."""
        if self._server is not None:
            self._server.forget(rank)

    # The state in checkpoints

    def own_state(self) -> dict[int, Any]:
        """Return the state of the parameters that this rank owns, by index."""
        state = self.state_dict()["state"]
        return {i: state[i] for i in self._mine if i in state}

    def set_state(self, states: dict[int, Any]) -> None:
        """Replace the state of all parameters, by index."""
        self.load_state_dict({**self.state_dict(), "state": states})


class _Server:
    """The server of one rank in asynchronous training. All methods are called by one thread."""

    def __init__(self, optimizer: Optimizer, mine: list[int], max_staleness: int | None) -> None:
        self.optimizer = optimizer
        self.staleness: Counter[int] = Counter()
        self.pulled: dict[int, int] = {}
        """For each rank that computes a gradient, the version that it has pulled."""
        self.share_hyperparameters: Callable[[], None] = lambda: None
        self.reply: Callable[[int], None] = lambda rank: None
        self._version = 0
        self._max_staleness = max_staleness
        self._lost: set[int] = set()
        self._held: dict[int, tuple[int, Grads]] = {}
        parameters = parameters_of(optimizer)
        self._parameters = [parameters[i] for i in mine]
        for p in parameters:
            p.grad = None

    def values(self) -> list[Tensor]:
        """Return the parameters."""
        return [p.detach() for p in self._parameters]

    def receive(self, rank: int, kind: str, grads: Grads) -> None:
        """Handle a gradient ("push"), a request ("pull"), or that a rank computes none ("rest")."""
        if kind == "pull":
            self._answer(rank)
            return
        version = self.pulled.pop(rank, self._version)
        if kind == "push":
            self._held[rank] = version, grads
        self._step()

    def forget(self, rank: int) -> None:
        """Expect nothing more of a lost rank. A gradient that it has sent still counts."""
        self._lost.add(rank)
        self.receive(rank, "rest", [])

    def _step(self) -> None:
        """Step with the gradients at hand, unless another rank's would become too old by it."""
        limit = self._max_staleness
        if limit is not None and any(self._version - v >= limit for v in self.pulled.values()):
            return
        if not self._held:
            return
        held = dict(sorted(self._held.items()))
        self._held.clear()
        for version, _ in held.values():
            self.staleness[self._version - version] += 1
        means = _means([grads for _, grads in held.values()])
        for p, mean in zip(self._parameters, means, strict=True):
            p.grad = _to(p, mean)
        self.share_hyperparameters()
        self.optimizer.step()
        self._version += 1
        for p in self._parameters:
            p.grad = None
        for rank in held:
            self._answer(rank)

    def _answer(self, rank: int) -> None:
        if rank in self._lost:  # a version that it has pulled would hold back all others
            return
        self.pulled[rank] = self._version
        self.reply(rank)


def _to(p: Tensor, value: Tensor | None) -> Any:
    """Return `value` on the device of `p`."""
    return None if value is None else value.to(p.device)


def _means(by_rank: list[Grads]) -> Grads:
    """Return the mean of each gradient over the ranks."""
    return [_mean(list(values)) for values in zip(*by_rank, strict=True)]


@torch.no_grad()
def _mean(values: Grads) -> Tensor | None:
    """Return the mean, added in order; halves in float32. One value is its own mean, and a frozen
    parameter has none.
    """
    if len(values) == 1 or values[0] is None:
        return values[0]
    dtype = values[0].dtype
    total: Tensor | None = None
    for value in values:
        assert value is not None
        if value.is_sparse:
            value = value.coalesce()  # each rank adds up its own rows first
        value = value.to(torch.float32) if dtype in _HALVES else value
        total = value if total is None else total + value
    assert total is not None
    return ((total.coalesce() if total.is_sparse else total) / len(values)).to(dtype)
