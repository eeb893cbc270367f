"""`--shard-optimizer` on live ranks: bits, files and resumptions as without it."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hvdtrain import Backend, Callback, TrainConfig, Trainer
from hvdtrain.backends import open_backend
from hvdtrain.backends.base import BackendOptions
from hvdtrain.errors import InputError
from hvdtrain.sharded_optimizer import ShardedOptimizer
from hvdtrain.training import run_report
from hvdtrain.world import World
from tests.methods import arms
from tests.parity.resume import CONFIG, Net, Stateful
from tests.ranks import Ranks, single
from tests.runs import run_json

ARMS = [("ddp-torchrun", 2), ("compat-torchrun", 3)]


class WideNet(Net):
    """Layers that are divided among the ranks, and some that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 97), nn.BatchNorm1d(97), nn.Dropout(0.3))
        self.head = nn.Linear(97, 1)


class Wide(Stateful):
    """Two parameter groups, one parameter that is never trained."""

    def model(self) -> nn.Module:
        model = WideNet()
        model.head.bias.requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        bias = [p for name, p in named.items() if "bias" in name]
        groups: Any = [
            {"params": [p for name, p in named.items() if "bias" not in name]},
            {"params": bias, "weight_decay": 0.0, "lr": 0.01},
        ]
        if self.kind == "sgd":
            return torch.optim.SGD(groups, lr=0.02, momentum=0.9)
        return torch.optim.AdamW(groups, lr=0.02, amsgrad=True)


class Stop(Callback):
    """Ends the run after a step, with a checkpoint."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.after - 1:
            trainer.stop("the test")


def train(
    backend: Backend, /, folder: Path, stop: int = 0, optimizer: str = "adamw", **changes: Any
) -> dict[str, Any]:
    """Train, and return the digest and what the optimizer was."""
    config: TrainConfig = replace(
        CONFIG, **{"run_dir": str(folder), "epochs": 2, "checkpoint_every": 0, **changes}
    )
    task = Wide(evaluates=config.ema is not None, optimizer=optimizer)
    with arms.options_of(backend, config):
        trainer = Trainer(task, backend, config, callbacks=[Stop(stop)] if stop else [])
        digest = trainer.fit().params_sha256
    return {"digest": digest, "sharded": isinstance(trainer.optimizer, ShardedOptimizer)}


SETTINGS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "accumulate": 2, "clip_norm": 0.1, "lr": 0.1},
    {"ema": 0.9, "on_nonfinite": "skip", "spike": 1000.0, "log_gradients": 2},
    {"precision": "fp16", "clip_norm": 0.5},
    {"precision": "fp16", "opt_level": "O2", "log_gradients": 1},
    {"unused_parameters": "zero", "schedule": "one-cycle", "warmup_steps": 0},
]


def with_and_without(backend: Backend, folder: Path) -> list[tuple[dict[str, Any], str, str]]:
    """Train by each of `SETTINGS`, both ways."""
    found = []
    for number, changes in enumerate(SETTINGS):
        plain = train(backend, folder / f"plain{number}", epochs=1, **changes)
        mine = train(backend, folder / f"mine{number}", epochs=1, shard_optimizer=True, **changes)
        assert mine["sharded"] is (backend.world.size > 1)
        found.append((changes, mine["digest"], plain["digest"]))
    return found


@pytest.mark.parametrize("ranks", ARMS, indirect=True)
def test_the_bits_are_those_of_a_run_without_it(ranks: Ranks, tmp_path: Path) -> None:
    for changes, mine, plain in ranks.run(with_and_without, tmp_path)[0]:
        assert mine == plain, changes
    for number, changes in enumerate(SETTINGS):
        assert_same_files(tmp_path / f"plain{number}", tmp_path / f"mine{number}")
        if "log_gradients" in changes:
            lines = [tmp_path / f"{kind}{number}/gradients.jsonl" for kind in ("plain", "mine")]
            assert lines[0].read_text() == lines[1].read_text()


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def assert_same_files(one: Path, other: Path) -> None:
    """Compare the last checkpoints: model, optimizer and masters byte by byte."""
    first, second = (max((run / "checkpoints").glob("step-*")) for run in (one, other))
    assert first.name == second.name
    for name in ("model.pt", "optimizer.pt", "masters.pt"):
        assert (first / name).exists() == (second / name).exists()
        if (first / name).exists():
            assert contents(first / name) == contents(second / name)


def said(backend: Backend, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Return what the first lines of a run and its run.json say of sharding."""
    config = replace(CONFIG, run_dir=str(folder), max_steps=1, shard_optimizer=True)
    with arms.options_of(backend, config):
        trainer = Trainer(Wide(), backend, config)
        trainer.fit()
        lines = run_report.header(backend, "own", trainer.ledger, "1", None, config, None)
    return lines, run_json(folder)["backend"]


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (("ddp-torchrun", 1), "--shard-optimizer does nothing: there is one rank"),
        (("ddp-torchrun", 2), "each rank steps 1/2 of the parameters, which all ranks share"),
    ],
    indirect=["ranks"],
)
def test_a_run_says_what_is_shared(ranks: Ranks, text: str, tmp_path: Path) -> None:
    lines, about = ranks.run(said, tmp_path)[0]
    assert f"shares   {text}" in lines
    assert about["optimizer_shares"] == [ranks.n]


def test_what_is_shared_on_several_hosts() -> None:
    nothing = "shares   --shard-optimizer does nothing: each host has one rank"
    assert run_report._shares_line([1, 1]) == [nothing]
    (line,) = run_report._shares_line([1, 2])
    assert line.endswith("share its parameters; each steps 1/1, 1/2 of them, by host")


def resumed(backend: Backend, folder: Path) -> dict[str, str]:
    """Stop after five steps and resume, with and without the option in each part."""
    found = {"whole": train(backend, folder / "whole")["digest"]}
    for first in (False, True):
        for then in (False, True):
            run = folder / f"{first}-{then}"
            train(backend, run, stop=5, shard_optimizer=first)
            mine = train(backend, run, resume="must", shard_optimizer=then)
            found[f"{first}-{then}"] = mine["digest"]
    return found


@pytest.mark.parametrize("ranks", ARMS, indirect=True)
def test_resuming_with_and_without_it(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(resumed, tmp_path):
        assert set(found.values()) == {found["whole"]}, found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ranks", ARMS, indirect=True)
def test_resuming_on_another_number_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    train(single(), tmp_path / "plain", stop=5)
    train(single(), tmp_path / "mine", stop=5)
    plain = ranks.run(train, tmp_path / "plain", resume="must", epochs=2)
    mine = ranks.run(train, tmp_path / "mine", resume="must", epochs=2, shard_optimizer=True)
    assert [m["digest"] for m in mine] == [p["digest"] for p in plain]
    back = [
        train(single(), tmp_path / name, resume="must", epochs=3)["digest"]
        for name in ("plain", "mine")
    ]
    assert back[0] == back[1]


class Clamps(Callback):
    """Changes the weights after a step, on every rank."""

    def __init__(self, unshares: bool) -> None:
        self.unshares = unshares

    def on_step_end(self, trainer: Trainer) -> None:
        if self.unshares and isinstance(trainer.optimizer, ShardedOptimizer):
            trainer.optimizer.unshare_parameters()
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.mul_(0.99)


def changed_weights(backend: Backend, folder: Path, shards: bool, unshares: bool) -> str:
    config = replace(CONFIG, run_dir=str(folder), epochs=1, shard_optimizer=shards)
    with arms.options_of(backend, config):
        trainer = Trainer(Wide(), backend, config, callbacks=[Clamps(unshares)])
        try:
            return trainer.fit().params_sha256
        except InputError as error:
            return str(error)


@pytest.mark.parametrize("ranks", ARMS, indirect=True)
def test_a_callback_that_changes_weights(ranks: Ranks, tmp_path: Path) -> None:
    refused = ranks.run(changed_weights, tmp_path / "refused", True, False)
    assert len(set(refused)) == 1
    assert "head.weight was changed outside step()" in refused[0]
    assert "call unshare_parameters() of the optimizer on every rank before" in refused[0]
    mine = ranks.run(changed_weights, tmp_path / "mine", True, True)
    assert mine == ranks.run(changed_weights, tmp_path / "plain", False, True)


def options_refused(backend: Backend) -> list[str]:
    """Return why the backend refuses to shard: local gradients, an optimizer of one's own."""
    texts = []
    model = nn.Linear(3, 3)
    own = type("Own", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    before, backend.options = backend.options, replace(backend.options, shard_optimizer=True)
    try:
        for optimizer, gradients in ((own, "mean"), (plain, "local")):
            with pytest.raises(InputError) as refused:
                backend.prepare(model, optimizer, gradients)  # type: ignore[arg-type]
            texts.append(str(refused.value))
    finally:
        backend.options = before
    return texts


@pytest.mark.parametrize("ranks", ARMS, indirect=True)
def test_refusals_of_prepare(ranks: Ranks) -> None:
    for own, local in ranks.run(options_refused):
        assert "Own may read other elements than the one it updates" in own
        assert "the ranks step on gradients of their own" in local


def test_a_backend_without_it_says_so() -> None:
    with pytest.raises(InputError, match="backend single cannot shard the optimizer; use ddp or"):
        open_backend("single", World(), BackendOptions(shard_optimizer=True))


def loop_of_ones_own(backend: Backend, shards: bool) -> tuple[float, Tensor, dict[str, Any]]:
    """Train by `prepare` alone, and let the memory go as the backend would when it closes."""
    torch.manual_seed(0)
    model = WideNet()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    before, backend.options = backend.options, replace(backend.options, shard_optimizer=shards)
    try:
        net, optimizer = backend.prepare(model, optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for step in range(4):
            inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
            with backend.accumulate(net, last=True):
                loss = net(inputs).square().mean()
                loss.backward()
            backend.finish_backward(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        backend._unshare_parameters()
        backend.barrier()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
        with torch.no_grad():  # nobody else sees this
            model.head.weight.fill_(backend.world.rank)
        backend.barrier()
        assert bool((model.head.weight == backend.world.rank).all())
    finally:
        backend.options = before
    return float(loss), weights, optimizer.state_dict()


@pytest.mark.parametrize("ranks", ARMS, indirect=True)
def test_a_loop_of_ones_own(ranks: Ranks) -> None:
    for mine, plain in zip(
        ranks.run(loop_of_ones_own, True), ranks.run(loop_of_ones_own, False), strict=True
    ):
        assert mine[0] == plain[0]
        assert torch.equal(mine[1], plain[1])
        for a, b in zip(mine[2]["state"].values(), plain[2]["state"].values(), strict=True):
            assert list(a) == list(b)
            assert all(torch.equal(a[key], b[key]) for key in a)
