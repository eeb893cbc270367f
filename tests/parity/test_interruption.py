"""An interrupted run ends as one that was left alone: sample order, rates, records, checkpoint.

One table: kinds of interruption x configurations x backends, in pairs. The kinds are described in
interruption.py; what a resumed run may change is in test_resume.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TWO_RANKS
from tests.methods import arms
from tests.parity.interruption import (
    CONFIGURATIONS,
    DATA,
    At,
    end,
    request,
    signals,
    stop,
    train_with,
)
from tests.ranks import ARMS, Ranks
from tests.runs import Values, bits_of, evaluations, records, run_json, saved_parts

pytestmark = pytest.mark.usefixtures("one_thread")

Kind = Callable[..., Values]
SINGLE, DDP = ("single", 1), ("ddp-torchrun", 2)
# Of each backend one launcher; real Horovod, which is slow, has each method on one of two arms.
OURS = [SINGLE, DDP, ("compat-torchrun", 2)]
REAL_HOROVOD = [("horovod-gloo", 2), ("horovod-mpi", 3)]
SLOW = {*list(arms.SETTINGS)[::2]}
# On three the order of additions counts: it must not depend on when the run was started.
THREE_RANKS = [(name, 3) for name in ("ddp-torchrun", "compat-torchrun")]


def row(arm: tuple[str, int], kind: Kind, at: At, name: str, in_make_test: bool = True) -> Any:
    marks = [] if in_make_test else [pytest.mark.exhaustive]
    if arm in REAL_HOROVOD and name in SLOW:
        marks.append(pytest.mark.slow)
    return pytest.param(arm, kind, at, name, marks=marks)


def rows() -> list[Any]:
    """Every step of a plain run; every configuration by one kind, in turn; every backend by a stop,
    which ends it. `make test` has each step's place in an epoch of four steps, each configuration
    and each backend once.
    """
    made = [row(SINGLE, stop, at, "plain", at in (1, 6, 8, 11)) for at in range(1, 12)]
    made += [row(SINGLE, signals, at, "plain") for at in (1, 4)]
    elsewhere = {*arms.SETTINGS, *DATA, "decisions at once"}
    for i, name in enumerate(name for name in CONFIGURATIONS if name not in elsewhere):
        made.append(row(SINGLE, (signals, stop)[i % 2], (6, 8, 3)[i % 3], name))
    for param in TWO_RANKS:
        made.append(row(param.values[0], stop, 6, "plain", not param.marks))  # type: ignore[arg-type]
    made += [row(arm, stop, 6, "plain", arm == THREE_RANKS[0]) for arm in THREE_RANKS]
    for arm in (("compat-torchrun", 2), ("ddp-torchrun", 3)):
        made.append(row(arm, signals, 6, "plain"))
    # Signals at different steps; at the last step of an epoch, with a decision on its evaluation.
    made.append(row(DDP, signals, {0: 6, 1: 5}, "plain"))
    made.append(row(DDP, signals, {0: 3}, "early stopping"))
    # A stream has loaded the next step by then. In the last step of an epoch, and before it.
    for name, asked, ended in (("plain", 5, 8), ("stream", 3, 5)):
        made += [row(SINGLE, request, asked, name), row(SINGLE, end, ended, name)]
    for name in DATA:
        made.append(row(DDP, stop, 5, name, "processes" not in name))
    for arm, name in itertools.product((SINGLE, THREE_RANKS[1]), [*DATA][1:4]):
        made.append(row(arm, stop, 5, name, False))
    for arm in (SINGLE, DDP, THREE_RANKS[1]):
        made.append(row(arm, stop, 15, "decisions at once", arm[1] < 3))
    for param in of_methods():
        arm, name = param.values
        in_make_test = not param.marks and name not in arms.WITHOUT_STATE
        made.append(row(arm, stop, arms.STOP_AT, name, in_make_test))
    return made


def of_methods() -> list[Any]:
    """Every method on one of our backends, in turn; in `make test-rest` on real Horovod, or where
    that refuses it on the next of ours.
    """
    made = []
    for i, (name, refused) in enumerate(arms.REFUSED.items()):
        cells = OURS[name in arms.NOTHING_ON_ONE_RANK :]
        cells = [arm for arm in cells if ARMS[arm[0]].backend not in refused]
        chosen = [cells[i % len(cells)]]
        if "horovod" not in refused:
            chosen.append(REAL_HOROVOD[i % 2])
        for arm in chosen:
            mark = () if arm == chosen[0] else pytest.mark.exhaustive
            made.append(pytest.param(arm, name, marks=mark))
    return made


_whole_runs: dict[tuple[str, ...], tuple[list[Values], Path]] = {}


def whole_run(ranks: Ranks, folder: Path, name: str, **changes: Any) -> tuple[list[Values], Path]:
    """Return what the ranks see of a run that is left alone, and its folder. Many tests compare
    with the same.
    """
    key = (ranks.arm.name, str(ranks.n), name, str(changes))
    if key not in _whole_runs:
        found = ranks.run(train_with, folder, name, checkpoint_every=0, **changes)
        _whole_runs[key] = found, folder
    return _whole_runs[key]


def left_by(folder: Path) -> str:
    """Return the bits that a run has left: its last checkpoint, evaluations and early stop."""
    return bits_of(
        (saved_parts(folder), evaluations(folder), run_json(folder).get("stopped_early"))
    )


@pytest.mark.parametrize(("ranks", "kind", "at", "name"), rows(), indirect=["ranks"])
def test_nothing_differs(ranks: Ranks, kind: Kind, at: At, name: str, tmp_path: Path) -> None:
    """Before a stop the last step may have no checkpoint, and is then taken again."""
    wholes, folder = whole_run(ranks, tmp_path / "whole", name)
    for whole, parts in zip(wholes, ranks.run(kind, tmp_path / "parts", name, at), strict=True):
        assert parts["digest"] == whole["digest"]
        for what in ("rates", "seen"):
            last = parts[what]
            assert last == whole[what][-len(last) :], what
        again = len(parts["first"]["rates"]) + len(parts["rates"]) - len(whole["rates"])
        assert 0 <= again <= (kind in (stop, request))
    assert left_by(tmp_path / "parts") == left_by(folder)
    steps = [r["step"] for r in records(tmp_path / "parts") if "loss" in r]
    assert steps == sorted(set(steps)), "a step was logged twice"
    (attempt,) = run_json(tmp_path / "parts")["attempts"]
    assert attempt["outcome"] == {signals: "preempted", end: "finished"}.get(kind, "failed")


@pytest.mark.parametrize(("ranks", "name"), of_methods(), indirect=["ranks"])
def test_a_method_changes_what_it_should(ranks: Ranks, name: str, tmp_path: Path) -> None:
    whole, _ = whole_run(ranks, tmp_path / "whole", name)
    same = {k: v for k, v in CONFIGURATIONS[name].items() if k in ("epochs", "optimizer")}
    plain, _ = whole_run(ranks, tmp_path / "plain", "plain", **same)
    is_same = [one["digest"] == other["digest"] for one, other in zip(whole, plain, strict=True)]
    if name in arms.CHANGES_NO_BITS:
        assert all(is_same)
    else:
        assert not any(is_same), "the option changed nothing"
