"""The death of a rank, without a launcher, which would end the others before they could report.

A row of the table is a layer, what all ranks do there, a fault, and the rank that has it. The
others must fail with the error of the layer, end cleanly, and leave nothing behind.
"""

from __future__ import annotations

import random
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.environments import EXHAUSTIVE, rows
from tests.forkserver import warm
from tests.hvd.behaviour import SHUT_DOWN
from tests.launch.test_rendezvous import two_hosts  # noqa: F401  a fixture
from tests.launching import no_shared_memory_left, run
from tests.transports.jobs import ADDRESS, Answer, answers, on_hosts, run_ranks

LIMIT_S = 60.0
STOP_TIMEOUT_S = "3"  # of the operations of a job in which a rank is stopped


@dataclass(frozen=True)
class Row:
    """One death: in which layer and transport, what the ranks do, the fault, and who has it."""

    layer: str
    where: str
    fault: str
    victim: int
    n: int = 3
    per_host: int = 0
    """The ranks of each host, where there are to be several; between them are connections."""
    seed: int = 0
    old: bool = False
    """Whether Python is one of RHEL 8 or conda, without os.pidfd_open and os.memfd_create."""
    pure: bool = False
    """Whether ranks meet by semaphores, as where page.c was not compiled."""


SHM, MPI, HVD_GLOO = "transport shm", "transport mpi4py", "hvd gloo"
BLOCKING = "in_a_blocking_operation"


def deaths(text: str, pure: bool = False) -> list[ParameterSet]:
    """Return the deaths of a table, with their marks; if `pure`, those of `shm`, for the rest."""
    found = []
    for cells in rows(text):
        layer, where, fault, victim, n, per_host, *old = map(str, cells.values)
        row = Row(layer, where, fault, int(victim), int(n), int(per_host), 0, bool(old), pure)
        marks = [EXHAUSTIVE] if pure else cells.marks
        if not pure or "shm" in layer:
            found.append(
                pytest.param(row, marks=marks, id="-".join(map(str, cells.values)) + "-pure" * pure)
            )
    return found


# The layer, what the ranks do, the fault, who has it, of how many, and how many are on each host.
# `make test-rest` has every place and every fault of it, in each layer once.
ROWS = """
transport shm    | in_a_blocking_operation | kill  | 0 | 3 | 0
transport shm    | in_an_operation_by_gloo | kill  | 1 | 2 | 0
transport shm    | in_a_blocking_operation | kill  | 1 | 3 | 0 | old
transport shm    | with_many_in_flight     | stop  | 1 | 2 | 0
transport shm    | with_a_late_rank        | leave | 0 | 3 | 0
transport shm    | in_a_big_operation      | kill  | 3 | 4 | 2
transport mpi4py | in_a_blocking_operation | stop  | 0 | 2 | 0
hvd shm          | in_a_blocking_operation | kill  | 1 | 3 | 0
hvd shm          | in_a_step               | kill  | 2 | 3 | 0
hvd gloo         | in_a_step               | kill  | 0 | 3 | 0  # the two left: see gloo.py
hvd shm          | in_join                 | kill  | 1 | 2 | 0
hvd shm          | with_pending_operations | leave | 1 | 2 | 0
hvd shm          | with_pending_operations | exit  | 0 | 2 | 0
transport shm    | with_many_in_flight     | stop  | 2 | 3 | 1 | rest
transport shm    | in_a_big_operation      | kill  | 2 | 3 | 0 | rest
transport shm    | in_a_big_operation      | stop  | 1 | 3 | 0 | rest
transport shm    | with_many_in_flight     | kill  | 0 | 3 | 0 | rest
transport shm    | in_an_operation_by_gloo | stop  | 2 | 3 | 0 | rest
transport shm    | in_a_blocking_operation | kill  | 0 | 4 | 2 | rest
transport shm    | in_an_operation_by_gloo | stop  | 1 | 4 | 2 | rest
transport mpi4py | in_a_big_operation      | kill  | 2 | 3 | 0 | rest
transport mpi4py | in_a_big_operation      | stop  | 0 | 3 | 0 | rest
transport mpi4py | in_an_operation_by_gloo | stop  | 2 | 3 | 0 | rest
hvd shm          | in_a_step               | kill  | 0 | 2 | 0 | rest
hvd shm          | in_a_step               | raise | 1 | 2 | 0 | rest
hvd gloo         | in_a_step               | kill  | 2 | 3 | 0 | rest
"""


@pytest.mark.parametrize("row", [*deaths(ROWS), *deaths(ROWS, pure=True)])
def test_the_others_fail(row: Row, tmp_path: Path) -> None:
    play(row, tmp_path)


ON_HOSTS = """
transport shm | in_a_big_operation  | kill | 3 | 4 | 2 | rest
transport shm | in_a_big_operation  | stop | 0 | 4 | 2 | rest
transport shm | with_many_in_flight | stop | 3 | 4 | 2 | rest
"""


@pytest.mark.parametrize("row", deaths(ON_HOSTS))
def test_the_others_fail_in_two_network_namespaces(
    row: Row,
    tmp_path: Path,
    two_hosts: tuple[str, str],  # noqa: F811
) -> None:
    play(row, tmp_path, two_hosts)


@pytest.mark.soak
@pytest.mark.parametrize("where", [SHM, MPI, "hosts"])
def test_chaos(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """At random moments of random collectives."""
    hosts = request.getfixturevalue("two_hosts") if where == "hosts" else None
    chance = random.Random(4)
    for turn in range(3):
        n = 4 if hosts else chance.choice([2, 3])
        victim, fault = chance.randrange(n), chance.choice(["kill", "stop"])
        layer = SHM if hosts else where
        row = Row(layer, "in_any", fault, victim, n, 2 if hosts else 0, chance.randrange(10**6))
        folder = tmp_path / str(turn)
        folder.mkdir()
        print(row)  # in the report of a failure
        play(row, folder, hosts)


def play(row: Row, folder: Path, hosts: tuple[str, str] | None = None) -> None:
    """Run the job of a row, and check how the ranks ended."""
    output = run_job(row, folder, hosts)
    assert (folder / "died").exists(), output
    if (row.layer, row.fault) == (MPI, "kill"):  # mpirun has ended the others, wherever they were
        return
    for rank, answer in enumerate(answers(folder, row.n)):
        if rank != row.victim:
            assert answer, f"rank {rank} has not answered:\n{output}"
            check_survivor(row, answer)


def check_survivor(row: Row, answer: Answer) -> None:
    """The right error, which names the victim, now and later; and nothing of the engine is left."""
    text = answer["text"]
    if row.layer.startswith("hvd"):
        assert answer["kind"] == "HorovodInternalError", answer
        assert text.startswith(SHUT_DOWN), answer
        assert answer["next"].startswith(SHUT_DOWN), answer
        # Over Gloo, one that closes a group may be left: see ProcessGroups._close.
        may_stay = {"hvd-close"} if row.layer == HVD_GLOO else set()
        assert set(answer["threads"]) <= may_stay, answer
        if (row.where, row.fault) == (BLOCKING, "kill"):
            assert f"Rank {row.victim} (process" in text, answer
        return
    assert answer["kind"] == "PeerLost", answer
    assert answer["next"] != "it works again", answer
    reason, _, _ = text.partition("; rank ")
    named = re.findall(r"rank (\d+)", reason.rpartition(" has given up, for ")[2])
    assert named == [str(row.victim)], answer
    if row.fault == "stop":
        call = r"\w+\(" if row.where == "in_any" else r"(all_reduce|gather)\(float32\["
        assert re.match(call, text), answer
        assert f"{STOP_TIMEOUT_S} s" in text, answer
        if row.per_host:
            assert "; rank " in text, "others are named, too"
    elif row.fault == "leave":
        assert f"rank {row.victim} (process " in text, answer
        assert "has left" in text, answer
    elif row.per_host:
        assert "has ended" in text, answer


def run_job(row: Row, folder: Path, hosts: tuple[str, str] | None) -> str:
    """Run a row to the end of its job. Return its output."""
    words = [*row.layer.split(), row.where, folder, row.victim, row.fault, row.seed]
    program = [sys.executable, "-m", "tests.death.rank", *map(str, words)]
    env = {
        "HVDTRAIN_TRANSPORT": row.layer.split()[1],  # of hvd
        "TEST_TIMEOUT_S": STOP_TIMEOUT_S if row.fault == "stop" else "300",
        "TEST_OLD_PYTHON": "1" * row.old,
        "HVDTRAIN_PURE_PYTHON": "1" * row.pure,
    }
    if row.layer == MPI:  # mpirun ends the job when a rank dies or fails
        with no_shared_memory_left():
            finished = run(warm(["mpirun", "-np", str(row.n), *program]), LIMIT_S, env=env)
        assert finished.code != 0, finished.output
        return finished.output
    if hosts is not None:
        inside, env = on_hosts(hosts, [[0, 1], [2, 3]]), {**env, **ADDRESS}
    else:  # with the local rank of a host of so many ranks
        local_size = row.per_host or row.n
        inside = [["env", f"LOCAL_RANK={rank % local_size}"] for rank in range(row.n)]
        env["LOCAL_WORLD_SIZE"] = str(local_size)
    codes: list[int | None] = [0] * row.n
    codes[row.victim] = {"kill": -signal.SIGKILL, "raise": 1, "stop": None}.get(row.fault, 0)
    outputs = run_ranks([warm([*each, *program]) for each in inside], codes, LIMIT_S, **env)
    for rank, text in enumerate(outputs):
        assert rank == row.victim or "Traceback" not in text, text
    return "".join(outputs)
