"""`--opt-level`: O2 against a hand-written loop bit by bit, one loss scale for all ranks, and what
a checkpoint of one level is to another.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from hvdtrain import Backend, Trainer
from hvdtrain.training.precision import Precision
from tests.conftest import ARMS
from tests.methods.arms import IN_MAKE_TEST, SEVERAL
from tests.methods.data_runs import shuffled
from tests.parity import resume
from tests.parity.reference import State, seed_of
from tests.ranks import Ranks, single
from tests.runs import Values, fit_watched, newest, records, saved_parts, snapshot

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
CPU = torch.device("cpu")
SIZE = 48
SPIKE_AT = 29
"""The sample whose gradient overflows in fp16."""


class Small(resume.Stateful):
    """A regression with BatchNorm; `spike` multiplies the loss of the batch with SPIKE_AT."""

    def __init__(self, spike: float = 1.0) -> None:
        super().__init__()
        self.spike = spike

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def datasets(self) -> tuple[Dataset[Any], None]:
        return TensorDataset(*super().datasets()[0][:SIZE]), None

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(net, batch)
        return loss * self.spike if SPIKE_AT in batch[1] else loss


CONFIG = replace(
    resume.CONFIG, schedule="constant", warmup_steps=0, clip_norm=0.5, log_every=1
)  # 4 steps an epoch, 12 in all


def train(
    backend: Backend,
    /,
    run_dir: Path,
    spike: float = 1.0,
    init_scale: float | None = None,
    **changes: Any,
) -> Values:
    """Train; return this rank's weights, and its scale by step. With `init_scale`, the scale grows
    after every four steps.
    """
    config = replace(CONFIG, run_dir=str(run_dir), checkpoint_every=0, **changes)
    trainer = Trainer(Small(spike), backend, config)
    if init_scale is not None:
        trainer.precision.scaler = torch.amp.GradScaler(
            "cpu", init_scale=init_scale, growth_interval=4
        )
    scales: list[float] = []
    fit_watched(trainer, at_step=lambda _: scales.append(trainer.precision.scaler.get_scale()))
    return {"scales": scales, "weights": snapshot(trainer.model)}


def by_hand(n: int, half: str, init_scale: float | None) -> State:
    """Train at O2 as a script would: two models, two sets of gradients, the rules of a scaler."""
    task, config = Small(), CONFIG
    torch.manual_seed(seed_of(config.seed))
    model = task.model().to(HALF[half])
    model[1].float()  # type: ignore[index]
    masters = copy.deepcopy(model).float()
    optimizer = task.optimizer(masters)
    data: Any = task.datasets()[0]
    scale, good_steps = init_scale or 1.0, 0
    for order in shuffled(SIZE, config.micro_batch(1), config):
        grads: list[list[Tensor]] = []
        of_rank_0: State = {}
        for indices in torch.chunk(order, n):
            inputs, _ = data[indices]
            model.zero_grad()
            scores = model(inputs.to(HALF[half])).float()
            ((scores.squeeze(1) - inputs.sum(1)).square().mean() * scale).backward()
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            of_rank_0 = of_rank_0 or {k: t.clone() for k, t in model.named_buffers()}
        for name, buffer in model.named_buffers():
            buffer.copy_(of_rank_0[name])
        for p, *parts in zip(masters.parameters(), *grads, strict=True):
            p.grad = (sum(parts[1:], parts[0]) / n).float() / scale
        finite = all(p.grad.isfinite().all() for p in masters.parameters())  # type: ignore[union-attr]
        if finite:
            nn.utils.clip_grad_norm_(masters.parameters(), config.clip_norm)
            optimizer.step()
        good_steps = good_steps + 1 if finite else 0
        if init_scale is not None and not finite:
            scale /= 2
        elif init_scale is not None and good_steps == 4:
            scale, good_steps = scale * 2, 0
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters.parameters(), strict=True):
                p.copy_(master)
    return snapshot(model)


check_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


# The meaning of each level


def test_complex_parameters_stay_complex_in_fp64() -> None:
    """As those of a Fourier layer: the model, its buffers and its batches."""
    model, ones = nn.Module(), torch.ones(2, dtype=torch.complex64)
    model.weight = nn.Parameter((1 + 2j) * ones)
    model.register_buffer("shift", ones)
    precision = Precision("fp64", CPU)
    converted = precision.convert(model).state_dict()
    assert converted["weight"].tolist() == [1 + 2j] * 2
    all_of_them = (*converted.values(), precision.convert_batch(ones))
    assert {t.dtype for t in all_of_them} == {torch.complex128}


def test_o1_is_what_precision_alone_does(tmp_path: Path) -> None:
    plain, named = (
        train(single(), tmp_path / level, precision="fp16", opt_level=level)["weights"]
        for level in ("none", "O1")
    )
    check_equal(named, plain)


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_dtypes(level: str, half: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3)
            self.bn = nn.BatchNorm1d(3, affine=False)
            self.tied = nn.Linear(2, 3)
            self.tied.weight = self.linear.weight
            self.register_buffer("table", torch.ones(3))
            self.seen: list[torch.dtype] = []

        def forward(self, x: Tensor, *, mask: Tensor, at: Tensor) -> State:
            hidden = self.bn(self.linear(x))
            self.seen += [x.dtype, mask.dtype, at.dtype, hidden.dtype]
            return {"scores": hidden * mask, "at": at}

    net, low, whole = Net(), HALF[half], torch.int64
    precision = Precision(half, CPU, level)
    assert precision.convert(net) is net
    statistics = torch.float32 if level == "O2" else low
    # The table, a layer, the BatchNorm's mean, variance and number of batches, and a layer.
    kinds = [t.dtype for t in net.state_dict().values()]
    assert kinds == [low, low, low, statistics, statistics, whole, low, low]
    assert net.tied.weight is net.linear.weight
    out = net(torch.ones(4, 2), mask=torch.ones(3), at=torch.zeros(1, dtype=whole))
    assert net.seen == [low, low, whole, low]
    assert [t.dtype for t in out.values()] == [torch.float32, whole]
    optimizer = torch.optim.SGD(net.parameters())
    precision.make_masters(net, optimizer)
    with precision.masters_in(optimizer) as masters:
        assert [*masters] == ["linear.weight", "linear.bias", "tied.bias"] * (level == "O2")


def test_state_made_before_the_masters_is_theirs() -> None:
    """Adagrad makes its state in the constructor, in the type of the weights."""
    model, precision = nn.Linear(1, 2), Precision("bf16", CPU, "O2")
    precision.convert(model)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    precision.make_masters(model, optimizer)
    precision.backward(model(torch.ones(1, 1)).sum())  # all gradients are 1
    precision.unscale_(optimizer)
    precision.step(optimizer)
    with precision.masters_in(optimizer):
        sums = [entry["sum"] for entry in optimizer.state_dict()["state"].values()]
    assert [(t.dtype, t.unique().item()) for t in sums] == [(torch.float32, 1.5)] * 2


# O2 by hand


# With three, the order of a sum is the transport's: tests/parity/test_interruption.py trains those.
@pytest.mark.parametrize(
    ("ranks", "half"),
    [
        pytest.param(arm, half, marks=[pytest.mark.exhaustive] * (arm not in IN_MAKE_TEST))
        for arm in ARMS
        for half in HALF
        if arm[1] <= 2 and (half == "fp16" or "horovod" not in arm[0])  # see the table of methods
    ],
    indirect=["ranks"],
)
def test_o2_is_bitwise_equal_to_a_hand_written_loop(
    ranks: Ranks, half: str, tmp_path: Path
) -> None:
    # In one process 2^20 overflows in the first steps, and the scale grows again later. The ranks
    # may divide before they sum, so that theirs must not overflow.
    scale = None if half == "bf16" else 2.0 ** (20 if ranks.n == 1 else 8)
    found = ranks.run(train, tmp_path, precision=half, opt_level="O2", init_scale=scale)
    expected = by_hand(ranks.n, half, scale)
    for rank in found:
        check_equal(rank["weights"], expected)
    if scale is not None:
        scales = [scale, *found[0]["scales"]]
        changes = {after / before for before, after in itertools.pairwise(scales)}
        assert changes == ({0.5, 1, 2} if ranks.n == 1 else {1, 2})
        logged = [record["loss_scale"] for record in records(tmp_path) if "lr" in record]
        assert logged == scales[1:]


# One decision for all ranks, and checkpoints


@pytest.mark.parametrize("level", ["O1", "O2"])
@SEVERAL
def test_an_overflow_of_one_rank_is_skipped_by_all(
    ranks: Ranks, level: str, tmp_path: Path
) -> None:
    changes: Values = {"opt_level": level, "init_scale": 2.0**10, "spike": 1e6}
    changes["precision"] = "fp16"
    whole = ranks.run(train, tmp_path, **changes)
    scales = whole[0]["scales"]
    halved = [before > after for before, after in zip([2.0**10, *scales], scales, strict=False)]
    assert sum(halved) == CONFIG.epochs, "the sample is seen once an epoch"
    for rank in whole:
        assert rank["scales"] == scales
        check_equal(rank["weights"], whole[0]["weights"])


def test_a_checkpoint_of_o2_loads_anywhere(tmp_path: Path) -> None:
    train(single(), tmp_path, precision="fp16", opt_level="O2")
    parts = saved_parts(tmp_path)
    saved, masters = parts["model"], parts["masters"]
    for dtype in (torch.float16, torch.float32):
        Small().model().to(dtype).load_state_dict(saved)
    assert list(masters) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    check_equal({k: m.half() for k, m in masters.items()}, {k: saved[k] for k in masters})
    assert any(not torch.equal(m, saved[name].float()) for name, m in masters.items())
    entries = [*parts["optimizer"]["state"].values(), masters]
    assert {t.dtype for entry in entries for t in entry.values()} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_levels_change_when_resuming(precision: str, tmp_path: Path) -> None:
    """No rounding is added: fp32 weights become masters, and masters become fp32 weights."""
    o2, plain = ("bf16", "O2"), (precision, "none")
    for levels in ((o2, plain), (plain, o2)):
        found, mode = [], "none"
        for half, level in levels:
            folder = tmp_path / f"{levels[0][1]} first" / level
            # The second takes no step: it saves what it has loaded.
            train(single(), folder, precision=half, opt_level=level, max_steps=5, resume=mode)
            parts, mode = saved_parts(folder), str(newest(folder))
            weights = {**parts["model"], **parts.get("masters", {})}
            found.append((weights, parts["optimizer"]["state"]))
        check_equal(*found)
