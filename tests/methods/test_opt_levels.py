"""`--opt-level`: O2 against a hand-written loop bit by bit, one loss scale for all ranks, and what
a checkpoint of one level is to another.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from hvdtrain import Backend, Task, TrainConfig, Trainer
from hvdtrain.training import checkpoint, checkpointer
from hvdtrain.training.precision import Precision
from tests.conftest import EVERY_ARM
from tests.parity.reference import epoch_order, seed_of
from tests.ranks import Ranks, single
from tests.runs import Stop, records, snapshot, watch

pytestmark = pytest.mark.usefixtures("one_thread")

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
CPU = torch.device("cpu")
SIZE = 48
SPIKE_AT = 29
"""The sample whose gradient overflows in fp16: it is in the third step of the second epoch."""


class Small(Task):
    """A regression with BatchNorm; `spike` multiplies the loss of the batch with SPIKE_AT."""

    def __init__(self, spike: float = 1.0, sgd: bool = False) -> None:
        self.spike = spike
        self.sgd = sgd

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kind = torch.optim.SGD if self.sgd else torch.optim.AdamW
        return kind(model.parameters(), lr=0.02)

    def datasets(self) -> tuple[Dataset[Any], None]:
        inputs = torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(2))
        return TensorDataset(inputs, inputs.sum(1), torch.arange(SIZE)), None

    def loss(self, net: nn.Module, batch: Any) -> Tensor:
        inputs, wanted, index = batch
        scores = net(inputs)
        assert wanted.dtype == torch.float32
        loss: Tensor = (scores.squeeze(1) - wanted).square().mean()
        return loss * self.spike if SPIKE_AT in index else loss


CONFIG = TrainConfig(
    seed=3,
    epochs=3,
    global_batch_size=12,
    clip_norm=0.5,
    threads=1,
    log_every=1,
    keep=99,
)  # 4 steps an epoch, 12 in all


def train(
    backend: Backend,
    /,
    run_dir: Path,
    stop_at: int = -1,
    spike: float = 1.0,
    sgd: bool = False,
    init_scale: float | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Train, or die after step `stop_at`, with a checkpoint of the step before; return this rank's
    weights, and its scale by step.

    With `init_scale`, the scale grows after every four steps.
    """
    every = max(stop_at - 1, 0)
    config = replace(CONFIG, run_dir=str(run_dir), **{"checkpoint_every": every, **changes})
    trainer = Trainer(Small(spike, sgd), backend, config)
    if init_scale is not None:
        trainer.precision.scaler = torch.amp.GradScaler(
            "cpu", init_scale=init_scale, growth_interval=4
        )
    scales: list[float] = []

    def advance(step: int) -> None:
        scales.append(trainer.precision.scaler.get_scale())
        if step == stop_at:
            raise Stop

    watch(trainer, advance)
    try:
        trainer.fit()
    except Stop:
        return {"scales": scales}
    return {"scales": scales, "weights": snapshot(trainer.model)}


def train_weights(backend: Backend, /, run_dir: Path, **changes: Any) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = train(backend, run_dir, **changes)["weights"]
    return weights


def logged(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in records(run_dir) if "lr" in record]


def by_hand(n: int, half: str, init_scale: float | None) -> dict[str, Tensor]:
    """Train at O2 as a script would: two models, two sets of gradients, the rules of a scaler."""
    task, config = Small(), CONFIG
    torch.manual_seed(seed_of(config.seed))
    model = task.model().to(HALF[half])
    model[1].float()  # type: ignore[index]
    masters = copy.deepcopy(model).float()
    optimizer = task.optimizer(masters)
    data: Any = task.datasets()[0]
    whole = config.micro_batch(1)
    scale, good_steps = init_scale or 1.0, 0
    for epoch in range(config.max_epochs()):
        for order in torch.split(
            epoch_order(SIZE, config.seed, epoch)[: SIZE // whole * whole], whole
        ):
            grads: list[list[Tensor]] = []
            of_rank_0: dict[str, Tensor] = {}
            for indices in torch.chunk(order, n):
                inputs, wanted, _ = data[indices]
                model.zero_grad()
                scores = model(inputs.to(HALF[half])).float()
                ((scores.squeeze(1) - wanted).square().mean() * scale).backward()
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


def check_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert {k: t.dtype for k, t in one.items()} == {k: t.dtype for k, t in other.items()}
    for name, t in one.items():
        assert torch.equal(t, other[name]), name


# The meaning of each level


def test_complex_parameters_stay_complex_in_fp64() -> None:
    """As those of a Fourier layer: the model, its buffers and its batches are all in 64 bits."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.full((2,), 1 + 2j, dtype=torch.complex64))
    model.bias = nn.Parameter(torch.ones(2))
    model.register_buffer("shift", torch.ones(2, dtype=torch.complex64))
    model.register_buffer("count", torch.ones(2, dtype=torch.int32))
    precision = Precision("fp64", torch.device("cpu"))
    converted = precision.convert(model).state_dict()
    assert torch.equal(converted["weight"], torch.full((2,), 1 + 2j, dtype=torch.complex128))
    kinds = {name: t.dtype for name, t in converted.items()}
    assert kinds == {
        "weight": torch.complex128,
        "bias": torch.float64,
        "shift": torch.complex128,
        "count": torch.int32,
    }
    batch = torch.ones(2, dtype=torch.complex64)
    assert precision.convert_batch(batch).dtype == torch.complex128


def test_o1_is_what_precision_alone_does(tmp_path: Path) -> None:
    plain = train_weights(single(), tmp_path / "plain", precision="fp16")
    named = train_weights(single(), tmp_path / "named", precision="fp16", opt_level="O1")
    check_equal(named, plain)


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_dtypes(level: str, half: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3)
            self.bn = nn.BatchNorm1d(3, affine=False)
            self.register_buffer("table", torch.ones(3))
            self.register_buffer("count", torch.ones(1, dtype=torch.int64))
            self.seen: list[torch.dtype] = []

        def forward(self, x: Tensor, *, mask: Tensor, at: Tensor) -> dict[str, Tensor]:
            hidden = self.bn(self.linear(x))
            self.seen += [x.dtype, mask.dtype, at.dtype, hidden.dtype]
            return {"scores": hidden * mask, "at": at}

    net = Net()
    assert Precision(half, CPU, level).convert(net) is net
    statistics = torch.float32 if level == "O2" else HALF[half]
    assert {name: t.dtype for name, t in net.state_dict().items()} == {
        "linear.weight": HALF[half],
        "linear.bias": HALF[half],
        "bn.running_mean": statistics,
        "bn.running_var": statistics,
        "bn.num_batches_tracked": torch.int64,
        "table": HALF[half],
        "count": torch.int64,
    }
    out = net(torch.ones(4, 2), mask=torch.ones(3), at=torch.zeros(1, dtype=torch.int64))
    assert net.seen == [HALF[half], HALF[half], torch.int64, HALF[half]]
    assert out["scores"].dtype == torch.float32
    assert out["at"].dtype == torch.int64


@pytest.mark.parametrize(("level", "moves"), [("O2", True), ("O3", False)])
def test_masters_keep_updates_that_half_loses(level: str, moves: bool) -> None:
    """1 - 0.0001 is 1 in bf16; 100 such steps are 0.99."""
    precision, model = Precision("bf16", CPU, level), nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    precision.convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    precision.make_masters(model, optimizer)
    for _ in range(100):
        precision.backward(model(torch.ones(1, 1)).sum())
        precision.unscale_(optimizer)
        precision.step(optimizer)
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["params"] == [model.weight]
    expected = torch.tensor(0.99 if moves else 1.0).bfloat16()
    assert model.weight.item() == expected.item()


def test_tied_weights_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    precision = Precision("fp16", CPU, "O2")
    precision.convert(model)
    assert model[1].weight is model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision.make_masters(model, optimizer)
    with precision.masters_in(optimizer) as masters:
        assert list(masters) == ["0.weight", "0.bias", "1.bias"]


def test_state_made_before_the_masters_is_theirs() -> None:
    """Adagrad makes its state in the constructor, in the type of the weights."""
    precision, model = Precision("bf16", CPU, "O2"), nn.Linear(2, 2)
    precision.convert(model)
    optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5)
    precision.make_masters(model, optimizer)
    precision.backward(model(torch.ones(1, 2)).sum())
    precision.unscale_(optimizer)
    precision.step(optimizer)
    with precision.masters_in(optimizer):
        state = optimizer.state_dict()["state"]
    assert [entry["sum"].dtype for entry in state.values()] == [torch.float32] * 2
    assert [entry["sum"].unique().item() for entry in state.values()] == [1.5] * 2


# O2 by hand

# With three, the order of a sum is the transport's: tests/parity/test_interruption.py trains those.
SCALES = {"bf16": None, "fp16": 2.0**8}
# Real Horovod has no bf16: see the table of methods.
BY_HAND = [
    pytest.param(
        *arm.values,
        half,
        marks=arm.marks
        if half == "fp16" or arm.values[0] == ("single", 1)
        else pytest.mark.exhaustive,
    )
    for arm in EVERY_ARM
    for half in HALF
    if arm.values[0][1] <= 2 and (half, arm.values[0][0][:7]) != ("bf16", "horovod")  # type: ignore[index]
]


@pytest.mark.parametrize(("ranks", "half"), BY_HAND, indirect=["ranks"])
def test_o2_is_bitwise_equal_to_a_hand_written_loop(
    ranks: Ranks, half: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"precision": half, "opt_level": "O2", "init_scale": SCALES[half]}
    expected = by_hand(ranks.n, half, SCALES[half])
    for weights in ranks.run(train_weights, tmp_path, **changes):
        check_equal(weights, expected)


def test_overflows_and_growth_by_hand(tmp_path: Path) -> None:
    """2^20 overflows in the first steps, and the scale grows again later."""
    changes: dict[str, Any] = {"precision": "fp16", "opt_level": "O2", "init_scale": 2.0**20}
    made = train(single(), tmp_path, **changes)
    check_equal(made["weights"], by_hand(1, "fp16", 2.0**20))
    scales = [2.0**20, *made["scales"]]
    steps = [after / before for before, after in zip(scales, scales[1:], strict=False)]
    assert 0.5 in steps
    assert 2 in steps
    assert [record["loss_scale"] for record in logged(tmp_path)] == scales[1:]


# One decision for all ranks, and checkpoints


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("ranks", [("ddp-torchrun", 2), ("compat-torchrun", 3)], indirect=True)
def test_an_overflow_of_one_rank_is_skipped_by_all(
    ranks: Ranks, level: str, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "precision": "fp16",
        "opt_level": level,
        "init_scale": 2.0**10,
        "spike": 1e6,
    }
    whole = ranks.run(train, tmp_path / "whole", **changes)
    scales = whole[0]["scales"]
    assert all(rank["scales"] == scales for rank in whole)
    halved = [before > after for before, after in zip([2.0**10, *scales], scales, strict=False)]
    assert sum(halved) == CONFIG.epochs, "the sample is seen once an epoch"
    for rank in whole:
        check_equal(rank["weights"], whole[0]["weights"])
    # The checkpoint is one good step after the first overflow: it counts towards the next growth.
    stop_at = halved.index(True) + 3
    ranks.run(train, tmp_path / "parts", stop_at, **changes)
    resumed = ranks.run(train, tmp_path / "parts", resume="must", **changes)
    for rest in resumed:
        assert rest["scales"] == scales[stop_at - 1 :]
        check_equal(rest["weights"], whole[0]["weights"])


def checkpointed(run_dir: Path, part: str) -> Any:
    path, _ = checkpoint.newest(run_dir / "checkpoints")
    assert path is not None
    return checkpoint.load(path, part)


def test_a_checkpoint_of_o2_loads_anywhere(tmp_path: Path) -> None:
    half = "fp16"
    train(single(), tmp_path / "o2", precision=half, opt_level="O2")
    saved, masters = (checkpointed(tmp_path / "o2", part) for part in ("model", "masters"))
    for dtype in (HALF[half], torch.float32):
        Small().model().to(dtype).load_state_dict(saved)
    assert list(masters) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(master.to(HALF[half]), saved[name])
    assert any(not torch.equal(m, saved[name].float()) for name, m in masters.items())
    state = checkpointed(tmp_path / "o2", "optimizer")["state"]
    assert {t.dtype for entry in state.values() for t in entry.values()} == {torch.float32}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_levels_change_when_resuming(precision: str, tmp_path: Path) -> None:
    """No rounding is added: fp32 weights become masters, and masters become fp32 weights."""
    o2: dict[str, Any] = {"precision": "bf16", "opt_level": "O2"}
    plain: dict[str, Any] = {"precision": precision, "opt_level": "none"}
    for first, second in ((o2, plain), (plain, o2)):
        folder = tmp_path / f"{first['opt_level']}-first"
        train(single(), folder, stop_at=6, **first)
        exact = {**checkpointed(folder, "model")}
        if first is o2:
            exact |= checkpointed(folder, "masters")
        state = checkpointed(folder, "optimizer")["state"]
        other = Precision(second["precision"], CPU, second["opt_level"])
        model = other.convert(Small().model())
        optimizer = Small().optimizer(model)
        other.make_masters(model, optimizer)
        path, _ = checkpoint.newest(folder / "checkpoints")
        assert path is not None
        parts = {name: checkpoint.load(path, name) for name in checkpoint.part_names(path)}
        checkpointer.restore(defaultdict(dict, parts).__getitem__, model, optimizer, other)
        with other.masters_in(optimizer) as masters:
            kept = {**model.state_dict(), **masters}
            assert bool(masters) == (second is o2)
            loaded = optimizer.state_dict()["state"]
        for name, t in exact.items():
            assert torch.equal(kept[name], t), name
        for key, entry in state.items():
            assert torch.equal(loaded[key]["exp_avg"], entry["exp_avg"])
