"""The walk over nested structures."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hvdtrain.system.trees import map_tree


class Pair(NamedTuple):
    x: Tensor
    y: Any


def add_one(t: Tensor) -> Tensor:
    return t + 1


def test_every_tensor_is_replaced() -> None:
    t = torch.ones(2)
    nested = {"a": [t, (t, "text")], "b": Pair(t, {"c": t, "d": None}), 3: 4}
    mapped = map_tree(add_one, Tensor, nested)
    two = torch.full((2,), 2.0)
    assert isinstance(mapped["b"], Pair)
    assert isinstance(mapped["a"], list)
    assert isinstance(mapped["a"][1], tuple)
    for value in (mapped["a"][0], mapped["a"][1][0], mapped["b"].x, mapped["b"].y["c"]):
        assert torch.equal(value, two)
    assert (mapped["a"][1][1], mapped["b"].y["d"], mapped[3]) == ("text", None, 4)
    assert torch.equal(t, torch.ones(2)), "the input changed"


@pytest.mark.parametrize("value", [(), {}, "text", None, 3, {1}, torch.Size([2, 3])])
def test_other_values_are_taken_over(value: object) -> None:
    mapped = map_tree(add_one, Tensor, value)
    assert mapped == value
    assert type(mapped) is type(value)


def test_dicts_become_plain_unless_their_type_is_kept() -> None:
    for given in (defaultdict(list, a=[torch.zeros(1)]), OrderedDict(a=[torch.zeros(1)])):
        plain = map_tree(add_one, Tensor, given)
        assert type(plain) is dict
        assert plain["a"][0] == 1
        kept = map_tree(add_one, Tensor, given, keep_dict_types=True)
        assert type(kept) is type(given)
        assert kept["a"][0] == 1
        assert given["a"][0] == 0, "the input changed"
    assert kept is not given


def test_a_packed_sequence() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    mapped = map_tree(lambda t: t.double() if t.is_floating_point() else t, Tensor, packed)
    assert isinstance(mapped, torch.nn.utils.rnn.PackedSequence)
    assert mapped.data.dtype == torch.float64
    assert torch.equal(mapped.batch_sizes, packed.batch_sizes)
