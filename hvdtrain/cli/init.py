"""`hvdtrain init`: write a task to begin with."""

from __future__ import annotations

from pathlib import Path

import click

from hvdtrain.cli.command_options import PATH
from hvdtrain.errors import InputError, printable

TEMPLATE = """\
# A task for hvdtrain. It has no code for ranks, devices or engines.

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hvdtrain import Task


class MyTask(Task):
    def model(self):  # on the CPU; hvdtrain moves it to the device and wraps it
        return nn.Linear(8, 1)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def datasets(self):  # for training and evaluation; each rank gets its share of both
        x = torch.randn(1280, 8, generator=torch.Generator().manual_seed(0))
        y = x.sum(1, keepdim=True)
        return TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:], y[1024:])

    def loss(self, net, batch):
        # The loss of this rank's batch. hvdtrain averages the gradients over all ranks.
        x, y = batch
        return nn.functional.mse_loss(net(x), y)
"""


@click.command("init")
@click.argument("path", metavar="FILE.py", type=PATH)
def command(path: Path) -> None:
    """Write a task of 25 lines to FILE.py, from which you make your own.

    \b
    hvdtrain init my.py
    torchrun --nproc-per-node 2 -m hvdtrain --task my.py:MyTask
    """
    if path.suffix != ".py":
        raise InputError(f"{path} does not end in .py; give a name such as my.py")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(TEMPLATE)
    except FileExistsError:
        raise InputError(f"{path} exists already; give another name, or remove it") from None
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
    click.echo(
        printable(
            f"wrote    {path}, with the task MyTask: model, optimizer, data and loss\n"
            f"next     hvdtrain --task {path}:MyTask\n"
            f"         torchrun --nproc-per-node 2 -m hvdtrain --task {path}:MyTask"
        )
    )
