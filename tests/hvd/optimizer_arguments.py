"""What DistributedOptimizer accepts and refuses; see optimizer_table.py."""

from __future__ import annotations

from typing import Any

import torch

from tests.hvd.behaviour import Hvd, raises
from tests.hvd.optimizer_table import (
    all_warnings,
    by_hand,
    case,
    close,
    net,
    plain,
    side_by_side,
    synchronized,
    train,
    update,
    wrap,
    wrapped,
)


@case()
def wrong_arguments_are_refused(hvd: Hvd) -> None:
    model = net()
    weight, named = model[0].weight, list(model.named_parameters())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"op": op, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor not supported")
        for op in (hvd.Sum, hvd.Adasum, hvd.Min)
    ]
    wrong += [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        ({"backward_passes_per_step": -1}, "backward_passes_per_step must be > 0"),
        ({"named_parameters": model.parameters()}, "should be a sequence of tuples"),
        ({"named_parameters": dict(named)}, "should be a sequence of tuples"),
        ({"named_parameters": [["a", weight]]}, "should be a sequence of tuples"),
        ({"named_parameters": [("same", p) for _, p in named]}, "Found duplicates: same"),
        ({"named_parameters": named[:-1]}, f"Python object ids: {id(model[2].bias)}"),
        ({"groups": 0}, "groups should be a non-negative integer"),
        ({"groups": -1}, "groups should be a non-negative integer"),
        ({"groups": [["0.weight"]]}, "groups must consist of torch.Tensor."),
        ({"groups": [[weight, weight]]}, "A parameter can only appear once in groups."),
        ({"groups": [[weight], [weight]]}, "A parameter can only appear once in groups."),
    ]
    for options, text in wrong:
        with raises(ValueError, text):
            wrap(hvd, model, **options)


@case()
def names_may_be_too_many_or_absent(hvd: Hvd) -> None:
    for surplus in (True, False):
        model, other = net(), net(1)
        named = [*model.named_parameters()]
        named += [(f"other.{name}", p) for name, p in other.named_parameters()]
        optimizer = wrap(hvd, model, named_parameters=named if surplus else None)
        train(hvd, model, optimizer, range(2))
        close(model, by_hand(2))
        assert all(p.grad is None for p in other.parameters())


@case()
def parameter_names_can_be_read(hvd: Hvd) -> None:
    model, optimizer = wrapped(hvd)
    assert optimizer._parameter_names == {p: name for name, p in model.named_parameters()}
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = hvd.DistributedOptimizer(plain(groups))  # type: ignore[arg-type]
    names = ["0.0", "1.0", "1.1", "1.2"]
    expected = {p: f"allreduce.noname.{i}" for i, p in zip(names, parameters, strict=True)}
    assert optimizer._parameter_names == expected


@case()
def num_groups_is_deprecated(hvd: Hvd) -> None:
    model = net()
    with all_warnings() as warned:
        optimizer = wrap(hvd, model, num_groups=2)
    (text,) = warned
    assert "Parameter `num_groups` has been replaced by `groups`" in text
    train(hvd, model, optimizer, range(2))
    close(model, by_hand(2))


@case()
def nothing_warns_on_the_way(hvd: Hvd) -> None:
    with all_warnings() as warned:
        for step, model, optimizer, data in side_by_side(hvd, groups=2):
            update(model, optimizer, data)
            if step:
                optimizer.zero_grad()
                model(torch.ones(2, 4, dtype=torch.double)).sum().backward()
                with synchronized(optimizer):
                    pass
    assert warned == []
