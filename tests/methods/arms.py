"""The options of each method in its test: trained and interrupted by tests/parity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from hvdtrain import Backend, TrainConfig
from hvdtrain.training.methods import METHODS
from tests.runs import Values

IN_MAKE_TEST = [("single", 1), ("ddp-torchrun", 2)]


def on(*arms: Any) -> pytest.MarkDecorator:
    """Run a test on the live ranks of some arms: names and numbers of ranks."""
    return pytest.mark.parametrize("ranks", arms, indirect=True)


def rest(*arms: Any) -> list[Any]:
    """Leave some arms of a test to `make test-rest`."""
    return [pytest.param(arm, marks=pytest.mark.exhaustive) for arm in arms]


TWO = on(("ddp-torchrun", 2))
# Two ranks of one backend, and three of another; with one process; with real Horovod.
THREE = rest(("compat-torchrun", 3))
SEVERAL = on(("ddp-torchrun", 2), *THREE)
EVERYWHERE = on(*IN_MAKE_TEST, *THREE)
WITH_HOROVOD = on(*IN_MAKE_TEST, *THREE, *rest(("horovod-mpi", 2)))

SETTINGS: dict[str, Values] = {
    "gradient accumulation": {"accumulate": 2},
    "gradient clipping": {"clip_norm": 0.5},
    "one-cycle learning rate": {"schedule": "one-cycle", "warmup_steps": 0},
    # The loss falls, so that the largest one is the first: a drop, or a stop, after the second.
    "plateau learning rate": {"schedule": "plateau:loss:max:0", "epochs": 3},
    "early stopping": {"early_stop": "loss:max:1", "epochs": 3},
    "best checkpoint": {"keep_best": "loss"},
    "average of weights": {"ema": 0.9},
    "bad steps left out": {"on_nonfinite": "skip"},
    "bf16 autocast": {"precision": "bf16"},
    "fp16 with a scaled loss": {"precision": "fp16"},
    "O1: autocast": {"precision": "fp16", "opt_level": "O1"},
    "O2: fp16 weights": {"precision": "fp16", "opt_level": "O2"},
    "O2: bf16 weights": {"precision": "bf16", "opt_level": "O2"},
    "O3: fp16 weights": {"precision": "fp16", "opt_level": "O3"},
    "O3: bf16 weights": {"precision": "bf16", "opt_level": "O3"},
    "padded last batch": {"uneven": "pad"},
    # The last batch of an epoch has 14 of 18 samples: BatchNorm needs two on each rank.
    "short last batch, weighted": {"uneven": "join", "global_batch_size": 18, "epochs": 3},
    "SyncBatchNorm": {"sync_bn": True},
    "buffers of each rank": {"buffers": "local"},
    "size of buckets": {"bucket_mib": 1.0},
    "fp16 gradients": {"compression": "fp16"},
    "bf16 gradients": {"compression": "bf16"},
    "PowerSGD": {"compression": "powersgd"},
    "sharded optimizer": {"shard_optimizer": True},
}
"""By the method's name: changes to the TrainConfig of tests/parity/resume.py."""

REFUSED = {**dict.fromkeys(SETTINGS, ()), **{method.name: [*method.refused] for method in METHODS}}
"""By the method's name: the backends that do not have it."""

TASK: dict[str, Values] = {
    # AdamW's epsilon is zero in fp16, and a gradient of zero then divides by it.
    "O3: fp16 weights": {"optimizer": "sgd"},
}
"""By the method's name: arguments of the task of tests/parity/resume.py."""

NOTHING_ON_ONE_RANK = ("SyncBatchNorm", "buffers of each rank")
"""Methods that do nothing in a single process."""

CHANGES_NO_BITS = (
    "best checkpoint",
    "average of weights",
    "bad steps left out",
    "buffers of each rank",
    "size of buckets",  # the model fits into one bucket of either
    "sharded optimizer",
)
"""Methods that leave the bits as they are everywhere."""

WITHOUT_STATE = (
    "gradient accumulation",
    "gradient clipping",
    "bf16 autocast",
    "O1: autocast",
    "O3: fp16 weights",
    "O3: bf16 weights",
    "SyncBatchNorm",
    "size of buckets",
    "fp16 gradients",
    "bf16 gradients",
)
"""Methods that keep nothing from one step to the next."""

STOP_AT = 7  # in the middle of the second epoch


@contextmanager
def options_of(backend: Backend, config: TrainConfig) -> Iterator[None]:
    """Give an open backend the options of a run, and then its own again."""
    before = backend.options
    of_run = config.backend_options()
    names = "compression buffers bucket_mib shard_optimizer unused_parameters".split()
    changes = {name: getattr(of_run, name) for name in names}
    backend.options = replace(before, **changes)
    try:
        yield
    finally:
        backend.options = before
