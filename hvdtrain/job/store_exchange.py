"""How the ranks of a job wait for each other and exchange values, through a c10d store.

    await_ranks    all ranks of a world, started at any time -> a key prefix of their own
    exchange       every rank's value
    ask_rank0      rank 0's answer to this rank, from every rank's value: for many ranks

The rendezvous, the transports and the Horovod engine use it. `liveness.peers` opens connections.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain.errors import LaunchError, PeerLost, WorldError
from hvdtrain.job import elastic_world
from hvdtrain.job.job_secret import NotOfThisJob, not_proven
from hvdtrain.job.signed_store import SignedStore, Unsigned, base_of
from hvdtrain.job.world import World, agent_keeps_store

_MAX_NAMED = 32  # missing ranks in a message
# Ranks that poll rank 0's store: at most so many a second, together
_RANKS_PER_S = 5000
_MOST_BYTES = 4 << 20  # of a value: torch's store closes the connection from 8 MiB on
_OUTCOME_S = 2.0  # from a rank's own deadline to that of rank 0, which names the missing ranks


def poll_until(deadline: float, pause_s: float = 0.01) -> Iterator[None]:
    """Yield at once, then after pauses that grow to `pause_s`, until the deadline has passed.

    Raises WorldError if an elastic job has lost a rank meanwhile.
    """
    yield
    pause = 0.001
    while time.monotonic() < deadline:
        time.sleep(min(pause, pause_s))
        elastic_world.check_generation()
        pause *= 2
        yield


def exchange(
    store: Store, name: str, rank: int, size: int, value: Any, timeout_s: float
) -> list[Any]:
    """Return every rank's JSON `value`, in rank order, through the store. Collective.

    Rank 0 reads N values, and publishes them as one: so rank 0's store serves 2 * N values and not
    N * N. It publishes None if they are too long for one, and its error if a rank is missing.
    `name` must be new for this store's key prefix. Raises PeerLost naming the missing ranks.
    """
    keys, published = [f"{name}/{r}" for r in range(size)], f"{name}/all"
    store.set(keys[rank], json.dumps(value))
    found: list[Any] | str | None = None
    try:
        store.wait([published] if rank else keys, timedelta(seconds=timeout_s))
        if rank:
            found = json.loads(store.get(published))
    except DistError:
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        if missing:  # else the last one arrived just after the timeout, of rank 0 or of this rank
            found = timed_out(timeout_s, missing, size)
            if rank == 0:
                store.set(published, json.dumps(found))
    if isinstance(found, str):
        raise PeerLost(f"rank {rank} {found}")
    if found is None:
        found = [json.loads(text) for text in store.multi_get(keys)]
        if rank == 0:
            text = json.dumps(found)
            store.set(published, text if len(text) < _MOST_BYTES else "null")
    return found


def open_prefix(store: Store, rank: int, size: int, timeout_s: float) -> Store:
    """Return the store of a group, signed, under a prefix of this call. Collective over the group.

    Whoever made the group may have made one of the same name before, whose keys are still there:
    `init_process_group` after `destroy_process_group` has the same store and the same name.
    Raises PeerLost, and Unsigned for another user's value.
    """
    if not isinstance(base_of(store), SignedStore):
        store = SignedStore(store)
    deadline = time.monotonic() + timeout_s
    round_id, problem = _run_round(store, rank, size, uuid.uuid4().hex, deadline, timeout_s)
    if problem:
        raise PeerLost(f"rank {rank} {problem}")
    return PrefixStore(round_id, store)


def ask_rank0(
    store: Store,
    name: str,
    world: World,
    value: Any,
    answers: Callable[[list[Any]], list[Any]],
) -> Any:
    """Send a JSON `value` to rank 0; return its answer to this rank. Collective.

    Rank 0 calls `answers` with all values, for one answer to each rank. So each rank reads its
    answer alone, and not the values of all, as in an exchange. `name` must be new for this store's
    key prefix. Raises DistError after the store's timeout.
    """
    keys = [f"{name}/{rank}" for rank in range(world.size)]
    store.set(keys[world.rank], json.dumps(value))
    if world.rank == 0:
        store.wait(keys)
        texts = [json.dumps(a) for a in answers([json.loads(v) for v in store.multi_get(keys)])]
        answer_keys = [f"answer/{key}" for key in keys]
        store.multi_set(answer_keys, texts)  # type: ignore[attr-defined]
    return json.loads(store.get(f"answer/{keys[world.rank]}"))


def timed_out(timeout_s: float, missing: Sequence[int], size: int) -> str:
    """Return a predicate: how long this rank waited, and for which ranks."""
    more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    named = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing[:_MAX_NAMED]))}{more}"
    return (
        f"timed out after {timeout_s:g} s waiting for {named} "
        f"({len(missing)} of {size} ranks missing)"
    )


# All ranks of a world


def await_ranks(store: Store, world: World, timeout_s: float, deadline: float) -> Store:
    """Wait for all ranks; return the store under a new prefix that only these processes use.

    Collective. A key alone proves nothing: torchrun's agent keeps its store when it restarts the
    ranks, and so the keys of dead ranks; and a start that failed on some ranks leaves keys, too.
    Therefore each rank answers rank 0, which uses the latest of its nonces:

        rank r                            rank 0
        set arrived/r = nonce        ->
                                     <-   set round/<nonce> = round, for every nonce it reads
        set <round>/answer/r = nonce ->
                                     <-   set <round>/outcome: "" once the answers equal
                                          arrived/*, or at the deadline the missing ranks

    Raises WorldError naming the missing ranks, LaunchError if two processes have the same rank,
    and NotOfThisJob if a rank has not signed its values with the secret of this one.
    """
    rank, nonce = world.rank, uuid.uuid4().hex
    try:
        if not agent_keeps_store(world):
            _check_unique(store, world)
        round_id, problem = _run_round(store, rank, world.size, nonce, deadline, timeout_s)
        if problem:
            raise WorldError(f"{world} {problem}")
        if store.get(f"arrived/{rank}").decode() != nonce:
            raise LaunchError(f"two processes claim to be rank {rank} ({world.source})")
    except Unsigned as error:
        whose = error.key.rpartition("/")[2]
        whose = whose if whose.isdigit() else "0"  # rank 0 sets the values without a rank's number
        raise NotOfThisJob(f"{world} got a value from rank {whose} that {not_proven()}") from None
    return PrefixStore(round_id, store)


def _run_round(
    store: Store, rank: int, size: int, nonce: str, deadline: float, timeout_s: float
) -> tuple[str, str]:
    """Run a round of `await_ranks`: rank 0 coordinates it, the others join. Return its id, and ""
    or which ranks did not answer in time.
    """
    store.set(f"arrived/{rank}", nonce)
    if rank:
        return _join_round(store, rank, size, nonce, deadline, timeout_s)
    round_id = uuid.uuid4().hex
    ranks = range(size)
    arrived = [f"arrived/{r}" for r in ranks]
    answers = [f"{round_id}/answer/{r}" for r in ranks]
    store.set(answers[rank], nonce)
    for keys, placeholder in ((arrived, "not arrived"), (answers, "no answer")):
        for key in keys:
            store.compare_set(key, "", placeholder)  # multi_get blocks on a missing key
    notified = {b"not arrived"}
    for _ in poll_until(deadline, pause_s=max(0.01, size / _RANKS_PER_S)):
        values = store.multi_get(arrived + answers)
        nonces, answered = values[:size], values[size:]
        if nonces == answered:
            break
        for other in {*nonces} - notified:
            store.set(f"round/{other.decode()}", round_id)
            notified.add(other)
    missing = [r for r in ranks if nonces[r] != answered[r]]
    problem = timed_out(timeout_s, missing, size) if missing else ""
    store.set(f"{round_id}/outcome", problem)
    return round_id, problem


def _join_round(
    store: Store, rank: int, size: int, nonce: str, deadline: float, timeout_s: float
) -> tuple[str, str]:
    """Run the side of all other ranks. Return what `_run_round` returns."""
    round_key, round_id, is_rank0_known = f"round/{nonce}", "", False
    pause_s = max(0.02, size / _RANKS_PER_S)
    for _ in poll_until(deadline + _OUTCOME_S, pause_s):
        if round_id and store.check([f"{round_id}/outcome"]):
            return round_id, store.get(f"{round_id}/outcome").decode()
        if not round_id and time.monotonic() > deadline:
            break
        if not is_rank0_known and store.check(["arrived/0"]):
            is_rank0_known = bool(store.get("arrived/0"))  # with another secret: raises Unsigned
        # Read again each time: a restarted rank 0 begins a new round.
        newest = store.get(round_key).decode() if store.check([round_key]) else ""
        if newest != round_id:
            round_id = newest
            store.set(f"{round_id}/answer/{rank}", nonce)
    return round_id, timed_out(timeout_s, [0], size)


def _check_unique(store: Store, world: World) -> None:
    """Raise LaunchError if another process has claimed this rank.

    Do not call it on a store that survives restarts (torchrun's agent).
    """
    # The id is random: two containers may have the same host name and process id.
    me = f"{socket.gethostname()}:{os.getpid()} {_PROCESS_ID}"
    other = store.compare_set(f"process/{world.rank}", "", me).decode()
    if other != me:
        pair = f"{other.split()[0]} and {me.split()[0]}"
        raise LaunchError(f"two processes claim to be rank {world.rank}: {pair} ({world.source})")


_PROCESS_ID = uuid.uuid4().hex
