"""Random faults under every launcher and backend: what each one costs, and that none is lost.

    python benchmarks/chaos.py --rounds 25 --seed 7     append 25 rounds to runs/chaos.jsonl
    python benchmarks/chaos.py --summary                the table of all rounds

A round starts a training run on two ranks, sends one signal to a rank or to the launcher at a
random moment of a phase, waits for the end, and resumes the run if its launcher has not done so.
It must then have found: an end in time; no process and no file in /dev/shm left behind; a valid
newest checkpoint; the weights of an undisturbed run; and the cause in the output. Most ranks are
forked from a process that has imported torch (tests/forkserver.py). The seed and the number of a
round draw everything but the times of the machine: `--first 12 --rounds 1` repeats round 12.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hvdtrain.training import checkpoint  # noqa: E402
from tests.forkserver import warm  # noqa: E402
from tests.launching import (  # noqa: E402
    Started,
    clean_env,
    is_mapped,
    kill,
    members,
    no_shared_memory_left,
    started,
)

RESULTS = ROOT / "runs" / "chaos.jsonl"
TASK = f"{ROOT}/tests/launch/dying.py:Observed"
OPTIONS = (
    "--global-batch-size 32 --epochs 3 --checkpoint-every 5 --log-every 4 --threads 1 --timeout 10"
)
OF_OPEN_MPI = "vader_segment."  # how the names of its files in /dev/shm begin
END_S = 60.0  # from the fault to the end of the job, or of the job that was started again
START_S = 90.0
GONE_S = 15.0  # from the end of the launcher to that of all it has started
HVDRUN = f"{sys.executable} -m hvdtrain launch -np 2 --max-restarts 2 {{rank}}"
LAUNCHERS = {
    "torchrun": "torchrun --nproc-per-node 2 --shutdown-timeout 5 {rank}",
    "torchrun-restarts": "torchrun --nproc-per-node 2 --shutdown-timeout 5 --max-restarts 2 {rank}",
    "mpirun": "mpirun -np 2 {python} {rank}",
    "horovodrun": "horovodrun -np 2 --gloo {python} {rank}",
    "hvdrun-restarts": HVDRUN,
}
BACKENDS = {
    "torchrun": ("ddp", "compat"),
    "torchrun-restarts": ("ddp", "compat"),
    "mpirun": ("ddp", "compat", "horovod"),
    "horovodrun": ("horovod", "compat"),
    "hvdrun-restarts": ("ddp", "compat"),
}
WEIGHTS = {"hvdrun-restarts": 1}  # its own processes import torch; the others have 4
PHASES = ("start-up", "rendezvous", "training", "checkpoint", "evaluation", "end")
FAULTS = (
    "kill rank",
    "term rank",
    "stop rank",
    "usr1 rank",
    "kill launcher",
    "term launcher",
    "kill job",
)
NUMBERS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "stop": signal.SIGSTOP,
    "usr1": signal.SIGUSR1,
}
RANK = re.compile(r"\S*python\S* (-IS \S+/python )?(-u )?-m hvdtrain --backend")
PROBLEMS = ("hang", "leftover", "unusable", "wrong", "unnamed", "failed")


@dataclass
class Round:
    """One fault, drawn from its seed, and what came of it."""

    seed: int
    number: int
    commit: str
    launcher: str = ""
    backend: str = ""
    phase: str = ""
    fault: str = ""
    victim: int = 0
    is_warm: bool = True
    step: int = 0
    delay_s: float = 0.0
    outcome: str = ""
    """How the job ended: finished, restarted, saved, failed; `missed` if before the fault."""
    problems: list[str] = field(default_factory=list)
    why: str = ""
    ended_s: float | None = None
    """From the fault to the end of all processes, where the launcher does not start them again."""
    recovery_s: float | None = None
    """From the fault to the next step: with the start of a new job, where this program does it."""
    seconds: float = 0.0

    def draw(self, real_share: float) -> None:
        """Draw what to do. No rank is stopped before it has joined (it is then one that is late,
        until --timeout), nor after the last collective: no rank waits for it then, and its launcher
        does not look.
        """
        chance = random.Random(f"{self.seed}-{self.number}")
        weights = [WEIGHTS.get(name, 4) for name in LAUNCHERS]
        (self.launcher,) = chance.choices([*LAUNCHERS], weights)
        self.backend = chance.choice(BACKENDS[self.launcher])
        self.phase = chance.choice(PHASES)
        may_stop = self.phase not in ("start-up", "rendezvous", "end") and chance.random() < 0.5
        self.fault = chance.choice([f for f in FAULTS if may_stop or f != "stop rank"])
        self.victim = chance.randrange(2)
        self.step = chance.randrange(1, 24)
        self.delay_s = chance.uniform(0, 1.0 if self.phase == "start-up" else 0.05)
        self.is_warm = chance.random() >= real_share

    def add(self, problem: str, why: str) -> None:
        """Note one of PROBLEMS."""
        if problem not in self.problems:
            self.problems.append(problem)
            self.why = f"{self.why}; {why}" if self.why else why


class Job:
    """The training run of one round."""

    def __init__(self, one: Round, folder: Path, expected: str) -> None:
        self.one, self.folder, self.expected = one, folder, expected
        self.run_dir, self.output = folder / "run", ""
        self._events = folder / "events"
        self._events.touch()

    def command(self, resume: bool) -> list[str]:
        one = self.one
        words = ["-m", "hvdtrain", "--backend", one.backend, *OPTIONS.split(), "--task", TASK]
        words += ["--set", f"folder={self.folder}", "--run-dir", str(self.run_dir)]
        words += ["--resume", "auto"] if resume else []
        line = LAUNCHERS[one.launcher].format(python=sys.executable, rank="").split() + words
        if one.launcher == "hvdrun-restarts":
            own = LAUNCHERS[one.launcher].format(rank="").split()
            return [*own, *(warm([sys.executable, *words]) if one.is_warm else ["python", *words])]
        return warm(line) if one.is_warm else line

    def run(self) -> None:
        """Run, disturb and resume the job; note every problem."""
        one = self.one
        with started(self.command(resume=False)) as (process, log):
            hit_at = self._disturb(process, log)
            code = self._wait(process, END_S + (START_S if "restarts" in one.launcher else 0))
            self._check_gone(process)
            self.output = log.read_text(errors="replace")
            if code is None:
                one.add("hang", f"no end {END_S:g} s after the fault")
        if code == 0 and one.launcher == "horovodrun" and "stopped  at step" in self.output:
            code = 128 + signal.SIGTERM  # of its ranks; it may end with 0: see docs/files.md
        if hit_at is None:
            one.outcome = "missed"
        elif code == 0:
            one.outcome = "restarted" if "resume   " in self.output else "finished"
            if one.outcome == "restarted":
                one.recovery_s = self._recovered(hit_at)
        else:
            one.outcome = "saved" if "stopped  at step" in self.output else "failed"
            one.ended_s = round(time.time() - hit_at, 2)
            self._check_cause(self._about())
        self._check_checkpoints()
        if code != 0:
            self._resume(hit_at)
        self._check_result()

    # The fault

    def _disturb(self, process: Started, log: Path) -> float | None:
        """Send the signal in its phase; return the time, or None if the job has ended before."""
        one, deadline = self.one, time.monotonic() + START_S
        number = NUMBERS[one.fault.split()[0]]
        while (victim := self._victim(process, log)) is None:
            if process.poll() is not None:
                return None
            if time.monotonic() > deadline:
                one.add("hang", f"phase {one.phase} has not come")
                return None
            time.sleep(0.003)
        time.sleep(one.delay_s)
        try:
            if one.fault == "kill job":
                kill(process.marker)
            else:
                os.kill(victim, number)
        except ProcessLookupError:
            return None
        return time.time()

    def _victim(self, process: Started, log: Path) -> int | None:
        """Return the process to hit, once the phase has begun."""
        one = self.one
        is_launcher = not one.fault.endswith("rank")
        if one.phase == "start-up" and is_launcher:
            return process.pid
        if one.phase in ("start-up", "rendezvous"):
            ranks = sorted(p for p, line in members(process.marker).items() if RANK.match(line))
            if len(ranks) <= (one.victim if one.phase == "start-up" else 1):
                return None
            return process.pid if is_launcher else ranks[one.victim]
        lines = self._lines()
        begun = [words for words in lines if words[0] == one.phase]
        if one.phase == "end":
            begun = lines if "done     " in log.read_text(errors="replace") else []
        elif len(begun) < (2 * one.step if one.phase == "training" else 1 + one.step % 3):
            return None
        pids = {int(words[1]): int(words[2]) for words in lines}
        if not begun or one.victim not in pids:
            return None
        return process.pid if is_launcher else pids[one.victim]

    def _wait(self, process: Started, limit_s: float) -> int | None:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def _lines(self) -> list[list[str]]:
        """Return what the ranks have noted: phase, rank, process and time."""
        lines = [line.split() for line in self._events.read_text().splitlines()]
        return [words for words in lines if len(words) == 4]

    def _recovered(self, hit_at: float) -> float | None:
        """Return the seconds from the fault to the first step of a process that began later."""
        old = {words[2] for words in self._lines() if float(words[3]) <= hit_at}
        times = [float(words[3]) for words in self._lines() if words[2] not in old]
        return round(min(times) - hit_at, 2) if times else None

    def _resume(self, hit_at: float | None) -> None:
        """Start the job again, undisturbed."""
        with started(self.command(resume=True)) as (process, log):
            code = self._wait(process, START_S)
            self._check_gone(process)
            text = log.read_text(errors="replace")
        if hit_at is not None:
            self.one.recovery_s = self._recovered(hit_at)
        if code != 0:
            self.one.add("hang" if code is None else "failed", f"resuming ended with {code}")
            self.output += f"\n--- resumed\n{text}"

    # Checks

    def _check_gone(self, process: Started) -> None:
        deadline = time.monotonic() + GONE_S
        while left := members(process.marker):
            left = {pid: line for pid, line in left.items() if "resource_tracker" not in line}
            if not left:
                return
            if time.monotonic() > deadline:
                self.one.add("leftover", f"processes {left}")
                return
            time.sleep(0.05)

    def _check_checkpoints(self) -> None:
        found, skipped = checkpoint.newest(self.run_dir / "checkpoints")
        for path, why in skipped.items():
            self.one.add("unusable", f"{path.name}: {why}")
        if found is None and checkpoint.list_checkpoints(self.run_dir / "checkpoints"):
            self.one.add("unusable", "no checkpoint is valid")

    def _about(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.run_dir / "run.json").read_text())
        except OSError:  # it has ended before
            return {}
        return found

    def _check_result(self) -> None:
        about = self._about()
        if about.get("params_sha256") != self.expected:
            self.one.add("wrong", f"params_sha256 {about.get('params_sha256')}")
        steps = [
            json.loads(line)["step"]
            for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()
            if '"loss"' in line
        ]
        if steps != sorted(set(steps)) or not {4 * n for n in range(1, 7)} <= set(steps):
            self.one.add("wrong", f"metrics.jsonl has the steps {steps}")

    def _check_cause(self, about: dict[str, Any]) -> None:
        """The output or run.json names the rank, the signal or the launcher. Nothing is asked where
        the launcher is killed and its pipes are the output of its ranks, or no rank has started,
        or all processes are killed at once.
        """
        one, number = self.one, NUMBERS[self.one.fault.split()[0]]
        rank = rf"(rank|process|name)\s*:?\s*{one.victim}\b"
        pattern = f"{number.name}|code:? {128 + number}|signal {int(number)}\\b"
        if one.fault == "kill launcher":
            pattern = "so this rank ends too|lost contact|has ended|SystemExit: 143"
        elif one.fault.endswith("rank"):
            pattern += f"|{rank}"
        is_early = one.phase in ("start-up", "rendezvous") and one.fault.endswith("launcher")
        is_early |= one.fault == "kill launcher" and not one.launcher.startswith("torchrun")
        text = f"{self.output}\n{about.get('error')}"
        is_early |= one.fault == "kill job"
        if "done     " not in text and not is_early and not re.search(pattern, text, re.IGNORECASE):
            one.add("unnamed", f"no {pattern!r} in the output")


def left_by_open_mpi(one: Round) -> str:
    """Return how the names of files begin that Open MPI leaves in /dev/shm if mpirun is killed, and
    its library ends the ranks: any program of mpi4py shows it. In other rounds, no file's name.
    """
    is_killed = one.launcher == "mpirun" and one.fault in ("kill launcher", "kill job")
    return OF_OPEN_MPI if is_killed else "\0"


def undisturbed(folder: Path) -> str:
    """Return params_sha256 of a run that is left alone: the same for every backend at two ranks."""
    one = Round(0, 0, "", launcher="torchrun", backend="ddp")
    job = Job(one, folder, "")
    with started(job.command(resume=False)) as (process, log):
        if process.wait(START_S):
            raise SystemExit(log.read_text())
    return str(json.loads((job.run_dir / "run.json").read_text())["params_sha256"])


def play(seed: int, first: int, rounds: int, real_share: float, results: Path | None) -> int:
    """Play some rounds, append them to `results`, and return how many had a problem."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    bad = 0
    with tempfile.TemporaryDirectory(prefix="hvdtrain-chaos-") as folder:
        reference = Path(folder, "undisturbed")
        reference.mkdir()
        expected = undisturbed(reference)
        for number in range(first, first + rounds):
            one, begin = Round(seed, number, commit), time.monotonic()
            one.draw(real_share)
            place = Path(folder, str(number))
            place.mkdir()
            job = Job(one, place, expected)
            try:
                with no_shared_memory_left(but=left_by_open_mpi(one)):
                    job.run()
            except AssertionError as error:
                one.add("leftover", str(error))
            except Exception as error:  # of this program, or a file that is not there
                one.add("failed", f"{type(error).__name__}: {error}")
            for path in Path("/dev/shm").glob(f"{OF_OPEN_MPI}*"):
                if not is_mapped(path):  # nobody else removes them
                    path.unlink(missing_ok=True)
            one.seconds = round(time.monotonic() - begin, 1)
            said = f"{seed}-{number}  {one.launcher} {one.backend}  {one.phase}: {one.fault}"
            print(f"{said} {one.victim}  {one.outcome} {one.seconds} s  {one.problems} {one.why}")
            if one.problems:
                bad += 1
                print(job.output)
            sys.stdout.flush()
            if results is not None:
                results.parent.mkdir(exist_ok=True)
                with results.open("a") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
    return bad


def summary(results: Path) -> str:
    """Return the table of all rounds in a results file, by launcher."""
    rounds = [json.loads(line) for line in results.read_text().splitlines()]
    heads = ["launcher", "rounds", "missed", *PROBLEMS, "recovery s: median", "p95", "max"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in (*LAUNCHERS, "all"):
        mine = [one for one in rounds if name in ("all", one["launcher"])]
        counts = Counter(problem for one in mine for problem in one["problems"])
        missed = sum(one["outcome"] == "missed" for one in mine)
        times = sorted(one["recovery_s"] for one in mine if one["recovery_s"] is not None)
        shown = ["-"] * 3
        if times:
            at = (len(times) // 2, min(len(times) - 1, round(0.95 * len(times))), -1)
            shown = [f"{times[index]:.1f}" for index in at]
        cells = [name, len(mine), missed, *(counts[problem] for problem in PROBLEMS), *shown]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> Any:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--first", type=int, default=0, help="the number of the first round")
    parser.add_argument(
        "--real", type=float, default=0.1, help="share of rounds with new processes"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args(arguments)
    if options.summary:
        print(summary(options.results))
        return 0
    os.environ.update(clean_env({"OMPI_MCA_odls_base_sigkill_timeout": "3"}))
    print(f"seed {options.seed}")
    return play(options.seed, options.first, options.rounds, options.real, options.results)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
