"""The backend `ps`: what it adds to the contract and to the table of methods."""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hvdtrain import Backend, Trainer
from hvdtrain.backends.base import BackendOptions
from hvdtrain.backends.ps import ParameterServer
from hvdtrain.backends.ps_messages import Messages, encode
from hvdtrain.backends.server_optimizer import _Server, owners_of
from hvdtrain.job.world import World
from hvdtrain.training import checkpoint
from hvdtrain.training.config import TrainConfig
from tests.forkserver import warm
from tests.launch import dying
from tests.launching import started_ranks
from tests.messages import Message
from tests.methods.arms import options_of
from tests.parity.resume import CONFIG, Stateful, train
from tests.ranks import Ranks
from tests.runs import records, run_json

on_ranks = pytest.mark.parametrize(
    "ranks",
    [("ps-torchrun", 2), pytest.param(("ps-torchrun", 3), marks=pytest.mark.exhaustive)],
    indirect=True,
)


def digest(backend: Backend, /, folder: Path, **changes: Any) -> str:
    with options_of(backend, replace(CONFIG, **changes)):
        found: str = train(backend, folder, **changes)["digest"]
    return found


@on_ranks
def test_no_staleness_is_synchronous_training(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(digest, tmp_path / "0", ps_async=True, ps_max_staleness=0)
    assert found == ranks.run(digest, tmp_path / "synchronous")


def blocked(backend: Backend, folder: Path) -> dict[str, Any]:
    """Train, while the last rank takes its second step only after rank 0's fifth."""
    config = replace(CONFIG, run_dir=str(folder), ps_async=True, checkpoint_every=99)
    with options_of(backend, config):
        trainer = Trainer(Stateful(), backend, config)
        in_time: list[bool] = []
        last = backend.world.rank == backend.world.size - 1

        def on_batch(batch: Any) -> None:
            step = trainer.progress.step + 1
            if backend.world.rank == 0 and step == 4:
                (folder / "rank 0 goes on").touch()
            if last and step == 2:
                deadline = time.monotonic() + 60
                while not (folder / "rank 0 goes on").exists() and time.monotonic() < deadline:
                    time.sleep(0.01)
                in_time.append(time.monotonic() < deadline)

        trainer.on_batch = on_batch
        trainer.fit()
    return {
        "in time": all(in_time),
        "about": run_json(folder)["backend"],
    }


@on_ranks
def test_nobody_waits_for_a_slow_rank(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(blocked, tmp_path):
        assert found["in time"]
    about = found["about"]
    assert about["staleness"]["max"] >= 2
    logged = [r for r in records(tmp_path) if "staleness_max" in r]
    assert logged
    for record in logged:
        assert record["staleness_mean"] <= record["staleness_p95"] <= record["staleness_max"]
    assert "grad_norm" not in logged[0], "no rank has the mean"


@on_ranks
@pytest.mark.parametrize("servers", ["rank0", "all"])
def test_staleness_has_a_limit(ranks: Ranks, servers: str, tmp_path: Path) -> None:
    changes = {"ps_async": True, "ps_max_staleness": 1, "ps_servers": servers, "ps_sync_every": 3}
    assert len(set(ranks.run(digest, tmp_path, **changes))) == 1, "synchronized at the end"
    about = run_json(tmp_path)["backend"]
    assert about["staleness"]["max"] <= 1
    assert (about["max_staleness"], about["sync_every"]) == (1, 3)


@given(
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(0, 5)),
    st.lists(st.integers(0, 3), max_size=60),
    st.integers(0, 60),
)
@settings(deadline=None, max_examples=200)
def test_the_server_steps_with_every_gradient_once(
    num_ranks: int, limit: int | None, order: list[int], lost_at: int
) -> None:
    """In any order of pushes, each gradient is applied once, within the limit of staleness, and
    some rank can always go on; also after one rank is lost.
    """
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    server = _Server(torch.optim.SGD([weight], lr=1.0), [0], limit)
    server.pulled = dict.fromkeys(range(num_ranks), 0)
    answered: list[int] = []
    server.reply = answered.append
    computing, pushed = set(range(num_ranks)), 0
    for number, rank in enumerate(order):
        if number == lost_at and num_ranks > 1:  # rank 1 ends, computing or waiting
            server.forget(1)
            computing = (computing | set(answered)) - {1}
            answered.clear()
        if rank in computing:
            computing.discard(rank)
            pushed += 1
            server.receive(rank, "push", [torch.ones(1, dtype=torch.float64)])
            computing |= set(answered)
            answered.clear()
        assert computing, "all ranks wait"
    for rank in sorted(computing):
        server.receive(rank, "rest", [])
    assert sum(server.staleness.values()) == pushed
    assert limit is None or max(server.staleness, default=0) <= limit
    if limit is None:
        assert float(weight.detach()) == -pushed


def test_shares_are_even() -> None:
    parameters: list[torch.Tensor] = [torch.empty(n) for n in (100, 1, 60, 40, 3, 2)]
    owners = owners_of(parameters, 2)
    loads = [
        sum(p.numel() for p, o in zip(parameters, owners, strict=True) if o == r) for r in (0, 1)
    ]
    assert loads == [103, 103]
    assert owners_of(parameters, 1) == [0] * 6


def own_loop(backend: Backend) -> None:
    model = nn.Linear(2, 1)
    with options_of(backend, TrainConfig(ps_async=True)):
        backend.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


@on_ranks
def test_an_own_loop_must_say_that_it_reads_no_mean(ranks: Ranks, message: Message) -> None:
    outcomes = ranks.outcomes(own_loop)
    assert [out.kind for out in outcomes] == ["InputError"] * ranks.n
    message(outcomes[0].text)


def two_models(backend: Backend) -> bool:
    """Step two models in turn, and return whether both come to their last step."""
    with options_of(backend, TrainConfig(ps_async=True, ps_max_staleness=1)):
        models = [nn.Linear(2, 1) for _ in range(2)]
        prepared = [
            backend.prepare(m, torch.optim.SGD(m.parameters(), lr=0.1), gradients="share")
            for m in models
        ]
        for _ in range(20):
            for model, optimizer in prepared:
                optimizer.zero_grad()
                with backend.gradients(optimizer):
                    model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        for _, optimizer in prepared:
            backend.synchronize(optimizer, "parameters")
    return True


@on_ranks
def test_two_asynchronous_models(ranks: Ranks) -> None:
    """The second model's servers start while the first one's limit of staleness holds."""
    assert all(ranks.run(two_models))


# Ranks that end


def test_asynchronous_ranks_go_on_without_a_lost_worker(tmp_path: Path) -> None:
    """Three ranks started by hand. Synchronous ones: test_lost_worker.py; a server that ends:
    tests/death.
    """
    command = warm([sys.executable, "-m", "hvdtrain", "--backend", "ps", "--ps-async"])
    command += ["--task", f"{dying.__file__}:Dying", "--run-dir", str(tmp_path / "run")]
    command += ["--set", f"folder={tmp_path}", "--set", "deaths=1:12"]  # in its 12th step
    command += "--epochs 2 --batch-size 4 --checkpoint-every 5 --timeout 30 --log-every 5".split()
    with started_ranks([command] * 3, LOCAL_WORLD_SIZE="3") as ranks:
        codes = [process.wait(60) for process, _ in ranks]
        texts = [log.read_text() for _, log in ranks]
    assert codes == [0, -signal.SIGKILL, 0], texts
    assert "WARNING: rank 1 has ended" in texts[0]
    kept = checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoint.problem(kept[-1]) is None
    about = run_json(tmp_path / "run")
    assert about["outcome"] == "finished"
    assert list(about["backend"]["lost_ranks"]) == ["1"]


def test_a_mean_is_that_of_the_ranks_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ParameterServer(World(0, 3, 0, 3), BackendOptions(device="cpu"))
    monkeypatch.setattr(backend, "_collect", lambda value: [value, encode(torch.tensor([6.0]))])
    assert backend.all_reduce(torch.tensor([2.0])).tolist() == [4.0]
    assert backend.all_reduce(torch.tensor([2.0]), "sum").tolist() == [8.0]


def test_a_collective_that_waits_for_the_lost_rank_alone_is_answered() -> None:
    store = HashStore()
    with ThreadPoolExecutor(3) as pool:
        make = [
            pool.submit(Messages, World(rank, 3, rank, 3), store, ["127.0.0.1"], 60.0)
            for rank in range(3)
        ]
        ranks = [made.result() for made in make]
        try:
            for messages in ranks:
                messages.tolerates_loss = lambda rank: True
            values = [pool.submit(ranks[rank].collect, b"%d" % rank) for rank in (0, 1)]
            with ranks[0].changed:
                waiting = ranks[0]._collecting
                assert ranks[0].changed.wait_for(lambda: len(waiting.get(0, ())) == 2, 60)
            ranks[2]._peers.close()
            assert [value.result() for value in values] == [[b"0", b"1"]] * 2
        finally:
            for messages in ranks:
                messages._peers.close()
