"""`hvdtrain predict`: write what trained weights predict of each sample."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.command_options import PATH, option
from hvdtrain.cli.evaluate import inference_command, opened
from hvdtrain.errors import InputError


@inference_command(
    "predict",
    option(
        "--output -o",
        "Where to write: FILE.pt (torch.save), FILE.npy (one array) or FILE.jsonl (a line by "
        "sample).",
        required=True,
        type=PATH,
        metavar="FILE",
    ),
)
def command(path: Path, output: Path, **values: Any) -> None:
    """Predict each sample of the task's evaluation data, in their order, on any number of ranks.

    What is written is what the task's method predict(net, batch) returns; by default, the outputs
    of the model.

    \b
    hvdtrain predict runs/20260101-120000-digits-ddp --output predictions.npy
    torchrun --nproc-per-node 2 -m hvdtrain predict model.pt --task my.py:MyTask -o out.jsonl

    \b
    exit code 0   written
              2   no weights there, damaged, or not of the task's model; or the file cannot be
                  written, which is tried before anything is computed
    """
    from hvdtrain.system import files
    from hvdtrain.training import predictions
    from hvdtrain.training.weights import check_suffix

    check_suffix(output, predictions.SUFFIXES)
    with opened(path, values) as inference, contextlib.ExitStack() as stack:
        backend = inference.backend
        is_first_rank = backend.world.rank == 0
        with backend.share_errors(), _writing(output):
            if is_first_rank:
                file = stack.enter_context(files.replacing(output))
        made = inference.predict()
        with backend.share_errors(), _writing(output):
            if is_first_rank:
                predictions.write(made, output.suffix, file)
                stack.close()  # replaces the file
        if is_first_rank:
            click.echo(f"done     {predictions.num_rows(made)} samples: {output}")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
