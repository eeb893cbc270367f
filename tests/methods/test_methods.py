"""The table of methods: each no says why. Each method trains and resumes in tests/parity."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.errors import InputError
from hvdtrain.training import methods
from hvdtrain.training.config import TrainConfig
from tests.methods import arms
from tests.methods.arms import TWO, on
from tests.methods.manual_table import table
from tests.parity.interruption import train_with
from tests.ranks import Ranks

REFUSED = [(method, backend) for method in methods.METHODS for backend in method.refused]


def chosen(method: methods.Method) -> TrainConfig:
    return TrainConfig(**arms.SETTINGS[method.name])


@pytest.mark.parametrize("method", methods.METHODS, ids=lambda method: method.name)
def test_each_method_is_chosen_by_its_options(method: methods.Method) -> None:
    assert method.is_chosen(chosen(method))
    assert not method.is_chosen(TrainConfig())


@pytest.mark.parametrize(
    ("method", "backend"), REFUSED, ids=lambda value: getattr(value, "name", value)
)
def test_a_refusal_says_why(method: methods.Method, backend: str) -> None:
    with pytest.raises(InputError) as refused:
        methods.check(chosen(method), backend)
    assert str(refused.value) == f"{method.option}: {method.refused[backend]}"
    assert "\n" not in str(refused.value)


PAIRS = [
    (method, other, need)
    for method, other in itertools.permutations(methods.METHODS, 2)
    for need in method.needs
    if need in other.lacks
]


@pytest.mark.parametrize(
    ("method", "other", "need"), PAIRS, ids=lambda value: getattr(value, "name", "")
)
def test_what_a_method_needs_and_another_lacks(
    method: methods.Method, other: methods.Method, need: methods.Need
) -> None:
    config = TrainConfig(**{**arms.SETTINGS[method.name], **arms.SETTINGS[other.name]})
    refused_by = {*method.refused, *other.refused}
    for backend in methods.BACKENDS:
        with pytest.raises(InputError) as refused:
            methods.check(config, backend)
        if backend not in refused_by:
            assert str(refused.value) == (
                f"{method.option} needs {need.value}; with {other.option}, {other.lacks[need]}; "
                "leave one of them out"
            )


def test_methods_that_need_nothing_of_each_other() -> None:
    config = TrainConfig(accumulate=2, clip_norm=1, ema=0.9, compression="bf16", keep_best="loss")
    methods.check(config, "ddp")
    methods.check(TrainConfig(bucket_mib=50), "ddp")
    for backend in methods.BACKENDS:
        methods.check(TrainConfig(), backend)


def test_the_manual_has_the_table() -> None:
    manual = (Path(hvdtrain.__file__).parents[1] / "docs" / "methods.md").read_text()
    assert table() in manual, "run: python -m tests.methods.manual_table"


@TWO
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("PowerSGD", "fp16 gradients", "resume   PowerSGD: the checkpoint's state is not used"),
        ("fp16 gradients", "PowerSGD", "PowerSGD: each rank's own state starts afresh"),
        ("PowerSGD", "PowerSGD", ""),
    ],
)
def test_a_resumed_run_may_have_another_method(
    ranks: Ranks, before: str, after: str, said: str, tmp_path: Path
) -> None:
    ranks.run(train_with, tmp_path, before, stop_at=7)
    found = ranks.run(train_with, tmp_path, after, resume="must")[0]
    assert len(found["digest"]) == 64
    printed = "\n".join(found["lines"])
    assert said in printed
    assert said or "afresh" not in printed


@on(("ddp-torchrun", 1))
def test_one_rank_sends_nothing_and_rounds_nothing(ranks: Ranks, tmp_path: Path) -> None:
    digests = {
        ranks.run(train_with, tmp_path / kind, "plain", compression=kind, epochs=1)[0]["digest"]
        for kind in ("none", "fp16", "bf16", "powersgd")
    }
    assert len(digests) == 1
