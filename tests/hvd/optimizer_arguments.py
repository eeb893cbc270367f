"""What DistributedOptimizer accepts and refuses; see optimizer_table.py."""

from __future__ import annotations

import torch

from tests.hvd.behaviour import Hvd, raises
from tests.hvd.optimizer_table import Warned, by_hand, case, close, net, plain, train, wrap


@case()
def predivide_goes_with_average_only(hvd: Hvd) -> None:
    text = "gradient_predivide_factor not supported with op != Average"
    for op in (hvd.Sum, hvd.Adasum, hvd.Min):
        with raises(ValueError, text):
            wrap(hvd, net(), op=op, gradient_predivide_factor=2.0)


@case()
def passes_must_be_positive(hvd: Hvd) -> None:
    for passes in (0, -1):
        with raises(ValueError, "backward_passes_per_step must be > 0"):
            wrap(hvd, net(), backward_passes_per_step=passes)


@case()
def names_come_in_tuples(hvd: Hvd) -> None:
    model = net()
    text = (
        "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
        "model.named_parameters()."
    )
    for wrong in (model.parameters(), dict(model.named_parameters()), [["a", model[0].weight]]):
        with raises(ValueError, text):
            wrap(hvd, model, named_parameters=wrong)


@case()
def names_are_unique(hvd: Hvd) -> None:
    model = net()
    named = [("same", p) for p in model.parameters()]
    text = "Parameter names in named_parameters must be unique. Found duplicates: same"
    with raises(ValueError, text):
        wrap(hvd, model, named_parameters=named)


@case()
def every_parameter_has_a_name(hvd: Hvd) -> None:
    model = net()
    text = (
        "named_parameters was specified, but one or more model parameters were not named. "
        f"Python object ids: {id(model[2].bias)}"
    )
    with raises(ValueError, text):
        wrap(hvd, model, named_parameters=list(model.named_parameters())[:-1])


@case()
def names_may_be_more_than_parameters(hvd: Hvd) -> None:
    model, other = net(), net(1)
    named = [*model.named_parameters(), *((f"other.{k}", p) for k, p in other.named_parameters())]
    optimizer = wrap(hvd, model, named_parameters=named)
    train(hvd, model, optimizer, range(2))
    close(model, by_hand(2))
    assert all(p.grad is None for p in other.parameters())


@case()
def names_may_be_a_generator_or_absent(hvd: Hvd) -> None:
    for named in (net().named_parameters, lambda: None):
        model = net()
        optimizer = wrap(hvd, model, named_parameters=named() and model.named_parameters())
        train(hvd, model, optimizer, range(2))
        close(model, by_hand(2))


@case()
def parameter_names_can_be_read(hvd: Hvd) -> None:
    model = net()
    optimizer = wrap(hvd, model)
    assert optimizer._parameter_names == {p: name for name, p in model.named_parameters()}
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    optimizer = hvd.DistributedOptimizer(plain(groups))  # type: ignore[arg-type]
    names = ["0.0", "1.0", "1.1", "1.2"]
    expected = {p: f"allreduce.noname.{i}" for i, p in zip(names, parameters, strict=True)}
    assert optimizer._parameter_names == expected


@case()
def groups_are_a_number_or_lists(hvd: Hvd) -> None:
    text = "groups should be a non-negative integer or a list of list of torch.Tensor."
    for wrong in (0, -1):
        with raises(ValueError, text):
            wrap(hvd, net(), groups=wrong)
    model = net()
    with raises(ValueError, "groups must consist of torch.Tensor."):
        wrap(hvd, model, groups=[["0.weight"]])
    for twice in ([[model[0].weight, model[0].weight]], [[model[0].weight], [model[0].weight]]):
        with raises(ValueError, "A parameter can only appear once in groups."):
            wrap(hvd, model, groups=twice)


@case()
def num_groups_is_deprecated(hvd: Hvd) -> None:
    text = "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0."
    model = net()
    with Warned() as warned:
        optimizer = wrap(hvd, model, num_groups=2)
    assert warned == [text]
    train(hvd, model, optimizer, range(2))
    close(model, by_hand(2))


@case()
def nothing_warns_on_the_way(hvd: Hvd) -> None:
    model = net()
    with Warned() as warned:
        optimizer = wrap(hvd, model, groups=2)
        train(hvd, model, optimizer, range(3))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4, dtype=torch.double)).sum().backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
    assert warned == []


@case(sizes=(2, 3))
def adasum_is_for_the_global_set(hvd: Hvd) -> None:
    small = hvd.add_process_set([0])
    try:
        with raises(NotImplementedError, "Adasum does not support non-global process sets yet."):
            wrap(hvd, net(), op=hvd.Adasum, process_set=small)
    finally:
        assert hvd.remove_process_set(small)


@case()
def arguments_by_position(hvd: Hvd) -> None:
    model = net()
    optimizer = hvd.DistributedOptimizer(
        plain(model.parameters()),
        model.named_parameters(),
        hvd.Compression.none,
        1,
        hvd.Average,
        2.0,
        0,
        None,
        False,
        hvd.global_process_set,
    )
    train(hvd, model, optimizer, range(2))
    close(model, by_hand(2, plain))
