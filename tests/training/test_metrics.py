"""Means that do not depend on how samples are shared out, and a hash that sees every bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hvdtrain.errors import InputError
from hvdtrain.training.metrics import Mean, fingerprint


def test_low_precision_adds_up_in_double() -> None:
    mean = Mean()
    for _ in range(1000):
        mean.add({"a": torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True)}, 3)
    mean.add({"a": torch.tensor(1.5, dtype=torch.float16)}, 1000)
    assert Mean.combine([mean.shares()["a"]]) == 0.75


def test_a_metric_per_sample_is_refused() -> None:
    """Summed up, it would be a mean times the batch size."""
    with pytest.raises(InputError, match=r"'accuracy' has shape \(4,\).*mean over the batch"):
        Mean().add({"accuracy": torch.ones(4)}, 4)


# Fingerprints

STATE: dict[str, Tensor] = {
    "weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "bias": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    "count": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "mask": torch.tensor([True, False]),
    "phase": torch.tensor([1 + 2j]),
}


def test_the_fingerprint_does_not_depend_on_order_or_layout() -> None:
    expected = fingerprint(STATE)
    assert len(expected) == 64
    assert fingerprint(dict(reversed(STATE.items()))) == expected
    transposed = STATE["weight"].t().contiguous().t()
    assert not transposed.is_contiguous()
    assert fingerprint({**STATE, "weight": transposed}) == expected
    assert fingerprint({**STATE, "weight": torch.nn.Parameter(STATE["weight"])}) == expected
    assert fingerprint({**STATE, "extra state": {"not": "a tensor"}}) == expected
    conjugate = torch.tensor([1 - 2j]).conj()
    assert fingerprint({**STATE, "phase": conjugate}) == expected


@pytest.mark.parametrize("name", [name for name, t in STATE.items() if t.numel()])
def test_the_fingerprint_sees_every_bit(name: str) -> None:
    t = STATE[name]
    seen = {fingerprint(STATE)}
    bits = 1 if t.dtype is torch.bool else 8
    num = t.numel() * t.element_size() * bits
    for byte, bit in (divmod(i, bits) for i in range(num)):
        changed = t.clone()
        changed.reshape(-1).view(torch.uint8)[byte] ^= 1 << bit
        seen.add(fingerprint({**STATE, name: changed}))
    assert len(seen) == 1 + num


@pytest.mark.parametrize(
    "change",
    [
        {"weight": STATE["weight"].reshape(3, 2)},
        {"weight": STATE["weight"].view(torch.int32)},
        {"bias": STATE["bias"].view(torch.float16)},
        {"count": STATE["count"].reshape(1)},
        {"empty": torch.empty(4, 0)},
        {"more": torch.empty(0)},
    ],
    ids=["shape", "dtype", "16-bit dtype", "0-dim", "empty shape", "name"],
)
def test_the_fingerprint_sees_names_shapes_and_dtypes(change: dict[str, Tensor]) -> None:
    assert fingerprint({**STATE, **change}) != fingerprint(STATE)
