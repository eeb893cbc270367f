"""Which cores a rank is bound to: on machines of several shapes, and for real under hvdrun."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from hvdtrain.system import cores
from tests.environments import rest, rows
from tests.launching import run

TWO_NODES = [range(8), range(8, 16)]  # each of four physical cores with two threads
ALL = set(range(16))


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a machine: NUMA nodes, whose cores c and c + 4 are one physical core."""
    system = tmp_path / "devices/system"
    for number, node in enumerate(TWO_NODES):
        write(system / f"node/node{number}/cpulist", f"{node[0]}-{node[-1]}\n")
        for core in node:
            first = node[0] + (core - node[0]) % 4
            siblings = f"{first},{first + 4}\n"
            write(system / f"cpu/cpu{core}/topology/thread_siblings_list", siblings)
    monkeypatch.setattr(cores, "_SYSTEM", tmp_path)
    monkeypatch.setattr(cores, "_DRIVER", tmp_path / "gpus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def add_gpus(machine: Path, nodes: Sequence[int]) -> None:
    """Add a GPU for each of these NUMA nodes."""
    for number, node in enumerate(nodes):
        address = f"0000:{number + 1:02X}:00.0"
        for name, text in (
            (f"gpus/{address}/information", f"GPU UUID: \t GPU-{number}abc\n"),
            (f"bus/pci/devices/{address.lower()}/numa_node", f"{node}\n"),
        ):
            write(machine / name, text)


def bound(binding: str, ranks: int) -> str:
    """Return the cores of each rank."""
    return " ".join(text_of(cores.cores_of(binding, rank, ranks, ALL)) for rank in range(ranks))


def text_of(own: Iterable[int]) -> str:
    return ",".join(map(str, own))


FIRST, SECOND = map(text_of, TWO_NODES)
BOTH = f"{FIRST},{SECOND}"


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("binding", "own"),
    rows(f"""
    core | {BOTH}
    core | {FIRST} {SECOND}
    core | 0,1,4,5 2,3,6,7 8,9,12,13 10,11,14,15
    core | 0,4 1,5 2,6 3,7 8,12 9,13 10,14 11,15
    core | 0,1,4,5 2,3,6,7 8,9,12,13
    core | {BOTH} {BOTH} {BOTH} {BOTH} {BOTH} {BOTH} {BOTH} {BOTH} {BOTH}
    numa | {BOTH}
    numa | {FIRST} {FIRST} {SECOND} {SECOND}
    """),
)
def test_ranks_are_dealt_out_node_by_node(binding: str, own: str) -> None:
    assert bound(binding, len(own.split())) == own


@pytest.mark.parametrize(
    ("visible", "own"),
    [
        (None, f"{SECOND} {FIRST}"),
        ("1,0", f"{FIRST} {SECOND}"),
        ("GPU-2abc,GPU-1abc", f"{SECOND} {FIRST}"),
        ("", f"{FIRST} {SECOND}"),  # none: as without GPUs
        ("2,7", f"{SECOND} {BOTH}"),  # there is no GPU 7
    ],
)
def test_a_rank_goes_to_the_node_of_its_gpu(
    machine: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, own: str
) -> None:
    add_gpus(machine, [1, 0, 1])
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert bound("numa", 2) == own
    if visible != "2,7":  # one rank for each node: its share is the node
        assert bound("core", 2) == own


def test_a_gpu_of_no_node_changes_nothing(machine: Path) -> None:
    add_gpus(machine, [-1, -1])
    assert bound("core", 2) == f"{FIRST} {SECOND}"
    assert bound("numa", 2) == f"{BOTH} {BOTH}"


SAY = (
    "import json, os; from hvdtrain.job.world import detect; "
    "from hvdtrain.training.determinism import set_threads; "
    "print(json.dumps([sorted(os.sched_getaffinity(0)), set_threads(None, detect(), os.environ)]))"
)


@pytest.mark.parametrize("binding", ["core", rest("numa"), rest("none")])
def test_hvdrun_binds_and_threads_stay_the_share_of_the_host(binding: str) -> None:
    own = sorted(os.sched_getaffinity(0))
    line = f"hvdrun -np 2 --bind-to {binding} {sys.executable} -c".split()
    done = run([*line, SAY])
    assert done.code == 0, done.output
    found = [json.loads(text.partition(":")[2]) for text in sorted(done.lines("<stdout>:"))]
    expected = [cores.cores_of(binding, r, 2, own) if binding != "none" else own for r in (0, 1)]
    assert [bound for bound, _ in found] == expected
    threads = max(1, len(own) // 2)
    assert all(text.startswith(f"{threads} a rank (") for _, text in found), found
