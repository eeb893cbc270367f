"""Torch's flight recorder: the last collectives of this process. Used by `hang_watch`.

Relies on `torch._C._distributed_c10d._dump_fr_trace` (Gloo, and others on the CPU) and
`_dump_nccl_trace`. Without them there is no record, and a hang is described without its collective.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch._C._distributed_c10d as c10d

_DEFAULT = "default_pg"


def flight_record(size: int) -> dict[str, Any]:
    """Return the record of the default group of `size` ranks, as `torchfrtrace` reads it from a
    pickle; {} if no collective is recorded. Not collective.
    """
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(c10d, name, None)
        record: dict[str, Any] = pickle.loads(dump(True, True, False)) if dump is not None else {}
        if entries := [e for e in record.get("entries", []) if e["process_group"][1] == _DEFAULT]:
            # Gloo records its groups without their names, which torchfrtrace looks up.
            group = entries[0]["process_group"][0]
            about = {"name": group, "desc": _DEFAULT, "ranks": str(list(range(size)))}
            record["pg_config"].setdefault(group, about)
            return {**record, "entries": entries}
    return {}


def last_call(record: dict[str, Any]) -> str:
    """Return the last collective that began, such as "all_reduce([5]), number 12"; "" without one.

    Whether it has completed cannot be read: Gloo counts a failed one as completed.
    """
    if not record:
        return ""
    entry = record["entries"][-1]
    sizes = ", ".join(map(str, entry["input_sizes"]))
    name = entry["profiling_name"].rpartition(":")[2]
    return f"{name}({sizes}), number {entry['collective_seq_id']}"
