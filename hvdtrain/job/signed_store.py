"""A c10d store whose values are signed: TCPStore lets anyone who reaches its port write to it.

`rendezvous` wraps every store in it, and the transports wrap the store of a group that torch has
made. Process groups of torch, e.g. Gloo's, use it like any other store.

    set(key, value)   ->  key: HMAC(key name and value), value
    get(key)          <-  value, if the HMAC is that of this name and value; else NotOfThisJob

The proof covers the whole name, with the prefixes of all PrefixStores above. Those have a random
part of this rendezvous (see `store_exchange.await_ranks`), so values of another job prove nothing
here. That a key exists, and the value of a counter (`add`), proves nothing at all: only waiting
depends on it.

All that ranks wait for before they are connected (the rendezvous, a transport, a process group) is
a key. Therefore each wait of an elastic job ends once its launcher knows that a rank has ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from hvdtrain.job import elastic_world, job_secret
from hvdtrain.job.job_secret import TAG_BYTES, NotOfThisJob

_POLL_S = 0.02

# Torch does not keep the Python part of a store alive that a PrefixStore or a group refers to.
_alive: list[SignedStore] = []


class Unsigned(NotOfThisJob):
    """A value of the store without proof, under `key`."""

    def __init__(self, key: str) -> None:
        self.key = key
        super().__init__(f"the value of {key} in the store {job_secret.not_proven()}")


class SignedStore(Store):
    """`store`, with signed values. Every rank must wrap it."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        _alive.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        """Store the value and its proof."""
        self.store.set(key, _signed(key, value))  # type: ignore[arg-type]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set the value if it is `expected`, or the key is new and `expected` empty; return it."""
        before = _signed(key, expected) if expected else b""
        after = _signed(key, desired)
        return _proven(key, self.store.compare_set(key, before, after))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait for the key; return its value. Raises Unsigned, and what `wait` does."""
        self._await_elastic([key], self.timeout)
        return _proven(key, self.store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for the keys; return their values. Raises Unsigned, and what `wait` does."""
        self._await_elastic([*keys], self.timeout)
        return [*map(_proven, keys, self.store.multi_get([*keys]))]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Store several values."""
        signed = [_signed(key, value) for key, value in zip(keys, values, strict=True)]
        self.store.multi_set([*keys], signed)  # type: ignore[attr-defined]

    def has_extended_api(self) -> bool:
        """Return False, so that torch does not append to a value, which would void its proof."""
        return False

    def clone(self) -> SignedStore:
        """Return a store on a connection of its own to the same server."""
        return SignedStore(self.store.clone())  # type: ignore[attr-defined]

    # Without proof

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which is not signed; return its value."""
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return self.store.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        """Wait until all keys exist. Raises DistStoreError after the timeout, and WorldError if an
        elastic job has lost a rank meanwhile.
        """
        self._await_elastic(keys, *(timeout or (self.timeout,)))
        self.store.wait(keys, *timeout)

    def _await_elastic(self, keys: list[str], timeout: timedelta) -> None:
        """In an elastic job, wait until all keys exist, at most for the timeout."""
        if not elastic_world.is_elastic():
            return
        deadline = time.monotonic() + timeout.total_seconds()
        while not self.store.check(keys) and time.monotonic() < deadline:
            elastic_world.check_generation()
            time.sleep(_POLL_S)

    def delete_key(self, key: str) -> bool:
        """Remove a key; return whether it existed."""
        return self.store.delete_key(key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self.store.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all operations."""
        self.store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """The timeout of operations."""
        return self.store.timeout  # type: ignore[attr-defined, no-any-return]


def _signed(key: str, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return job_secret.tag("store", key.encode(), data) + data


def _proven(key: str, data: bytes) -> bytes:
    value = data[TAG_BYTES:]
    if not job_secret.is_tag(data[:TAG_BYTES], "store", key.encode(), value):
        raise Unsigned(key)
    return value


def base_of(store: Store) -> Store:
    """Return the store below all prefixes: a SignedStore, or the TCPStore of stock torch."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
