"""Which cores a rank is bound to: `python cores.py core|numa RANK/RANKS COMMAND ...` runs a command
bound to them; RANK counts from 0 on this host. Imports nothing of hvdtrain, and no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

NONE, CORE, NUMA = BINDINGS = ("none", "core", "numa")
VARIABLE = "HVDTRAIN_CORES"
"""The cores that a host's ranks share, in a rank that has been bound to its part of them."""

_SYSTEM = Path("/sys")
_DRIVER = Path("/proc/driver/nvidia/gpus")


def command(binding: str, place: str, line: Sequence[str]) -> list[str]:
    """Return the command line that runs `line` bound: `place` is "RANK/RANKS" of its host."""
    if binding == NONE:
        return list(line)
    return [sys.executable, "-S", "-E", __file__, binding, place, *line]


def of_host() -> set[int]:
    """Return the cores that this host's ranks share, as far as this process knows them."""
    given = os.environ.get(VARIABLE)
    return _numbers(given) if given else os.sched_getaffinity(0)


def share_of_cores(rank: int, ranks: int, cores: Collection[int]) -> list[int]:
    """Return the cores of one of a host's ranks: an equal share of whole physical cores, with all
    their hardware threads; one thread each if the ranks exceed the physical cores, a physical core
    of its own as long as there are any.
    """
    physical = _physical(cores)
    if share := len(physical) // ranks:
        return sorted(sum(physical[rank * share :][:share], []))
    order = sorted((index, core) for threads in physical for index, core in enumerate(threads))
    return [order[rank % len(order)][1]]


def cores_of(binding: str, rank: int, ranks: int, cores: Collection[int]) -> list[int]:
    """Return the cores that a rank of this host is bound to; all of `cores` if that has no use.

    core: its share of the physical cores, of its GPU's NUMA node if each rank has a GPU; all if the
    ranks are more than these. numa: all cores of its GPU's node, else of the node that it falls to.
    """
    every, nodes = sorted(cores), _nodes(cores)
    of_gpus = [nodes.get(number, every) for number in _nodes_of_gpus()[:ranks]]
    if binding == NUMA and rank < len(of_gpus):
        return of_gpus[rank]
    if binding == NUMA:
        dealt = list(nodes.values())
        return dealt[rank * len(dealt) // ranks] if 0 < len(dealt) <= ranks else every
    of_ranks = of_gpus if len(of_gpus) == ranks else [every] * ranks
    mine = of_ranks[rank]
    beside = [r for r, own in enumerate(of_ranks) if own == mine]
    if len(beside) > len(_physical(mine)):
        return every
    return share_of_cores(beside.index(rank), len(beside), mine)


def _nodes(cores: Collection[int]) -> dict[int, list[int]]:
    """Return the cores of each NUMA node, of those in `cores`, by number in ascending order; none
    if the system names no node.
    """
    found = {
        int(folder.name[4:]): sorted(_numbers(_read(folder / "cpulist")) & set(cores))
        for folder in _SYSTEM.glob("devices/system/node/node[0-9]*")
    }
    return {number: own for number, own in sorted(found.items()) if own}


def _nodes_of_gpus() -> list[int]:
    """Return the NUMA node of each GPU that the ranks see, -1 where it has none: rank r takes GPU
    r. By PCI address, as nvidia-smi numbers them; CUDA's default is the same for equal GPUs.
    """
    folders = {str(n): folder for n, folder in enumerate(sorted(_DRIVER.glob("*:*:*.*")))}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(folders))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [_node_of_gpu(name, folders) for name in names]


def _node_of_gpu(name: str, folders: Mapping[str, Path]) -> int:
    """Return the NUMA node of a GPU, by its number or the beginning of its UUID; -1 if none is
    known, as for a part of a GPU (MIG). `folders` has the driver's folder of each GPU by number.
    """
    for number, folder in folders.items():
        is_uuid = name.startswith("GPU-") and name in _read(folder / "information")
        if is_uuid or name == number:
            device = _SYSTEM / "bus/pci/devices" / folder.name.lower()
            return int(_read(device / "numa_node") or -1)
    return -1


def _physical(cores: Collection[int]) -> list[list[int]]:
    """Return the hardware threads of each physical core, NUMA node by node."""
    node_of = {core: number for number, own in _nodes(cores).items() for core in own}
    physical: dict[str, list[int]] = {}
    for core in sorted(cores, key=lambda core: (node_of.get(core, 0), core)):
        physical.setdefault(_siblings(core), []).append(core)
    return list(physical.values())


def _siblings(core: int) -> str:
    """Return a name that all hardware threads of a physical core share."""
    topology = _SYSTEM / f"devices/system/cpu/cpu{core}/topology"
    return _read(topology / "thread_siblings_list") or str(core)


def _numbers(text: str) -> set[int]:
    """Return the numbers of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            found.update(range(int(first), int(last or first) + 1))
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def main(arguments: Sequence[str]) -> None:
    """Bind this process, and become the command."""
    binding, place, *line = arguments
    rank, ranks = map(int, place.split("/"))
    cores = os.sched_getaffinity(0)
    os.environ[VARIABLE] = ",".join(map(str, sorted(cores)))
    os.sched_setaffinity(0, cores_of(binding, rank, ranks, cores))
    try:
        os.execvp(line[0], line)
    except OSError as error:
        sys.exit(f"{line[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
