"""HostUpdateResult: the kind of a change of hosts, as Horovod numbers it."""

from __future__ import annotations

from enum import IntFlag


class HostUpdateResult(IntFlag):
    """The kind of a change of hosts."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
