"""Who watches whom: the table of docs/how-it-works.md, made from the constants of the code.

`python -m tests.test_who_watches` prints it. Each row names a test in which the watched one really
ends or stops.
"""

from __future__ import annotations

import pytest

from hvdtrain.job import elastic_world, launcher_watch
from hvdtrain.launch import event_loop, supervisor
from hvdtrain.liveness import hang_watch, monitor, peer_sockets
from hvdtrain.transports import heartbeat, shm_sync
from tests.environments import rows
from tests.launching import ROOT

# Who watches whom, how, after how many seconds it acts, what it does, and a test of that.
# ssh gives up after three missed replies: see launch/remote.py.
TABLE = f"""
each rank (`job.launcher_watch`) | its launcher: torchrun's agent, mpirun, horovodrun, hvdrun's \
supervisor | its process, every {launcher_watch._POLL_S:g} s \
| {launcher_watch._POLL_S + launcher_watch._GRACE_S:g} | names it, ends by SIGTERM, then SIGKILL \
| tests/launch/test_failure.py::test_ranks_end_with_their_launcher
hvdrun | the supervisor of each host, and ssh to it | their pipes; ssh asks every 10 s \
| at once; a dead link 30 s | names the host, ends the others within {event_loop.END_S:g} s \
| tests/launch/test_hosts.py::test_kill_9
a supervisor (hvdrun, one on each host) | hvdrun | its stdin | at once \
| SIGTERM to the ranks, SIGKILL after {supervisor.GRACE_S:g} s \
| tests/launch/test_hosts.py::test_kill_9
both processes of a supervisor | each other | the exit of a child; a pipe | at once \
| tells hvdrun through ssh's stderr, ends the ranks and all that they have started \
| tests/launch/test_launch.py::test_ranks_end_with_their_supervisor
a supervisor | its ranks | their exit | at once \
| hvdrun names the first rank with its exit code or signal \
| tests/death/test_launched.py::test_a_rank_ends_the_job
rank 0, and each rank rank 0 (the Monitor) | each other \
| a connection, a heartbeat every {monitor._TICK_S:g} s \
| at once; a lost host {peer_sockets.LOST_S} s \
| keeps why it is lost, for the hang watch and preemption \
| tests/launch/test_hangs.py::test_a_dead_link
a rank whose collective has failed (`hang_watch`) | all ranks | rank 0 asks each what it does \
| {hang_watch._STATES_S:g}; without rank 0 {hang_watch._VERDICT_S:g} \
| names the late rank, its host, step and Python line \
| tests/launch/test_hangs.py::test_a_stalled_data_loader
a rank that waits in `shm` or `mpi` | the ranks of its host | pidfd, every {shm_sync.CHECK_S:g} s \
| {shm_sync.CHECK_S:g} | names the rank that has ended; one that is stopped at `--timeout` \
| tests/death/test_death.py::test_the_others_fail
local rank 0 (on several hosts) | that of each other host \
| a connection, a row for each rank every {heartbeat.INTERVAL_S:g} s \
| at once; silent {heartbeat._SILENT_S:g} s; a lost host {peer_sockets.LOST_S} s \
| writes it to memory that its host's ranks read \
| tests/death/test_death.py::test_the_others_fail_in_two_network_namespaces
the engine of `hvd` | rank 0, and each other | a connection \
| at once; a lost host {peer_sockets.LOST_S} s | operations fail with the rank's number \
| tests/death/test_death.py::test_the_others_fail
elastic hvdrun | the supervisor of each host, and ssh to it \
| their pipes; a rank that waits asks it every {elastic_world._CHECK_S:g} s | at once \
| a new generation without it, or with another host \
| tests/launch/test_elastic.py::test_ranks_die_and_hosts_come
"""


def table() -> str:
    """Return the table as Markdown, without the tests."""
    head = "| who | watches whom | how | within s | and then |", "|---|---|---|---|---|"
    cells = (map(str, row.values[:-1]) for row in rows(TABLE))
    return "\n".join([*head, *(f"| {' | '.join(each)} |" for each in cells)])


def test_the_manual_has_the_table() -> None:
    assert table() in (ROOT / "docs/how-it-works.md").read_text()


@pytest.mark.parametrize("test", sorted({str(row.values[-1]) for row in rows(TABLE)}))
def test_each_row_has_a_test(test: str) -> None:
    path, _, name = test.partition("::")
    assert f"\ndef {name}(" in (ROOT / path).read_text()


if __name__ == "__main__":
    print(table())
