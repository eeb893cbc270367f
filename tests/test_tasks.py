"""The built-in tasks, with plain torch: no launcher, no backend."""

from __future__ import annotations

import subprocess
import sys
from typing import cast

import pytest
import sklearn.datasets
import torch
import torch._dynamo  # by the first optimizer of a process; it sets variables
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain.errors import InputError
from hvdtrain.tasks import TASKS
from hvdtrain.tasks.digits import Digits
from hvdtrain.training.task import Task, load_task
from tests.environments import rows
from tests.messages import Message

# On a busy machine several threads mostly wait for each other.
pytestmark = pytest.mark.usefixtures("one_thread")

# Small sizes, with which the loss still falls quickly.
SMALL = {
    "digits": "width=8",
    "mlp": "width=32 depth=2 samples=512",
    "convnet": "width=8 stages=2 image_size=16 samples=512",
    "transformer": "width=32 layers=1 context=16 vocabulary=16 samples=512 lr=0.01",
}


def small(name: str) -> Task:
    return load_task(name, tuple(SMALL[name].split()))


def data_of(task: Task) -> tuple[TensorDataset, TensorDataset]:
    train, evaluation = task.datasets()
    return cast("TensorDataset", train), cast("TensorDataset", evaluation)


def train(task: Task, num_steps: int) -> list[float]:
    """Train, and return the loss of every step."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    losses: list[float] = []
    data = data_of(task)[0]
    while len(losses) < num_steps:
        for batch in DataLoader(data, 32, shuffle=True):
            loss = task.loss(model, batch)
            assert isinstance(loss, Tensor)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses[:num_steps]


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_goes_down(name: str) -> None:
    losses = train(small(name), 40)
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


@pytest.mark.parametrize("name", TASKS)
def test_metrics_are_scalar_means_over_samples(name: str) -> None:
    task = small(name)
    model = task.model().eval()
    inputs, targets = data_of(task)[1][:16]

    def metrics(part: slice) -> dict[str, Tensor]:
        return task.metrics(model, (inputs[part], targets[part]))

    with torch.no_grad():
        whole, first, rest = metrics(slice(16)), metrics(slice(4)), metrics(slice(4, 16))
    assert whole.keys() == {"accuracy", "loss"}
    for key, value in whole.items():
        assert value.ndim == 0
        torch.testing.assert_close(value, (4 * first[key] + 12 * rest[key]) / 16)


@pytest.mark.parametrize("name", TASKS)
def test_the_data_are_the_same_whatever_the_random_state(name: str) -> None:
    torch.manual_seed(1)
    one = [t for data in data_of(small(name)) for t in data.tensors]
    torch.manual_seed(2)
    state = torch.get_rng_state()
    other = [t for data in data_of(small(name)) for t in data.tensors]
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(state, torch.get_rng_state()), "the data took from the run's random numbers"


@pytest.mark.exhaustive
def test_the_digits_are_those_of_scikit_learn() -> None:
    """The digits equal scikit-learn's, which the task itself does not import: it takes seconds."""
    training, evaluation = Digits().datasets()
    data = sklearn.datasets.load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    for part, chosen in ((evaluation, order[:360]), (training, order[360:])):
        assert isinstance(part, TensorDataset)
        images, labels = part.tensors
        assert torch.equal(images[:, 0], torch.from_numpy(data.images / 16).float()[chosen])
        assert torch.equal(labels, torch.from_numpy(data.target)[chosen])
        assert images.is_contiguous()
    code = "import sys; from hvdtrain.tasks.digits import Digits; Digits().datasets(); "
    code += "sys.exit('sklearn' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_transformer_sees_no_later_token() -> None:
    model = small("transformer").model().eval()
    tokens = torch.zeros(1, 16, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 10:] = 1
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize(
    ("name", "setting"),
    rows("""
    mlp | width=0
    mlp | depth=1.5
    mlp | samples=many
    mlp | classes=True
    mlp | optimizer=lion
    mlp | optimizer=[1]
    mlp | lr=-1
    convnet | blocks=-2
    convnet | image_size=4
    transformer | heads=3
    transformer | lr=nan
    """),
)
def test_a_bad_argument_is_one_line(name: str, setting: str, message: Message) -> None:
    with message.raises(InputError):
        load_task(name, (setting,))
