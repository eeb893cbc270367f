"""Options that make no sense are refused, by flag; threads, and the ledger of a run."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hvdtrain.errors import InputError
from hvdtrain.job import launcher_watch
from hvdtrain.job.world import World
from hvdtrain.system.provenance import variables, versions
from hvdtrain.training.config import SECTIONS, Interval, ScheduleOption, TrainConfig, flag
from hvdtrain.training.criterion import Criterion
from hvdtrain.training.determinism import set_threads
from hvdtrain.training.schedule import Ledger, lr_factors
from tests.messages import Message
from tests.runs import Values

FIELDS = dataclasses.fields(TrainConfig)
NOT_NEGATIVE = "workers warmup_steps checkpoint_every eval_every seed".split()


def refusal(**values: Any) -> str:
    with pytest.raises(InputError) as caught:
        TrainConfig(**values).check()
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "name", [item.name for item in FIELDS if re.search("int|float", str(item.type))]
)
def test_bounds(name: str) -> None:
    text = refusal(**{name: -1})
    if name in NOT_NEGATIVE:
        assert text == f"{flag(name)} -1 must not be negative"
        return
    assert text == f"{flag(name)} -1 must be greater than zero"
    assert refusal(**{name: 0}) == f"{flag(name)} 0 must be greater than zero"
    assert refusal(**{name: math.nan}) == f"{flag(name)} nan must be greater than zero"
    if name == "clip_norm":
        TrainConfig(clip_norm=math.inf).check()  # no clipping
    else:
        assert refusal(**{name: math.inf}).startswith(f"{flag(name)} inf must be at most ")


def test_grace() -> None:
    for given, seconds in ((5, 5), ("30", 30), ("30s", 30), ("1.5m", 90), ("2h", 7200)):
        config = TrainConfig(grace=given)
        config.check()
        assert config.grace_s() == seconds


def test_checkpoints_and_evaluations_are_due() -> None:
    intervals: dict[int | str, Interval] = {
        0: Interval(epochs=1),
        "0": Interval(epochs=1),
        5: Interval(steps=5),
        "500": Interval(steps=500),
        "20e": Interval(epochs=20),
        "15m": Interval(seconds=900),
        "1.5h": Interval(seconds=5400),
        "never": Interval(),
    }
    for given, interval in intervals.items():
        config = TrainConfig(checkpoint_every=given)
        config.check()
        assert config.checkpoint_interval() == interval
        if not interval.seconds:
            config = TrainConfig(eval_every=given)
            config.check()
            found = config.evaluation_interval()
            assert found == (Interval() if str(given) == "0" else interval)
            due = [step for step in range(1, 12) if found.after_step(step)]
            assert due == [5, 10] * (given == 5)


MISTAKES: dict[str, tuple[Any, ...]] = {
    "resume": ("auto",),  # it would make a new directory, find nothing there, and start afresh
    "grace": ("0s", "3d", "nan"),
    "schedule": (
        *("step:x", "step:1.5", "step:1,-2", "step:", "step:3:0", "step:3:x", "step:3:0.1:2"),
        *("plateau:loss", "plateau:loss:3:1", "plateau:rate:3", "cosine:3", "linear"),
    ),
    "early_stop": (
        *("loss", ":3", "loss:three", "loss:-1", "loss:²", "loss:best:3", "loss:0"),
        *("loss:9999999999", "shape:3", "loss:3:x"),
    ),
    "keep_best": ("loss:3", "accuracy_loss"),
    "ema": (1,),
    "checkpoint_every": ("0e", "1e3", 2.5, True, "0s"),
    "eval_every": ("2 epochs", "15m"),
    "eval_batch_size": (10**20,),
    "init_strict": (False,),  # no effect without another option
}
LEVELS = (("O0", "bf16"), ("O1", "fp32"), ("O2", "fp32"), ("O2", "fp64"), ("O3", "fp32"))


@pytest.mark.parametrize(
    "values",
    [
        *({name: value} for name, values in MISTAKES.items() for value in values),
        *({"opt_level": level, "precision": precision} for level, precision in LEVELS),
        {"batch_size": 2, "global_batch_size": 4},
        {"schedule": "one-cycle", "warmup_steps": 5},
    ],
    ids=str,
)
def test_what_makes_no_sense(values: Values, message: Message) -> None:
    message(refusal(**values))


@pytest.mark.parametrize("item", FIELDS, ids=lambda item: item.name)
def test_what_is_no_value_and_no_choice(item: Any) -> None:
    for nothing in (None, ""):
        values: Values = {item.name: nothing}
        if item.default == nothing:
            TrainConfig(**values).check()
        else:
            wanted = f"{flag(item.name)} {nothing!r} is not a value; leave the option out"
            assert refusal(**values) == wanted
    if choices := item.metadata["choices"]:
        wanted = f"{flag(item.name)} 'nonsense' is not one of: {', '.join(choices)}"
        assert refusal(**{item.name: "nonsense"}) == wanted


def test_what_is_close_to_it() -> None:
    TrainConfig(resume="auto", run_dir="runs/a").check()
    TrainConfig(resume="runs/a/checkpoints/step-00000010").check()


def test_huge_numbers_are_no_crash() -> None:
    huge = TrainConfig(epochs=10**30, max_steps=10**30, seed=10**30, global_batch_size=10**30)
    huge.check()
    assert huge.micro_batch(10) == 10**29


def test_every_option_is_in_one_section_of_the_help() -> None:
    names = " ".join(SECTIONS.values()).split()
    assert sorted(names) == sorted(item.name for item in FIELDS)


def test_schedules() -> None:
    def parsed(text: str) -> ScheduleOption:
        return TrainConfig(schedule=text).schedule_option()

    assert (
        parsed("step")
        == parsed("step: 60,30, 80 :0.1")
        == ScheduleOption("step", (30, 60, 80), 0.1)
    )
    assert parsed("step:2:3") == ScheduleOption("step", (2,), 3.0)
    assert parsed("plateau") == parsed("plateau:loss:10") == parsed("plateau:loss:min:10:0.1")
    loss, rate = Criterion("loss", "min", 0), Criterion("rate", "max", 4)
    assert parsed("plateau:loss:0:0.5") == ScheduleOption("plateau", (), 0.5, loss)
    assert parsed("plateau:rate:max:4") == ScheduleOption("plateau", (), 0.1, rate)


def test_micro_batch(message: Message) -> None:
    assert TrainConfig().micro_batch(7) == 32
    assert TrainConfig(batch_size=5).micro_batch(7) == 5
    assert TrainConfig(global_batch_size=24, accumulate=2).micro_batch(3) == 4
    odd = TrainConfig(global_batch_size=20, accumulate=2)
    for config in (TrainConfig(global_batch_size=3), odd):
        with message.raises(InputError):
            config.micro_batch(4)


def test_ranks_compare_every_option_that_changes_their_collectives() -> None:
    agreed = TrainConfig(lr=0.5).agreed()
    assert {flag(item.name) for item in FIELDS} - set(agreed) == {"--run-dir"}
    assert agreed["--lr"] == 0.5
    # Ranks that save at different steps would wait for each other for ever.
    assert "--checkpoint-every" in agreed


# The ledger


def test_the_ledger_of_an_accumulated_run(message: Message) -> None:
    factor = lr_factors(TrainConfig(schedule="cosine", warmup_steps=5), 150, 15)
    rates: Values = {"lr_at_start": [0.8 * factor(0)], "lr_at_end": [0.8 * factor(149)]}
    ledger = Ledger(8, 2, 4, 1000, -40, 15, 150, [0.1], [0.8], "linear", "cosine", 5, **rates)
    assert ledger.as_dict()["global_batch"] == 64
    assert ledger.as_dict()["lr_at_end"] == [pytest.approx(9.388e-5, rel=1e-4)]
    message("\n".join(ledger.lines()))


# The environment


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("expected", "given"),
    [
        ("3 a rank (--threads)", {"requested": 3, "omp": "2"}),
        ("2 a rank (OMP_NUM_THREADS)", {"omp": "2"}),
        # The one that torchrun sets is ignored, unless there is one rank.
        ("1 a rank (OMP_NUM_THREADS)", {"omp": "1", "local_size": 1}),
        ("1 a rank (OMP_NUM_THREADS)", {"omp": "1", "launcher": "openmpi"}),
        ("16 a rank (64 cores / 4)", {"omp": "1"}),
        ("16 a rank (64 cores / 4)", {"omp": "many"}),
        ("64 a rank (64 cores / 1)", {"local_size": 1, "launcher": "none"}),
        # Bound by its launcher: two ranks to a core each, to a socket each, two to each socket.
        ("1 a rank (bound to 1 of 128 cores)", {"own": 1, "launchers": 128, "local_size": 2}),
        ("16 a rank (32 cores / 2)", {"own": 16, "launchers": 32, "local_size": 2}),
        ("8 a rank (32 cores / 4)", {"own": 16, "launchers": 32}),
        # A cpuset of 8 of 128 cores, not bound; a launcher that cannot be found; two that do not
        # bind: slurmstepd may have all cores.
        ("1 a rank (8 cores / 8)", {"own": 8, "launchers": 8, "local_size": 8}),
        ("1 a rank (8 cores / 8)", {"own": 8, "launcher": "openmpi", "local_size": 8}),
        ("1 a rank (8 cores / 8)", {"own": 8, "launcher": "srun", "local_size": 8}),
        # In a container: launchers/kubernetes/mpijob.yaml.
        ("1 a rank (a quota of 4 of 64 cores / 4)", {"quota": 4.0}),
        ("1 a rank (a quota of 0.5 of 64 cores / 4)", {"quota": 0.5}),
        ("16 a rank (64 cores / 4)", {"quota": 64.0}),
    ],
    ids=str,
)
def test_threads(expected: str, given: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    """`launchers`: the cores of Open MPI's daemon; those of the others do not count."""
    host: Values = {
        "own": 64,
        "quota": None,
        "local_size": 4,
        "omp": "",
        "requested": None,
        **given,
    }
    launcher = host.get("launcher", "openmpi" if "launchers" in host else "torchrun")

    def first_ancestor_without(variable: str) -> Any:
        assert variable == "OMPI_COMM_WORLD_RANK=0"
        if launcher == "openmpi" and "launchers" not in host:
            raise psutil.NoSuchProcess(0)
        return SimpleNamespace(pid=77)

    cores = {0: host["own"], 77: host.get("launchers", 128)}
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores[pid])))
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(launcher_watch, "first_ancestor_without", first_ancestor_without)
    monkeypatch.setattr("hvdtrain.system.machine.cpu_quota", lambda: host["quota"])
    world = World(0, host["local_size"], 0, host["local_size"], launcher=launcher)
    assert set_threads(host["requested"], world, {"OMP_NUM_THREADS": host["omp"]}) == expected
    assert torch.get_num_threads() == int(expected.split()[0])


def test_records() -> None:
    env = {"NCCL_DEBUG": "INFO", "PATH": "x", "AWS_SECRET_KEY": "y", "OMP_NUM_THREADS": "2"}
    assert variables(env) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}
    assert versions()["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
