"""The walk over nested structures."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hvdtrain.system.trees import map_tree


class Pair(NamedTuple):
    x: float
    y: Any


def add_one(x: float) -> float:
    return x + 1


OTHERS: list[object] = [(), {}, "text", None, 3, {1}, torch.Size([2, 3])]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"a": [1.0, (1.0, "text")], "b": Pair(1.0, {"c": 1.0, "d": None}), 3: 4},
            {"a": [2.0, (2.0, "text")], "b": Pair(2.0, {"c": 2.0, "d": None}), 3: 4},
        ),
        *zip(OTHERS, OTHERS, strict=True),
    ],
)
def test_every_value_of_a_type_is_replaced(given: object, expected: object) -> None:
    before = repr(given)
    assert repr(map_tree(add_one, float, given)) == repr(expected)
    assert repr(given) == before, "the input changed"


@pytest.mark.parametrize("given", [defaultdict(list, a=[0.0]), OrderedDict(a=[0.0])])
def test_dicts_become_plain_unless_their_type_is_kept(given: object) -> None:
    before = repr(given)
    assert repr(map_tree(add_one, float, given)) == "{'a': [1.0]}"
    kept = map_tree(add_one, float, given, keep_dict_types=True)
    assert repr(kept) == before.replace("0", "1", 1)
    assert repr(given) == before, "the input changed"


def test_a_packed_sequence() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    mapped = map_tree(lambda t: t.double() if t.is_floating_point() else t, Tensor, packed)
    assert isinstance(mapped, torch.nn.utils.rnn.PackedSequence)
    assert mapped.data.dtype == torch.float64
    assert torch.equal(mapped.batch_sizes, packed.batch_sizes)
