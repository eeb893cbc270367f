"""Elastic worlds: this process asks its launcher for its rank in the next generation.

Used by `hvd.init` and `rendezvous`, if HOROVOD_ELASTIC=1. The launcher is horovodrun or hvdrun, and
both serve Horovod's rendezvous over HTTP:

    rank                                       launcher
    GET /rank_and_size/HOST:SLOT          ->   answers once every live rank has asked
                                          <-   rank,size,local_rank,local_size,cross_rank,cross_size
    PUT or GET /hvdtrain/store            ->   rank 0's address, for this generation alone

A rank of -1 means that this process is no longer part of the job. hvdrun appends the number of the
generation, which is then part of the key: the address of a dead rank 0 is never read. Both
ends prove its secret, and it answers 410 for a generation that has lost a rank. Under
horovodrun, which clears its keys for each generation, a process that starts does not ask: its
environment has its rank. Imports no torch.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
import urllib.error
import urllib.request
from enum import IntFlag

from hvdtrain.errors import WorldError, first_line

SECRET = "HVDTRAIN_ELASTIC_SECRET"
WORKER = "HVDTRAIN_ELASTIC_WORKER"
GENERATION = "HVDTRAIN_ELASTIC_GENERATION"
VARIABLES = (SECRET, WORKER, GENERATION)
PROOF_HEADER = "X-Hvdtrain-Proof"
"""Of a request: nonce, SHA-256 of the body, HMAC; of a response: HMAC. Neither has the secret."""
# The variables with the launcher's address, and with the six numbers of a rank.
ADDRESS = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
NUMBERS = tuple(
    f"HOROVOD_{name}" for name in "RANK SIZE LOCAL_RANK LOCAL_SIZE CROSS_RANK CROSS_SIZE".split()
)
_REQUEST_S = 10.0
_CHECK_S = 0.25


class HostUpdateResult(IntFlag):
    """The kind of a change of hosts, as Horovod numbers it."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class RemovedFromJob(Exception):
    """This process has no rank in the next generation: its host, or its slot, is to be freed."""


class _Asked:
    """What this process has asked its launcher, and when."""

    checked_at = 0.0

    count = 0
    is_member = False
    """Whether this process has been given a place in a world."""
    worker = ""
    """HOST:SLOT as the launcher has named this process, whatever its local rank is later."""


def is_elastic() -> bool:
    """Return whether an elastic launcher has started this process."""
    return os.environ.get("HOROVOD_ELASTIC") == "1" and all(name in os.environ for name in ADDRESS)


def by_hvdrun() -> bool:
    """Return whether that launcher is hvdrun: new processes, too, ask for their rank."""
    return is_elastic() and SECRET in os.environ


def has_no_place() -> bool:
    """Return whether hvdrun has started this process in an elastic job, and it has not asked for
    its rank: the one in its environment is a guess.
    """
    return by_hvdrun() and not _Asked.is_member


def store_key() -> str:
    """Return the path at which rank 0 of this generation publishes its store."""
    generation = os.environ.get(GENERATION, "") if is_elastic() else ""
    return f"hvdtrain/store.{generation}" if generation else "hvdtrain/store"


def times_asked() -> int:
    """Return how many generations this process has asked for: each has a store of its own."""
    return _Asked.count


def enter(timeout_s: float) -> None:
    """Ask for a place in the next world; a process that horovodrun has just started has one.

    Collective over the live ranks. Raises what `enter_next_generation` does.
    """
    if _Asked.is_member or by_hvdrun():
        enter_next_generation(timeout_s)
    _Asked.is_member = True


def enter_next_generation(timeout_s: float) -> None:
    """Wait for the launcher's answer, and set HOROVOD_RANK, HOROVOD_SIZE and so on to it.

    Collective over the live ranks. Raises RemovedFromJob, and WorldError if the launcher has ended
    or does not answer within `timeout_s`.
    """
    env = os.environ
    if not _Asked.worker:
        named = f"{env.get('HOROVOD_HOSTNAME', 'localhost')}:{env['HOROVOD_LOCAL_RANK']}"
        _Asked.worker = env.get(WORKER, named)
    _Asked.count += 1
    # Once only: horovodrun would count a second request as another rank's.
    try:
        text = request(f"rank_and_size/{_Asked.worker}", timeout_s=timeout_s).decode()
    except OSError as error:
        raise WorldError(
            f"the elastic launcher gives no rank to {_Asked.worker}: {first_line(error)}"
        ) from None
    numbers = text.split(",")
    if len(numbers) < len(NUMBERS):
        raise WorldError(f"the elastic launcher answers {text!r}, which is no rank and size")
    if int(numbers[0]) < 0:
        raise RemovedFromJob(f"{_Asked.worker} is no longer part of the job")
    env.update(zip(NUMBERS, numbers, strict=False))
    if len(numbers) > len(NUMBERS):
        env[GENERATION] = numbers[len(NUMBERS)]


def request(
    path: str,
    message: bytes = b"",
    timeout_s: float = _REQUEST_S,
    server: tuple[str, str, str] | None = None,
) -> bytes:
    """Return the launcher's answer to a PUT of `message`, or without one to a GET; b"" for a key
    that does not exist. `server` is another one's address, port and secret. Raises OSError, also
    for an answer that does not prove the secret.
    """
    own = *(os.environ.get(name, "") for name in ADDRESS), os.environ.get(SECRET, "")
    address, port, secret = server or own
    host = f"[{address}]" if ":" in address else address
    method = "PUT" if message else "GET"
    made = urllib.request.Request(f"http://{host}:{port}/{path}", message or None, method=method)
    nonce, digest = secrets.token_hex(16), hashlib.sha256(message).hexdigest()
    own_proof = proof(secret, nonce, method, path, digest)
    made.add_header(PROOF_HEADER, f"{nonce} {digest} {own_proof}")
    # The server is the launcher's own: ignore the proxies of the environment.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(made, timeout=timeout_s) as response:
            body, theirs = bytes(response.read()), response.headers.get(PROOF_HEADER, "")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 404 or message:
            raise
        return b""
    if secret:  # horovodrun has none
        expected = proof(secret, nonce, "response", path, hashlib.sha256(body).hexdigest())
        if not hmac.compare_digest(theirs.encode(), expected.encode()):
            raise OSError(f"what answers at {host}:{port} is not the launcher of this job")
    return body


def proof(secret: str, *parts: str) -> str:
    """Return what proves the secret of a server for these parts of a request or response."""
    return hmac.new(secret.encode(), "\n".join(parts).encode(), "sha256").hexdigest()


def is_over(error: OSError) -> bool:
    """Return whether the launcher answers that this generation has lost a rank."""
    return isinstance(error, urllib.error.HTTPError) and error.code == 410


def lost_a_rank() -> bool:
    """Return whether hvdrun knows that a rank of this generation has ended. Never raises; asks a
    few times a second, however often it is called.
    """
    now = time.monotonic()
    if not by_hvdrun() or now < _Asked.checked_at + _CHECK_S:
        return False
    _Asked.checked_at = now
    try:
        request(store_key())
    except OSError as error:
        return is_over(error)
    return False


def check_generation() -> None:
    """Raise WorldError if a rank of this generation has ended, and so answers nobody.

    Each loop that waits for another rank calls it, until the ranks watch each other.
    """
    if lost_a_rank():
        raise WorldError("a rank of this generation has exited before all were connected")
