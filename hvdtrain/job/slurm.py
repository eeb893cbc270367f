"""Slurm's variables: the tasks of a job step, its lists of hosts and of tasks. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product

# Slurm's step ids from here on are not those of a user's `srun`: they are the pending, interactive,
# batch and extern steps.
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0
_NODE = r"(?:[^\s,\[\]]|\[[^\s\[\]]*\])+"  # gpu[03-05,9]


def is_srun_task(env: Mapping[str, str]) -> bool:
    """Return whether this is a task of a job step. The shell of `salloc` or `sbatch` has SLURM_*
    variables too, SLURM_PROCID included.
    """
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < _SLURM_SPECIAL_STEPS


def facts_of_step(env: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `env` in which the job step's values replace those of the allocation, and
    SLURM_TASKS_PER_NODE is this node's number.

    Slurm's own value has the form "2(x3),1", with an entry for each node.
    """
    facts = dict(env)
    for name, step_name in (
        ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
        ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
        ("SLURM_NNODES", "SLURM_STEP_NUM_NODES"),
    ):
        if step_name in env:
            facts[name] = env[step_name]
    per_node = expand_tasks_per_node(facts.get("SLURM_TASKS_PER_NODE", ""))
    node = facts.get("SLURM_NODEID", "0")
    if per_node and node.isdigit() and int(node) < len(per_node):
        facts["SLURM_TASKS_PER_NODE"] = str(per_node[int(node)])
    return facts


def expand_tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's "2(x3),1" into [2, 2, 2, 1]; an empty list for any other text."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_node_list(text: str) -> list[str]:
    """Return the hosts of Slurm's list: "gpu[03-05,9],login1" gives gpu03, gpu04, gpu05, gpu9,
    login1. Raises ValueError for text in another one.
    """
    names: list[str] = []
    for part in re.findall(_NODE, text) if re.fullmatch(f"{_NODE}(,{_NODE})*", text) else []:
        pieces = [_expand_ranges(piece) for piece in re.split(r"(\[[^\]]*\])", part)]
        names += ["".join(name) for name in product(*pieces)]
    if not names or any("[" in name for name in names):
        raise ValueError(f"cannot read the list of hosts {text!r}")
    return names


def _expand_ranges(piece: str) -> list[str]:
    """Return the numbers of "[03-05,9]" as text; any other text as it is."""
    if not piece.startswith("["):
        return [piece]
    found = []
    for part in piece[1:-1].split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if match is None:
            return [piece]  # which the caller refuses
        first, last = match[1], match[2] or match[1]
        found += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return found
