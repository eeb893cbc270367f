"""Elastic worlds: this process asks its launcher for its rank in the next generation.

Used by `hvd.init` and `rendezvous` in a job of hvdrun with --host-discovery-script, which serves
Horovod's rendezvous over HTTP:

    rank                                       hvdrun
    GET /rank_and_size/HOST:NUMBER        ->   answers once every live rank has asked
                                          <-   rank,size,local_rank,local_size,cross_rank,
                                               cross_size,generation
    PUT or GET /hvdtrain/store.GENERATION ->   rank 0's address, for this generation alone
    GET /hosts/update                     ->   "timestamp,kind" of a change of hosts, or nothing

A rank of -1 means that this process is no longer part of the job. Both ends prove the secret of
hvdrun, which answers 410 for a generation that has lost a rank. Imports no torch.
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


def is_elastic() -> bool:
    """Return whether hvdrun has started this process in an elastic job."""
    return SECRET in os.environ


def has_no_place() -> bool:
    """Return whether this process is of an elastic job and has not asked for its rank: the one in
    its environment is a guess.
    """
    return is_elastic() and not _Asked.count


def store_key() -> str:
    """Return the path at which rank 0 of this generation publishes its store."""
    return f"hvdtrain/store.{os.environ.get(GENERATION, '')}"


def times_asked() -> int:
    """Return how many generations this process has asked for: each has a store of its own."""
    return _Asked.count


def enter(timeout_s: float) -> None:
    """Ask for a place in the next generation, and set HOROVOD_RANK and so on to the answer.

    Collective over the live ranks. Raises RemovedFromJob, and WorldError if the launcher has ended
    or does not answer within `timeout_s`.
    """
    worker = os.environ[WORKER]
    _Asked.count += 1
    try:
        text = request(f"rank_and_size/{worker}", timeout_s=timeout_s).decode()
    except OSError as error:
        raise WorldError(
            f"the elastic launcher gave {worker} no rank: {first_line(error)}"
        ) from None
    numbers = text.split(",")
    if numbers[0] == "-1":
        raise RemovedFromJob(f"{worker} is no longer part of the job")
    os.environ.update(zip((*NUMBERS, GENERATION), numbers, strict=True))


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
    own = (os.environ.get(name, "") for name in (*ADDRESS, SECRET))
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
    if secret:  # a horovodrun that is not elastic has none
        expected = proof(secret, nonce, "response", path, hashlib.sha256(body).hexdigest())
        if not hmac.compare_digest(theirs.encode(), expected.encode()):
            raise OSError(f"the server at {host}:{port} is not the launcher of this job")
    return body


def proof(secret: str, *parts: str) -> str:
    """Return what proves the secret of a server for these parts of a request or response."""
    return hmac.new(secret.encode(), "\n".join(parts).encode(), "sha256").hexdigest()


def is_over(error: OSError) -> bool:
    """Return whether the launcher answers that this generation has lost a rank."""
    return isinstance(error, urllib.error.HTTPError) and error.code == 410


def check_generation() -> None:
    """Raise WorldError if a rank of this generation has ended, and so answers nobody.

    Each loop that waits for another rank calls it, until the ranks watch each other. Asks hvdrun a
    few times a second, however often it is called.
    """
    now = time.monotonic()
    if not is_elastic() or now < _Asked.checked_at + _CHECK_S:
        return
    _Asked.checked_at = now
    try:
        request(store_key())
    except OSError as error:
        if is_over(error):
            raise WorldError(
                "a rank of this generation has exited before all were connected"
            ) from None
