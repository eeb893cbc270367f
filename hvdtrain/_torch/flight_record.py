"""Torch's flight recorder: the last collectives of this process. Used by `hang_watch`.

Relies on `torch._C._distributed_c10d._dump_fr_trace` (Gloo, and others on the CPU) and
`_dump_nccl_trace`. Without them there is no record, and a hang is described without its collective.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch._C._distributed_c10d as c10d

_DEFAULT = "default_pg"


def last_call() -> str:
    """Return the last collective of the default group that began, such as "all_reduce([5]), number
    12"; "" without one. Not collective.

    Whether it has completed cannot be read: Gloo counts a failed one as completed.
    """
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        dump = getattr(c10d, name, None)
        record: dict[str, Any] = pickle.loads(dump(True, True, False)) if dump is not None else {}
        if entries := [e for e in record.get("entries", []) if e["process_group"][1] == _DEFAULT]:
            entry = entries[-1]
            sizes = ", ".join(map(str, entry["input_sizes"]))
            called = entry["profiling_name"].rpartition(":")[2]
            return f"{called}({sizes}), number {entry['collective_seq_id']}"
    return ""
