"""The launcher scripts: what they would run. test_parity.py runs them."""

from __future__ import annotations

import shlex
from itertools import takewhile
from pathlib import Path

import pytest

from tests.environments import rows
from tests.launching import ROOT, first_on_path, program, run, succeed, variables

SCRIPTS = ROOT / "launchers"
OPTION_OF = {"pbs.sh": "PBS", "lsf.sh": "BSUB", "flux.sh": "flux:", "slurm.sbatch": "SBATCH"}
"""How the options of each scheduler begin."""


def dry_run(name: str, *arguments: str, **env: str) -> list[str]:
    """The command that the script prints, as words."""
    done = run(["bash", SCRIPTS / name, *arguments], env={"DRY_RUN": "1", **env})
    (line,) = succeed(done).splitlines()
    return shlex.split(line)


SEVERAL = "NP=8 NNODES=2 NODE_RANK=1 MASTER_ADDR=host0"
TWO_HOSTS = "NP=4 HOSTS=host0:2,host1:2"
# A script, its environment, and what it runs, before its arguments.
PRINTED = f"""
torchrun.sh   | | torchrun --standalone --nproc-per-node 1 -m hvdtrain
torchrun.sh   | {SEVERAL} | torchrun --nnodes 2 --node-rank 1 --master-addr host0 \
                --master-port 29500 --nproc-per-node 8 -m hvdtrain
horovodrun.sh | NP=2 | horovodrun -np 2 hvdtrain
horovodrun.sh | {TWO_HOSTS} | horovodrun -np 4 -H host0:2,host1:2 hvdtrain
mpirun.sh     | NP=2 | mpirun -np 2 --bind-to none hvdtrain
slurm.sbatch  | | hvdrun --rsh srun hvdtrain
pbs.sh        | | hvdrun hvdtrain
lsf.sh        | | hvdrun hvdtrain
flux.sh       | | flux run --nodes 1 --tasks-per-node 8 --setopt=exit-on-error \
                --setopt=cpu-affinity=off bash -euc flux.sh hvdtrain
"""


@pytest.mark.parametrize(("name", "env", "printed"), rows(PRINTED))
def test_a_script_prints_its_command(name: str, env: str, printed: str) -> None:
    """Its arguments reach hvdtrain unchanged. flux.sh has a function between them, as text."""
    odd = ["--set", "name=two words", "--run-dir", "it's $HOME; *", "--config", ""]
    words = [word for word in dry_run(name, *odd, **variables(env)) if "run_as_rank" not in word]
    assert words == [*printed.split(), *odd]


@pytest.mark.parametrize("missing", ["NODE_RANK", "MASTER_ADDR"])
def test_torchrun_asks_for_what_several_hosts_need(missing: str) -> None:
    env = variables(f"{SEVERAL} DRY_RUN=1")
    del env[missing]
    done = run(["bash", SCRIPTS / "torchrun.sh"], env=env)
    assert done.code != 0
    assert missing in done.output


def test_mpirun_passes_variables_to_other_hosts() -> None:
    exported = variables("PYTHONPATH=/src HVDTRAIN_EPOCHS=1 HOROVOD_CYCLE_TIME=2 OMP_NUM_THREADS=1")
    env = variables(f"{TWO_HOSTS} LD_LIBRARY_PATH=")
    command = dry_run("mpirun.sh", **env, **exported)
    assert command[:7] == ["mpirun", "-np", "4", "--bind-to", "none", "-H", "host0:2,host1:2"]
    assert command[-1] == "hvdtrain"
    passed = dict(zip(command[8:-1:2], command[7:-1:2], strict=True))
    assert {"PATH", *exported} <= passed.keys()
    assert "LD_LIBRARY_PATH" not in passed, "mpirun complains of an empty one"
    assert set(passed.values()) == {"-x"}


QUEUED_AGAIN = """
0   |      |
1   |      |
143 |      |
143 | USR1 | requeue 17
143 | TERM |
3   | USR1 |
"""


@pytest.mark.parametrize(("code", "signal_", "said"), rows(QUEUED_AGAIN))
def test_slurm_queues_a_preempted_job_again(
    code: str, signal_: str, said: str, tmp_path: Path
) -> None:
    """Not a cancelled one, and not one that has failed: test_slurm.py runs it under Slurm."""
    ends = f"trap 'exit {code}' TERM"  # between two sleeps: `wait` may miss a signal before it
    signalled = f"{ends}; kill -{signal_} $PPID; while :; do sleep 0.05; done"
    program(tmp_path / "hvdrun", signalled if signal_ else f"exit {code}")
    asked = tmp_path / "asked"
    asked.touch()
    program(tmp_path / "scontrol", f'echo "$@" >> {asked}')
    env = {**first_on_path(tmp_path), "SLURM_JOB_ID": "17"}
    assert run(["bash", SCRIPTS / "slurm.sbatch"], env=env).code == int(code)
    assert asked.read_text().strip() == said


@pytest.mark.parametrize(("nodes", "host"), [(1, "localhost"), (2, "node7")])
def test_flux_sets_the_variables_of_a_rank(nodes: int, host: str, tmp_path: Path) -> None:
    """In a task of `flux run`; those of another job do not count."""
    program(tmp_path / "flux", '[ "$*" = "hostlist --nth=0 f7" ] && echo node7')
    task = "FLUX_TASK_RANK=3 FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=1 FLUX_JOB_ID=f7 LOCAL_WORLD_SIZE=9"
    env = variables(f"{task} FLUX_JOB_NNODES={nodes}") | first_on_path(tmp_path)
    found = succeed(run(["bash", SCRIPTS / "flux.sh", "env"], env=env)).splitlines()
    expected = f"RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR={host} MASTER_PORT=25420"
    assert {*expected.split()} <= {*found}, found
    assert not any(line.startswith("LOCAL_WORLD_SIZE") for line in found)


@pytest.mark.parametrize("name", OPTION_OF)
def test_a_scheduler_reads_its_options_from_the_head(name: str) -> None:
    """It stops looking at the first line that is neither empty nor a comment."""
    first, *lines = (SCRIPTS / name).read_text().splitlines()
    assert first == "#!/bin/bash"
    option = f"#{OPTION_OF[name]}"
    head = takewhile(lambda line: line[:1] in "#", lines)
    read = [line for line in head if line.startswith(option)]
    assert len(read) >= 3
    assert read == [line for line in lines if line.startswith(option)]
