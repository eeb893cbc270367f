"""Options that make no sense are refused, by flag; threads, and the ledger of a run."""

from __future__ import annotations

import dataclasses
import math
import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hvdtrain.errors import InputError
from hvdtrain.job.world import World
from hvdtrain.system.provenance import variables, versions
from hvdtrain.training.config import SECTIONS, Interval, ScheduleOption, TrainConfig, flag
from hvdtrain.training.criterion import Criterion
from hvdtrain.training.determinism import set_threads
from hvdtrain.training.schedule import Ledger, lr_factors
from tests.messages import Message

FIELDS = dataclasses.fields(TrainConfig)
NUMBERS = [
    item.name
    for item in FIELDS
    if isinstance(item.type, str) and ("int" in item.type or "float" in item.type)
]
NOT_NEGATIVE = "workers warmup_steps checkpoint_every eval_every seed".split()
CHOICES = [item.name for item in FIELDS if item.metadata["choices"]]


def make(**values: Any) -> TrainConfig:
    return TrainConfig(**values)


def refusal(**values: Any) -> str:
    with pytest.raises(InputError) as caught:
        make(**values).check()
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", NUMBERS)
def test_bounds(name: str) -> None:
    text = refusal(**{name: -1})
    if name in NOT_NEGATIVE:
        assert text == f"{flag(name)} -1 must not be negative"
        return
    assert text == f"{flag(name)} -1 must be greater than zero"
    assert refusal(**{name: 0}) == f"{flag(name)} 0 must be greater than zero"
    assert refusal(**{name: math.nan}) == f"{flag(name)} nan must be greater than zero"
    if name == "clip_norm":
        make(clip_norm=math.inf).check()  # no clipping
    else:
        assert refusal(**{name: math.inf}).startswith(f"{flag(name)} inf must be at most ")


@pytest.mark.parametrize(
    ("given", "seconds"), [(5, 5), ("30", 30), ("30s", 30), ("1.5m", 90), ("2h", 7200)]
)
def test_grace(given: int | str, seconds: float) -> None:
    make(grace=given).check()
    assert make(grace=given).grace_s() == seconds


@pytest.mark.parametrize(
    ("given", "interval"),
    [
        (0, Interval(epochs=1)),
        ("0", Interval(epochs=1)),
        (5, Interval(steps=5)),
        ("500", Interval(steps=500)),
        ("20e", Interval(epochs=20)),
        ("15m", Interval(seconds=900)),
        ("1.5h", Interval(seconds=5400)),
        ("never", Interval()),
    ],
)
def test_checkpoints_and_evaluations_are_due(given: int | str, interval: Interval) -> None:
    config = make(checkpoint_every=given)
    config.check()
    assert config.checkpoint_interval() == interval
    if not interval.seconds:
        config = make(eval_every=given)
        config.check()
        found = config.evaluation_interval()
        assert found == (Interval() if str(given) == "0" else interval)
        assert [step for step in range(1, 12) if found.after_step(step)] == [5, 10] * (given == 5)


REFUSED: list[dict[str, Any]] = [
    {"batch_size": 2, "global_batch_size": 4},
    {"resume": "auto"},  # it would make a new directory, find nothing there, and start afresh
    *({"grace": given} for given in ("0s", "3d", "nan")),
    *(
        {"schedule": text}
        for text in (
            *("step:x", "step:1.5", "step:1,-2", "step:", "step:3:0", "step:3:x", "step:3:0.1:2"),
            *("plateau:loss", "plateau:loss:3:1", "plateau:rate:3", "cosine:3", "linear"),
        )
    ),
    {"schedule": "one-cycle", "warmup_steps": 5},
    *(
        {"early_stop": text}
        for text in (
            *("loss", ":3", "loss:three", "loss:-1", "loss:²", "loss:best:3", "loss:0"),
            *("loss:9999999999", "shape:3", "loss:3:x"),
        )
    ),
    {"keep_best": "loss:3"},
    {"keep_best": "accuracy_loss"},
    {"ema": 1},
    *(
        {"opt_level": level, "precision": precision}
        for level, precision in (
            *(("O0", "bf16"), ("O1", "fp32"), ("O2", "fp32")),
            *(("O2", "fp64"), ("O3", "fp32")),
        )
    ),
    *({"checkpoint_every": given} for given in ("0e", "1e3", 2.5, True)),
    {"checkpoint_every": "0s"},
    {"eval_every": "2 epochs"},
    {"eval_every": "15m"},
    {"eval_batch_size": 10**20},
    # Options that have no effect without another one.
    {"init_strict": False},
]


@pytest.mark.parametrize("values", REFUSED, ids=str)
def test_what_makes_no_sense(values: dict[str, Any], message: Message) -> None:
    message(refusal(**values))


def test_nothing_is_no_value_of_an_option_that_has_a_default() -> None:
    for item in FIELDS:
        for nothing in (None, ""):
            if item.default == nothing:
                make(**{item.name: nothing}).check()
            else:
                wanted = f"{flag(item.name)} {nothing!r} is no value; leave it out"
                assert refusal(**{item.name: nothing}) == wanted


def test_what_is_close_to_it() -> None:
    make(resume="auto", run_dir="runs/a").check()
    make(resume="runs/a/checkpoints/step-00000010").check()


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str) -> None:
    (item,) = (item for item in FIELDS if item.name == name)
    text = refusal(**{name: "nonsense"})
    assert text == f"{flag(name)} 'nonsense' is not one of: {', '.join(item.metadata['choices'])}"


def test_huge_numbers_are_no_crash() -> None:
    huge = make(epochs=10**30, max_steps=10**30, seed=10**30, global_batch_size=10**30)
    huge.check()
    assert huge.micro_batch(10) == 10**29


def test_every_option_is_in_one_section_of_the_help() -> None:
    names = " ".join(SECTIONS.values()).split()
    assert sorted(names) == sorted(item.name for item in dataclasses.fields(TrainConfig))


def test_schedules() -> None:
    def parsed(text: str) -> ScheduleOption:
        return make(schedule=text).schedule_option()

    assert parsed("step") == parsed("step: 60,30, 80 :0.1")
    assert parsed("step") == ScheduleOption("step", (30, 60, 80), 0.1)
    assert parsed("step:2:3") == ScheduleOption("step", (2,), 3.0)
    assert parsed("plateau") == parsed("plateau:loss:10") == parsed("plateau:loss:min:10:0.1")
    loss, rate = Criterion("loss", "min", 0), Criterion("rate", "max", 4)
    assert parsed("plateau:loss:0:0.5") == ScheduleOption("plateau", (), 0.5, loss)
    assert parsed("plateau:rate:max:4") == ScheduleOption("plateau", (), 0.1, rate)


def test_micro_batch() -> None:
    assert make().micro_batch(7) == 32
    assert make(batch_size=5).micro_batch(7) == 5
    assert make(global_batch_size=24, accumulate=2).micro_batch(3) == 4
    with pytest.raises(InputError) as caught:
        make(global_batch_size=20, accumulate=2).micro_batch(3)
    assert str(caught.value) == (
        "--global-batch-size 20 is not a multiple of 3 ranks x 2 accumulated micro-batches = 6"
    )
    with pytest.raises(InputError):
        make(global_batch_size=3).micro_batch(4)


def test_ranks_compare_every_option_that_changes_their_collectives() -> None:
    agreed = make(lr=0.5).agreed()
    assert {flag(item.name) for item in FIELDS} - set(agreed) == {"--run-dir"}
    assert agreed["--lr"] == 0.5
    # Ranks that save at different steps would wait for each other for ever.
    assert "--checkpoint-every" in agreed


# The ledger


def test_the_ledger_of_an_accumulated_run(message: Message) -> None:
    factor = lr_factors(TrainConfig(schedule="cosine", warmup_steps=5), 150, 15)
    rates: dict[str, Any] = {"lr_at_start": [0.8 * factor(0)], "lr_at_end": [0.8 * factor(149)]}
    ledger = Ledger(8, 2, 4, 1000, -40, 15, 150, [0.1], [0.8], "linear", "cosine", 5, **rates)
    assert ledger.as_dict()["global_batch"] == 64
    assert ledger.as_dict()["lr_at_end"] == [pytest.approx(9.388e-5, rel=1e-4)]
    message("\n".join(ledger.lines()))


# The environment


@pytest.fixture
def threads() -> Any:
    was = torch.get_num_threads()
    yield
    torch.set_num_threads(was)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("requested", "launcher", "given", "expected"),
    [
        (3, "none", "2", "3 a rank (--threads)"),
        (None, "none", "2", "2 a rank (OMP_NUM_THREADS)"),
        (None, "openmpi", "1", "1 a rank (OMP_NUM_THREADS)"),
        (None, "torchrun", "2", "2 a rank (OMP_NUM_THREADS)"),
    ],
)
def test_threads(requested: int | None, launcher: str, given: str, expected: str) -> None:
    world = World(0, 2, 0, 2, launcher=launcher)
    assert set_threads(requested, world, {"OMP_NUM_THREADS": given}) == expected
    assert torch.get_num_threads() == int(expected.split()[0])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("given", ["1", "", "many"])
def test_the_one_thread_that_torchrun_sets_is_ignored(given: str) -> None:
    world = World(0, 1000, 0, 1000, launcher="torchrun")
    assert set_threads(None, world, {"OMP_NUM_THREADS": given}).startswith("1 a rank (")
    alone = set_threads(None, World(), {"OMP_NUM_THREADS": "" if given == "1" else given})
    assert "cores / 1)" in alone


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("launcher", "own", "launchers", "local_size", "expected"),
    [
        ("openmpi", 1, 128, 2, "1 a rank (bound to 1 of 128 cores)"),  # two ranks: to a core each
        ("openmpi", 16, 32, 2, "16 a rank (32 cores / 2)"),  # to a socket each
        ("openmpi", 16, 32, 4, "8 a rank (32 cores / 4)"),  # two ranks to each socket
        ("openmpi", 8, 8, 8, "1 a rank (8 cores / 8)"),  # a cpuset of 8 of 128 cores, not bound
        ("openmpi", 8, None, 8, "1 a rank (8 cores / 8)"),  # the launcher cannot be found
        ("torchrun", 8, 128, 8, "1 a rank (8 cores / 8)"),
        ("srun", 8, 128, 8, "1 a rank (8 cores / 8)"),  # slurmstepd may have all cores
    ],
)
def test_threads_of_a_rank_that_its_launcher_has_bound(
    launcher: str,
    own: int,
    launchers: int | None,
    local_size: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first_ancestor_without(variable: str) -> Any:
        assert variable == "OMPI_COMM_WORLD_RANK=0"
        if launchers is None:
            raise psutil.NoSuchProcess(0)
        return SimpleNamespace(pid=77)

    cores = {0: own, 77: launchers}
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores[pid] or 0)))
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(
        "hvdtrain.job.launcher_watch.first_ancestor_without", first_ancestor_without
    )
    monkeypatch.setattr("hvdtrain.job.world._launch_env", {})
    world = World(0, local_size, 0, local_size, launcher=launcher)
    assert set_threads(None, world, {}) == expected


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        (4.0, "1 a rank (a quota of 4 of 64 cores / 4)"),  # launchers/kubernetes/mpijob.yaml
        (9.5, "2 a rank (a quota of 9.5 of 64 cores / 4)"),
        (0.5, "1 a rank (a quota of 0.5 of 64 cores / 4)"),
        (64.0, "16 a rank (64 cores / 4)"),
        (None, "16 a rank (64 cores / 4)"),
    ],
)
def test_threads_of_ranks_in_a_container(
    quota: float | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr("hvdtrain.system.machine.cpu_quota", lambda: quota)
    assert set_threads(None, World(0, 4, 0, 4, launcher="torchrun"), {}) == expected


def test_records() -> None:
    env = {"NCCL_DEBUG": "INFO", "PATH": "x", "AWS_SECRET_KEY": "y", "OMP_NUM_THREADS": "2"}
    assert variables(env) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}
    assert versions()["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
